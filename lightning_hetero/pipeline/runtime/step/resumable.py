"""A user's ``training_step`` as something that can be suspended in the middle and resumed (layer T).

    step = ResumableStep(lambda: module.training_step(batch, 3), carrier=carrier, seed=stream_seed(seed, t, k))
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
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from operator import index
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.torch_state import Surroundings, Switches, hooks_taken_off

__all__ = ["Carrier", "Done", "ResumableStep", "StepClosed", "Suspended", "current_step", "stream_seed"]


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


class _Phase(Enum):
    NEW = "not started"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"


# Messages besides the values: inwards, an exception to raise; outwards, an exception that came out.
@dataclass(frozen=True, slots=True)
class _Throw:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


_CURRENT: contextvars.ContextVar[ResumableStep | None] = contextvars.ContextVar("current_step", default=None)


def current_step() -> ResumableStep | None:
    """Returns the step whose body is running here; None outside, and in threads which a body starts."""
    return _CURRENT.get()


class Carrier:
    """The steps that are open, which their owner closes with it; usable as a context manager.

    Not left to the garbage collector: it does not see into the stack of a suspended step, which holds its carrier.
    """

    def __init__(self) -> None:
        self._open: dict[int, ResumableStep] = {}  # in order of opening
        self._closed = False

    def opened(self, step: ResumableStep) -> None:
        """Takes note of a step that has begun.

        Raises:
            RuntimeError: the carrier is closed.
        """
        if self._closed:
            raise RuntimeError("this carrier is closed: make a new one for further steps")
        self._open[id(step)] = step

    def ended(self, step: ResumableStep) -> None:
        """Takes note of a step's end."""
        self._open.pop(id(step), None)

    def close_steps(self) -> None:
        """Closes every step still suspended, the last one begun first, so that its ``finally`` blocks run.

        Raises:
            BaseException: the first that one of them raised meanwhile; all are closed nevertheless.
        """
        first: BaseException | None = None
        for step in reversed(list(self._open.values())):
            try:
                step.close()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Closes the steps, see `close_steps`; no more are begun. May be called again."""
        self._closed = True
        self.close_steps()

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ResumableStep:
    """Runs ``body`` in pieces.

    The body starts with the switches of torch that are in force at `start` (grad mode, autocast, ...), in a copy of
    the caller's `contextvars` context, and keeps its own from then on. Random streams are seeded for it at `start`, and
    anew when it is resumed; the caller keeps its own, see `nothing_drawn`.

    Args:
        body: called without arguments.
        carrier: what closes the step if it is left suspended.
        seed: of its random streams, e.g. ``stream_seed(seed, global_step, micro_batch)`` with the number of the
            micro-batch in the global batch: then what is drawn depends neither on the order in which steps are
            interleaved nor on the plan.

    Raises:
        TypeError: ``body`` cannot be called, ``carrier`` is none, or ``seed`` is no integer.
        ValueError: ``seed`` outside of [0, 2**63).
    """

    def __init__(self, body: Callable[[], Any], *, carrier: Carrier, seed: int) -> None:
        if not callable(body):
            raise TypeError(f"body={body!r} must be callable without arguments, e.g. lambda: module.training_step(...)")
        if not isinstance(carrier, Carrier):
            raise TypeError(f"carrier={carrier!r} must be a Carrier")
        if not 0 <= index(seed) < 2**63:
            raise ValueError(f"seed={seed!r} must be in [0, 2**63): make it with stream_seed(...)")
        self._body: Callable[[], Any] | None = body
        self._carrier = carrier
        self._seed = index(seed)
        self._phase = _Phase.NEW
        self._stack: greenlet | None = None
        self._thread = 0
        self._surroundings: Surroundings | None = None
        self._in_force: Switches | None = None  # where a switch leads to; None: the body has ended
        self._suspensions = 0
        self._closing = False

    @property
    def suspensions(self) -> int:
        """How often it has been suspended so far."""
        return self._suspensions

    @property
    def ended(self) -> bool:
        """Whether its body has returned, raised or been closed."""
        return self._phase is _Phase.ENDED

    # ---- outside ---------------------------------------------------------------------------------------------------

    def start(self) -> Suspended | Done:
        """Runs the body until it suspends itself or returns.

        Raises:
            RuntimeError: it has been started before, or its carrier is closed.
            BaseException: what the body raises, with its traceback.
        """
        self._require(_Phase.NEW, "start")
        self._carrier.opened(self)
        switches, self._surroundings = Switches.now(), Surroundings.now()
        context = contextvars.copy_context()
        context.run(_CURRENT.set, self)
        self._stack, self._thread = greenlet(self._run), threading.get_ident()
        self._stack.gr_context = context
        return self._switch(None, switches)

    def resume(self, value: Any = None) -> Suspended | Done:
        """Lets `suspend` return ``value`` in the body, and runs on.

        Raises:
            RuntimeError: it is not suspended; or what cannot be swapped, e.g. ``inference_mode``, is not as it was at
                `start`.
            BaseException: what the body raises, with its traceback.
        """
        self._require(_Phase.SUSPENDED, "resume")
        assert self._surroundings is not None
        if what := self._surroundings.change():
            raise RuntimeError(f"a step is resumed under other circumstances than it was started in. {what}")
        return self._switch(value, Switches.now())

    def close(self) -> None:
        """Ends the step: raises `StepClosed` where it is suspended, so that its ``finally`` blocks run.

        Does nothing to a step that has ended; one that has not started never will.

        Raises:
            RuntimeError: called by the body itself.
            BaseException: what the body raises instead of `StepClosed`.
        """
        if self._phase is _Phase.RUNNING:
            raise RuntimeError("a step cannot close itself: raise an exception or return")
        if self._phase is _Phase.NEW:
            self._end()
        if self._phase is _Phase.ENDED:
            return
        with suppress(StepClosed):
            self._switch(_Throw(StepClosed()), Switches.now())

    def _switch(self, message: Any, before: Switches) -> Suspended | Done:
        """Goes inside with ``message``, and comes back to the switches ``before``."""
        assert self._stack is not None
        if threading.get_ident() != self._thread:
            raise RuntimeError("a step must be resumed and closed in the thread that started it")
        self._phase, self._in_force = _Phase.RUNNING, before
        self._stack.parent = getcurrent()  # where `_suspend` and the end lead to
        try:
            outcome = self._stack.switch(message)
        finally:
            before.put(over=self._in_force)
            if self._phase is _Phase.ENDED:
                self._carrier.ended(self)
                self._stack = None
        if not isinstance(outcome, _Raised):
            return outcome
        try:
            raise outcome.error
        finally:
            del outcome  # error -> traceback -> this frame -> error

    # ---- inside ----------------------------------------------------------------------------------------------------

    def suspend(self, value: Any, *, without_hooks: bool = False) -> Any:
        """Called by the body: `start` or `resume` return ``Suspended(value)``.

        Args:
            value: what the caller of `start` or `resume` gets.
            without_hooks: take off the saved-tensor hooks that the body has put on, and put them on again afterwards.

        Returns:
            What the step is resumed with.

        Raises:
            RuntimeError: not called by the body; or the body holds open what cannot be swapped (`torch_state`).
            StepClosed: the step is closed.
        """
        if current_step() is not self or self._phase is not _Phase.RUNNING:
            raise RuntimeError("suspend() is for the body of the step that is running: use current_step().suspend(...)")
        if self._closing:  # a finally block calls the backbone
            raise StepClosed
        assert self._surroundings is not None
        if without_hooks:
            with hooks_taken_off(self._surroundings.hooks):
                return self._suspend(value)
        return self._suspend(value)

    def _suspend(self, value: Any) -> Any:
        assert self._stack is not None and self._stack.parent is not None and self._surroundings is not None
        if what := self._surroundings.change():
            raise RuntimeError(
                f"the backbone of a pipeline cannot be called inside {what}. (Its layers are computed by other"
                " processes, while this training step waits and others run.)"
            )
        self._suspensions += 1
        self._in_force = switches = Switches.now()
        self._phase = _Phase.SUSPENDED
        message = self._stack.parent.switch(Suspended(value))
        self._phase = _Phase.RUNNING
        switches.put(over=self._in_force)
        seed_streams(stream_seed(self._seed, self._suspensions))
        if isinstance(message, _Throw):
            self._closing = True
            raise message.error
        return message

    def _run(self, _: None) -> Done | _Raised:
        assert self._body is not None
        try:
            torch.clear_autocast_cache()  # as `Switches.put` does
            seed_streams(self._seed)
            return Done(self._body())
        except BaseException as error:
            return _Raised(error)
        finally:
            self._end()

    def _end(self) -> None:
        self._phase, self._in_force = _Phase.ENDED, None
        self._body = None  # what it holds, e.g. the batch, is not needed any more

    def _require(self, phase: _Phase, what: str) -> None:
        if self._phase is not phase:
            raise RuntimeError(f"cannot {what} a step that is {self._phase.value}; it must be {phase.value}")
