"""A user's ``training_step`` as something that can be suspended in the middle and resumed (layer T).

    step = ResumableStep(lambda: module.training_step(batch, 3), seed=stream_seed(seed, t, k))
    match step.start():                  #  runs until the step calls `suspend`, or ends
        Suspended(value): step.resume(y) #  there `suspend` returns y
        Done(loss): ...

Several steps may be suspended at a time and resumed in any order. Each finds torch as it left it, whatever ran
meanwhile, and so does the caller: see `torch_state` for what is swapped and what is refused. A step's stack is a
greenlet: it runs in the caller's thread, so ``threading.local`` and what is bound to the thread work as without it. To
suspend and resume takes 1 µs, with all that is swapped 30 µs.

The mechanism is ours; the paper (Joint Dynamic DP+MP) does not say how a training step gets into a pipeline.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.torch_state import Surroundings, Switches, hooks_taken_off


@dataclass(frozen=True, slots=True)
class Suspended:
    """The step waits; ``value`` is what it called `ResumableStep.suspend` with."""

    value: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The step has returned ``value``."""

    value: Any


class StepClosed(BaseException):
    """Raised where a step is suspended when it is closed. Not an `Exception`: user code must not take it for one."""


_CURRENT: contextvars.ContextVar[ResumableStep | None] = contextvars.ContextVar("current_step", default=None)


def current_step() -> ResumableStep | None:
    """Returns the step whose body is running here; None outside, and in threads which a body starts."""
    return _CURRENT.get()


class ResumableStep:
    """Runs ``body`` in pieces, in the thread that starts it.

    The body starts with the switches of torch that are in force at `start` (grad mode, autocast, ...), in a copy of
    the caller's `contextvars` context, and keeps its own from then on. Random streams are seeded for it at `start`, and
    again when it is resumed; the caller keeps its own, see `nothing_drawn`. A step that is left suspended must be
    closed: the garbage collector does not see into its stack.

    Args:
        body: called without arguments.
        seed: of its random streams, e.g. ``stream_seed(seed, global_step, micro_batch)`` with the number of the
            micro-batch in the global batch: then what is drawn depends neither on the order in which steps are
            interleaved nor on the plan.

    Attributes:
        suspensions: how often it has been suspended so far.
        ended: its body has returned, raised or been closed.
    """

    def __init__(self, body: Callable[[], Any], *, seed: int) -> None:
        self._body: Callable[[], Any] | None = body
        self._seed = seed
        self._stack = greenlet(self._run)
        self._surroundings: Surroundings | None = None  # None: it has not started
        self._in_force: Switches | None = None  # where a switch leads to; None: the body has ended
        self._closing = self.ended = False
        self.suspensions = 0

    # ---- outside ---------------------------------------------------------------------------------------------------

    def start(self) -> Suspended | Done:
        """Runs the body until it suspends itself or returns; once.

        Raises:
            BaseException: what the body raises, with its traceback.
        """
        self._surroundings = Surroundings.now()
        context = contextvars.copy_context()
        context.run(_CURRENT.set, self)
        self._stack.gr_context = context
        return self._switch(self._stack.switch)

    def resume(self, value: Any = None) -> Suspended | Done:
        """Lets `suspend` return ``value`` in the body, and runs on; under what cannot be swapped, as it was at `start`.

        Raises:
            BaseException: what the body raises, with its traceback.
        """
        return self._switch(self._stack.switch, value)

    def close(self) -> None:
        """Ends the step: raises `StepClosed` where it is suspended, so that its ``finally`` blocks run.

        Does nothing to a step that has ended or not started.

        Raises:
            BaseException: what the body raises instead of `StepClosed`.
        """
        if self._surroundings is not None and not self.ended:
            self._closing = True
            with suppress(StepClosed):
                self._switch(self._stack.throw, StepClosed())

    def _switch(self, enter: Callable[..., Any], *message: Any) -> Suspended | Done:
        """Goes inside, and comes back to the switches that are in force."""
        self._in_force = before = Switches.now()
        self._stack.parent = getcurrent()  # where `_suspend` and the end lead to
        try:
            return enter(*message)
        finally:
            before.put(over=self._in_force)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def suspend(self, value: Any, *, without_hooks: bool = False) -> Any:
        """Called by the body: `start` or `resume` return ``Suspended(value)``.

        Args:
            value: what the caller of `start` or `resume` gets.
            without_hooks: take off the saved-tensor hooks that the body has put on, and put them on again afterwards.

        Returns:
            What the step is resumed with.

        Raises:
            RuntimeError: the body holds open what cannot be swapped (`torch_state`).
            StepClosed: the step is closed.
        """
        if self._closing:  # a finally block calls the backbone
            raise StepClosed
        assert self._surroundings is not None
        if without_hooks:
            with hooks_taken_off(self._surroundings.hooks):
                return self._suspend(value)
        return self._suspend(value)

    def _suspend(self, value: Any) -> Any:
        assert self._stack.parent is not None and self._surroundings is not None
        if what := self._surroundings.change():
            raise RuntimeError(
                f"the backbone of a pipeline cannot be called inside {what}. (Its layers are computed by other"
                " processes, while this training step waits and others run.)"
            )
        self.suspensions += 1
        self._in_force = switches = Switches.now()
        try:
            return self._stack.parent.switch(Suspended(value))
        finally:
            switches.put(over=self._in_force)
            seed_streams(stream_seed(self._seed, self.suspensions))

    def _run(self) -> Done:
        body, self._body = self._body, None  # what it holds, e.g. the batch, goes with its end
        assert body is not None
        try:
            torch.clear_autocast_cache()  # as `Switches.put` does
            seed_streams(self._seed)
            return Done(body())
        finally:
            self.ended, self._in_force = True, None
