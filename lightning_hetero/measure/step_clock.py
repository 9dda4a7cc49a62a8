"""Measures one rank's own work per training step, free of any waiting for peers (layer T).

    fetch   transfer | forward ........ backward | gradient exchange | optimizer
    [1]-----[1]------[2]---------------------[3]..................[4]----------[5]

[1] `arm` when the batch was fetched, and `transferring` around its way to the device, [2] `start` from a forward
pre-hook *inside* the wrapper, because DDP broadcasts buffers before the module's forward and that waits for peers; [3]
`backward_ended` from an autograd callback which runs when the last gradient has been computed and before DDP waits for
the buckets; [4] `exchanged` when ``backward()`` has returned: [3]-[4] is waiting plus communication; [4]-[5], if
`updating` was called, counts for the next step.

All are stamps of the device, see `lightning_hetero.measure.device`: a host that runs ahead of its device has only put
work into a queue when a call returns, and where it waits for the queue, it waits for the work of peers, too. A stream
that runs empty, because the host is late, is this rank's time.

Modules that wait for peers inside [2]-[3] are left out, and their waiting is added to that of [3]-[4]: those named to
`StepProbe`, and what `torch.distributed.fsdp.fully_shard` does around a module, with its copies:

    forward    | all-gather |  module
    backward   | reduce-scatter |  module  | all-gather |  what used its outputs

The collectives of tensor parallelism are not left out: its ranks have the same part of a batch. Which stamps are free
of waiting was measured, see docs/theory/balanced.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_hetero.measure.device import HostDevice, Stamp


def when_backward_ends(loss: Tensor, callback: Callable[[], None]) -> None:
    """Calls ``callback`` once when the backward pass through ``loss`` has computed its last gradient.

    The callback is queued from a hook on ``loss``, so before DDP queues its own final callback; final callbacks
    run first in, first out, so ours runs before DDP waits for the gradient exchange. It also fires under
    ``no_sync`` and needs no communication hook. `queue_callback` is not a documented API of torch, although FSDP
    and DDP rest on it: `tests/ranks/measure/test_step_clock.py` pins its behaviour to the installed version.
    """
    loss.register_hook(lambda grad: _queue_callback(callback))


def _queue_callback(callback: Callable[[], object]) -> None:
    """Calls it at the end of the backward pass that runs."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore


def needing_gradient(value: Any) -> Iterator[Tensor]:
    """Returns the tensors in arguments or outputs of a module whose gradients will be computed."""
    for leaf in tree_leaves(value) if torch.is_grad_enabled() else ():
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from needing_gradient([getattr(leaf, field.name) for field in fields(leaf)])


def _viewed(value: Any, hook: Callable[[Any], None]) -> Any:
    """Returns ``value`` with views of `needing_gradient`, before whose backward the hook runs; itself if none does."""
    if not any(True for _ in needing_gradient(value)):
        return value
    if isinstance(value, Tensor):
        view = value.view_as(value)
        assert view.grad_fn is not None
        view.grad_fn.register_prehook(hook)  # so it comes behind all hooks on the view itself
        return view
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{k: new for k, v in old.items() if (new := _viewed(v, hook)) is not v})
    return tree_map(partial(_viewed, hook=hook), value)


def _hook_before_fsdp(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Registers a forward hook right before FSDP's: others before it, e.g. of tensor parallelism, change the output."""
    handle, hooks = module.register_forward_hook(hook, with_kwargs=True), cast(Any, module._forward_hooks)
    origins = enumerate(getattr(one, "__module__", "") for one in hooks.values())
    first = next((i for i, origin in origins if origin.startswith("torch.distributed.fsdp")), 0)
    for key in list(hooks)[first:-1]:
        hooks.move_to_end(key)
    return handle


class Stopwatch:
    """Adds up a device's time between `resume` and `pause`; a step is known once its last stamp is reached.

    On the host that is at once, on an accelerator (``device``) a step or two later: nothing waits here but `wait`.

    Attributes:
        last: the latest end of an interval, or what replaces it; None: there was no interval.
    """

    def __init__(self, device: HostDevice) -> None:
        self._stamp = partial(device.stamp, timing=True)
        self.last: Stamp | None = None
        self._since: Stamp | None = None
        self._pieces: list[tuple[Stamp, Stamp, float]] = []  # begin, end, and what it counts at most [s]
        self._done: deque[list[tuple[Stamp, Stamp, float]]] = deque()

    @property
    def running(self) -> bool:
        """Whether time is being added up now."""
        return self._since is not None

    def resume(self, since: Stamp | None = None) -> None:
        """Adds up from now on, or from an earlier stamp."""
        if self._since is None:
            self._since = since or self._stamp()

    @property
    def passed_s(self) -> float:
        """Seconds so far of the step that is open; waits for the device [s]."""
        pieces = [*self._pieces, *([(self._since, self._stamp(), math.inf)] if self._since is not None else [])]
        if pieces:
            pieces[-1][1].wait()
        return math.fsum(begin.seconds_until(end) for begin, end, _ in pieces)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of the time; may be nested."""
        was_running = self.running
        self.pause()
        try:
            yield
        finally:
            if was_running:
                self.resume()

    def pause(self) -> Stamp | None:
        """Returns when, if it was running."""
        if self._since is None:
            return None
        self.last = self._stamp()
        self._pieces.append((self._since, self.last, math.inf))
        self._since = None
        return self.last

    def drop(self) -> None:
        """Pauses; what has passed since it was resumed does not count."""
        self._since = None

    def add(self, most_s: float) -> None:
        """Adds the time since the latest interval, at most so much of it."""
        if self.last is not None:
            self._pieces.append((self.last, self._stamp(), most_s))

    def close(self) -> None:
        """Ends the step."""
        self.pause()
        self._done.append(self._pieces)
        self._pieces = []

    @property
    def known(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._done) and all(end.reached() for _, end, _ in self._done[0])

    def take(self) -> float | None:
        """Returns the seconds of the oldest finished step not yet taken, or ``None`` if it is not known yet."""
        if not self.known:
            return None
        return math.fsum(min(begin.seconds_until(end), most_s) for begin, end, most_s in self._done.popleft())

    def wait(self) -> None:
        """Waits until all finished steps are known."""
        if self.last is not None:
            self.last.wait()

    def reset(self) -> None:
        """Forgets the open step, e.g. when it is abandoned; closed steps can still be taken."""
        self._since, self._pieces = None, []


class StepProbe:
    """Times the steps of one rank; the owner calls the stamps [1]-[5] of the module docstring.

    It keeps the host at most two steps ahead of the device, so that a step is known when it can still be answered.

    Args:
        device: where the module computes.
        waiting: module types that wait for peers in a step; the stopwatch is paused there, as in FSDP's hooks.
    """

    def __init__(self, device: HostDevice, *, waiting: Iterable[type[nn.Module]] = ()) -> None:
        self._watch = Stopwatch(device)
        self._exchange = Stopwatch(device)
        self._waiting = tuple(waiting)
        self._handles: list[Any] = []
        self._armed = False
        self._running = False
        self._ends: deque[Stamp] = deque()  # of steps that the device may still have before it
        self.companion: StepProbe | None = None  # is paused with this one where its owner says so

    def begin(self) -> None:
        """Opens a step that counts from now on."""
        self.arm()
        self.start()

    @property
    def passed_s(self) -> float:
        """Own seconds so far of the step that is open; waits for the device [s]."""
        return self._watch.passed_s

    def attach(self, module: nn.Module) -> None:
        """Hooks the module's forward (start stamp) and its submodules that wait (pauses). Undone by `detach`."""
        self.detach()
        handles = self._handles
        for child in module.modules():
            if isinstance(child, self._waiting):
                handles.append(child.register_forward_pre_hook(self._enter_waiting, with_kwargs=True))
                handles.append(child.register_forward_hook(self._leave_waiting, with_kwargs=True))
            elif isinstance(child, FSDPModule):
                apart: Any = torch.compiler.disable  # as FSDP's own hooks are
                enter, leave, gather = apart(self._enter_waiting), apart(self._leave_waiting), apart(self._will_gather)
                handles.append(child.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                handles.append(child.register_forward_pre_hook(leave, with_kwargs=True))
                handles.append(_hook_before_fsdp(child, gather))
        handles.append(module.register_forward_pre_hook(lambda *_: self.start()))

    # Hooks on tensors, not the module's full backward hooks: those forbid `ReLU(inplace=True)` behind the module.
    def _enter_waiting(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pauses in forward; views of the inputs, whose gradients come from this module alone, end its backward."""
        if not self._running:
            return None
        self.pause()
        view = partial(_viewed, hook=lambda grad: self.resume())
        return tuple(map(view, args)), {name: view(value) for name, value in kwargs.items()}

    def _leave_waiting(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        """Ends the pause in forward; the gradient of what comes out begins the one in backward.

        That is the module's output, or its arguments if the hooks before it wait. Without a gradient to pass on nothing
        would end it, and neither `SyncBatchNorm` nor FSDP communicates then before backward is over.
        """
        if not self._running:
            return self.start()  # where nobody calls the whole module, as under Lightning's `ModelParallelStrategy`
        self.resume()
        inputs = list(needing_gradient((args, kwargs)))
        for out in (needing_gradient(output) if output else inputs) if inputs else ():
            out.register_hook(lambda grad: self.pause())

    def _will_gather(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Pauses in backward around FSDP's hooks on the outputs: before the first of them, until their node runs.

        And around FSDP's last callback, which one of them queues: it waits for the scatters that have not been waited
        for. An input that is passed on is FSDP's own, for which `_leave_waiting` has begun the pause.
        """
        if not self._running:
            return
        passed_on = {id(tensor) for tensor in needing_gradient((args, kwargs))}
        for out in needing_gradient(output):
            if out.grad_fn is not None and id(out) not in passed_on:
                self._pause_in_backward(out, out.grad_fn)

    def _pause_in_backward(self, out: Tensor, node: Node) -> None:
        ends: list[AbstractContextManager[None]] = []

        def before(grad: Tensor) -> None:
            self.pause()
            ends.append(self.paused())
            _queue_callback(ends[-1].__enter__)

        def behind(grads: Any) -> None:
            _queue_callback(partial(ends.pop().__exit__, None, None, None))
            self.resume()

        out.register_hook(before)
        node.register_prehook(behind)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arm(self, fetch_s: float = 0.0) -> None:
        """Opens a step; the next `start` counts.

        Args:
            fetch_s: the host was so long about the batch just now; it counts as far as the device had nothing to do.
        """
        if self._exchange.last is not None:
            self._ends.append(self._exchange.last)
        if len(self._ends) > 1:
            self._ends.popleft().wait()
        if self._running or self._armed:  # the step before never finished (exception, skipped batch)
            self._watch.reset()
            self._exchange.reset()
        elif self._exchange.running:  # broken off when its own work was done
            self._exchange.close()
        self._watch.drop()
        self._armed, self._running = True, False
        if fetch_s:
            self._watch.add(fetch_s)

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Around the batch's way to the device."""
        if self._armed:
            self._watch.resume()
        yield
        self._watch.pause()

    def updating(self) -> None:
        """From here until `updated` the optimizer works: for the step that is measured next."""
        if not self._running:
            self._watch.drop()  # a closure that runs twice
            self._watch.resume()

    def updated(self) -> None:
        """Stamp [5]."""
        if not self._running:
            self._watch.pause()

    def start(self) -> None:
        """Stamp [2]. Only the first call after `arm` counts: users call ``self(x)`` inside ``training_step``."""
        if self._armed:
            self._armed, self._running = False, True
            self._watch.resume()

    def pause(self) -> None:
        """Waiting begins."""
        if self._running and (now := self._watch.pause()) is not None:
            self._exchange.resume(now)

    def resume(self) -> None:
        """Waiting ends."""
        if self._running:
            self._watch.resume(self._exchange.pause())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside, e.g. a collective of the user's, is no own work but waiting; may be nested."""
        with nullcontext() if self.companion is None else self.companion.paused(), ExitStack() as stack:
            if self._running and self._watch.running:
                self.pause()
                stack.callback(self.resume)
            else:
                stack.enter_context(self._watch.paused())
            yield

    def exchanging(self, value: Tensor, exchange: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns what a collective makes of a tensor that needs a gradient, for which its backward pass waits."""
        out = exchange(_viewed(value, lambda grads: self.resume()))
        out.register_hook(lambda grad: self.pause())
        return out

    def backward_ended(self) -> None:
        """Stamp [3]: own gradients are complete."""
        if self._running:
            self._watch.pause()
            self._exchange.resume(self._watch.last)

    def exchanged(self) -> None:
        """Stamp [4]: ``backward()`` has returned."""
        if not self._exchange.running:
            return
        if self._running:
            self._exchange.pause()
        else:
            self._exchange.close()
        self._watch.last = self._exchange.last  # a batch that is fetched now is fetched behind it

    def close(self) -> None:
        """Ends the step's work; what comes later belongs to the next one, except the exchange that is under way."""
        if not self._running:
            return
        self._running = False
        self._watch.close()
        if not self._exchange.running:
            self._exchange.close()

    def take(self) -> float | None:
        """Returns own seconds of the oldest closed step, ``None`` while the device has not come to its end."""
        return self._watch.take()

    def take_wait(self) -> float | None:
        """The same for the seconds that it spent in gradient exchanges, and in modules that wait for peers."""
        return self._exchange.take()

    def take_both(self) -> tuple[float, float] | None:
        """Returns own seconds and those in gradient exchanges of the oldest closed step, once both are known."""
        if not (self._watch.known and self._exchange.known):
            return None
        own_s, wait_s = self.take(), self.take_wait()
        assert own_s is not None and wait_s is not None
        return own_s, wait_s
