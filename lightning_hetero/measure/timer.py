"""Time stamps on a device, whose differences are read later (layer T).

Unlike the stopwatches of `lightning_hetero.measure.step_clock`, which follow training steps and never wait, these serve
measurements that own the device: reading a difference waits for the work in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Timer"]


class Timer:
    """Stamps of one device: CUDA events on its current stream, the host's clock for all else.

    Args:
        device: where the work that is timed runs.
        clock: host clock [s]; injectable for tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._clock = clock

    def mark(self) -> Any:
        """Returns a stamp of the work submitted so far; only a device that is neither CPU nor CUDA is waited for."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        self.wait()
        return self._clock()

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the time between two stamps [s]; waits for the later one on CUDA."""
        if self.device.type == "cuda":
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        return end - start

    def wait(self) -> None:
        """Waits until all work submitted to the device is done."""
        if self.device.type not in ("cpu", "meta"):
            getattr(torch, self.device.type).synchronize(self.device)
