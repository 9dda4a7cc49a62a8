"""Times of what a device computes, read when it is done (layer T).

Unlike the stopwatches of `lightning_hetero.measure.step_clock`, which follow training steps and never wait, these serve
measurements that own the device: reading a difference waits for the work in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_hetero.measure.device import device_of

_WARM_S = 0.3  # of load, after which the clocks of a device that was idle have risen


class Timer:
    """Stamps of one device.

    Args:
        device: where the work that is timed runs.
        clock: host clock [s], for devices without one of their own; injectable for tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self._on, self._clock = device_of(device), clock
        self._cold = self._on.asynchronous

    def warm_up(self, run: Callable[[], object]) -> None:
        """Has an asynchronous device do the same again and again before anything counts; once, and not on the host."""
        end_s = time.monotonic() + _WARM_S
        while self._cold:
            run()
            self._on.synchronize()
            self._cold = time.monotonic() < end_s

    def mark(self) -> Any:
        """Returns a stamp of the work submitted so far."""
        return self._on.stamp(timing=True, clock=self._clock)

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the time between two stamps [s]; waits for the later one."""
        end.wait()
        return start.seconds_until(end)
