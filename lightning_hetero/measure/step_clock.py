"""Measures one rank's own work per training step, free of any waiting for peers (layer T).

    fetch   transfer | forward ........ backward | gradient exchange | optimizer
    [1]-----[1]------[2]---------------------[3]..................[4]----------[5]

[1] host seconds handed in by the owner (`add`), [2] `start` from a forward pre-hook *inside* the wrapper, because
DDP broadcasts buffers before the module's forward and that waits for peers; [3] `stop` from an autograd callback
which runs when the last gradient has been computed and before DDP waits for the buckets; [4] `exchanged` when
``backward()`` has returned: [3]-[4] is waiting plus communication; [5] `add` again: it counts for the next step.

Which stamps are free of waiting was measured, see docs/theory/balanced.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["CudaStopwatch", "HostStopwatch", "StepProbe", "Stopwatch", "when_backward_ends"]


def when_backward_ends(loss: Tensor, callback: Callable[[], None]) -> None:
    """Calls ``callback`` once when the backward pass through ``loss`` has computed its last gradient.

    The callback is queued from a hook on ``loss``, so before DDP queues its own final callback; final callbacks
    run first in, first out, so ours runs before DDP waits for the gradient exchange. It also fires under
    ``no_sync`` and needs no communication hook. `queue_callback` is not a documented API of torch, although FSDP
    and DDP rest on it: `tests/ranks/measure/test_step_clock.py` pins its behaviour to the installed version.
    """

    def hook(grad: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore

    loss.register_hook(hook)


class Stopwatch(Protocol):
    """Adds up running time between `resume` and `pause`; `take` may lag behind by one step (CUDA)."""

    @property
    def running(self) -> bool:
        """Whether time is being added up now."""
        ...

    def resume(self) -> None: ...

    def pause(self) -> None: ...

    def take(self) -> float | None:
        """Returns the seconds of the oldest finished step not yet taken, or ``None`` if it is not known yet."""
        ...

    def close(self) -> None:
        """Ends the step."""
        ...

    def reset(self) -> None:
        """Forgets the open step, e.g. when it is abandoned; closed steps can still be taken."""
        ...


class HostStopwatch:
    """Wall-clock stopwatch for devices whose work is done when the call returns (CPU).

    Args:
        clock: returns seconds; injectable for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._sum_s = 0.0
        self._done: deque[float] = deque()

    @property
    def running(self) -> bool:
        return self._since is not None

    def resume(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        if self._since is not None:
            self._sum_s += self._clock() - self._since
            self._since = None

    def close(self) -> None:
        self.pause()
        self._done.append(self._sum_s)
        self._sum_s = 0.0

    def take(self) -> float | None:
        return self._done.popleft() if self._done else None

    def reset(self) -> None:
        self._since, self._sum_s = None, 0.0


class CudaStopwatch:
    """Stopwatch on the current CUDA stream: events at the same places, read when they have completed.

    NCCL works on its own stream and the compute stream joins it only after [3], so the time between the events
    holds no waiting. A step is readable when its last event has completed, normally one step later; nothing here
    ever synchronises the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: torch.cuda.Event | None = None
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._done: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = deque()

    @property
    def running(self) -> bool:
        return self._open is not None

    def _stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def resume(self) -> None:
        if self._open is None:
            self._open = self._stamp()

    def pause(self) -> None:
        if self._open is not None:
            self._pieces.append((self._open, self._stamp()))
            self._open = None

    def close(self) -> None:
        self.pause()
        self._done.append(self._pieces)
        self._pieces = []

    def take(self) -> float | None:
        if not self._done or any(not end.query() for _, end in self._done[0]):
            return None
        return sum(start.elapsed_time(end) for start, end in self._done.popleft()) / 1e3

    def reset(self) -> None:
        self._open, self._pieces = None, []


class StepProbe:
    """Times the steps of one rank; the owner calls the stamps [1]-[5] of the module docstring.

    Args:
        device: where the module computes; CUDA gets event timing, everything else the host clock.
        waiting: module types that wait for peers inside forward or backward (e.g. ``SyncBatchNorm``); the
            stopwatch is paused around them.
        clock: host clock [s]; injectable for tests.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        waiting: Iterable[type[nn.Module]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._watch: Stopwatch = CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(clock)
        self._waiting = tuple(waiting)
        self._handles: list[Any] = []
        self._armed = False
        self._running = False
        self._host_s = 0.0
        self._wait_s = 0.0
        self._ended_s: float | None = None
        self._unread: deque[float] = deque()  # host seconds of closed steps the watch has not given yet

    def attach(self, module: nn.Module) -> None:
        """Hooks the module's forward (start stamp) and its waiting submodules (pauses). Undone by `detach`."""
        self.detach()
        self._handles.append(module.register_forward_pre_hook(lambda *_: self.start()))
        for child in module.modules():
            if self._waiting and isinstance(child, self._waiting):
                self._handles.append(child.register_forward_pre_hook(self._enter_waiting))
                self._handles.append(child.register_forward_hook(self._leave_waiting))

    # Hooks on tensors, not the module's full backward hooks: those forbid `ReLU(inplace=True)` behind the module.
    def _enter_waiting(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Pauses in forward; a view of the input, whose gradient comes from this module alone, ends its backward."""
        if not self._running:
            return None
        self.pause()
        return tuple(self._resuming_view(arg) for arg in args)

    def _resuming_view(self, arg: Any) -> Any:
        if not (isinstance(arg, Tensor) and arg.requires_grad and torch.is_grad_enabled()):
            return arg
        view = arg.view_as(arg)
        view.register_hook(lambda grad: self.resume())
        return view

    def _leave_waiting(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends the pause in forward; the gradient of the output begins the one in backward.

        Without a gradient to pass on nothing would end it, and `SyncBatchNorm` does not communicate then.
        """
        if not self._running:
            return
        self.resume()
        passes_on = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        for out in output if isinstance(output, tuple | list) else (output,):
            if passes_on and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda grad: self.pause())

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arm(self, host_s: float = 0.0) -> None:
        """Opens a step; the next `start` counts. ``host_s``: seconds of fetch and transfer that belong to it."""
        if self._running or self._armed:  # the step before never finished (exception, skipped batch)
            self._watch.reset()
            self._host_s = 0.0
        self._armed, self._running = True, False
        self._host_s += host_s
        self._wait_s = 0.0
        self._ended_s = None

    def add(self, host_s: float) -> None:
        """Adds host seconds of own work, e.g. the optimizer's, to the step that is measured next."""
        self._host_s += host_s

    def start(self) -> None:
        """Stamp [2]. Only the first call after `arm` counts: users call ``self(x)`` inside ``training_step``."""
        if self._armed:
            self._armed, self._running = False, True
            self._watch.resume()

    def pause(self) -> None:
        if self._running:
            self._watch.pause()

    def resume(self) -> None:
        if self._running:
            self._watch.resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside, e.g. a collective of the user's, out of the measurement; may be nested."""
        was_running = self._watch.running
        self._watch.pause()
        try:
            yield
        finally:
            if was_running:
                self._watch.resume()

    def backward_ended(self) -> None:
        """Stamp [3]: own gradients are complete."""
        if self._running:
            self._watch.pause()
            self._ended_s = self._clock()

    def exchanged(self) -> None:
        """Stamp [4]: ``backward()`` has returned."""
        if self._ended_s is not None:
            self._wait_s += self._clock() - self._ended_s
            self._ended_s = None

    def close(self) -> None:
        """Ends the step's work; what comes later (`add`) belongs to the next one. Waiting may still be added."""
        if not self._running:
            return
        self._running = False
        self._watch.close()
        self._unread.append(self._host_s)
        self._host_s = 0.0

    def take(self) -> float | None:
        """Returns compute seconds of the oldest closed step, ``None`` while its events have not completed."""
        seconds = self._watch.take()
        if seconds is None:
            return None
        return seconds + self._unread.popleft()

    @property
    def wait_s(self) -> float:
        """Seconds the last closed step spent in the gradient exchange (host clock)."""
        return self._wait_s
