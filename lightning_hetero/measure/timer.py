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
_SIDES = (256, 4096)  # of a resting rank's matrices; from the first on, until a product takes long enough
_LEAST_S = 5e-4  # for it not to be the launch that is timed


class Timer:
    """Stamps of one device.

    Args:
        device: where the work that is timed runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on = device, device_of(device)
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
        return self._on.stamp(timing=True)

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the time between two stamps [s]; waits for the later one."""
        end.wait()
        return start.seconds_until(end)


class RestProbe:
    """Times the same product each time on an idle rank, to notice that its device has become faster or slower.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._timer = device, Timer(device)
        self._begin(_SIDES[0])
        self._timer.warm_up(self._multiply)
        while len(self._matrix) < _SIDES[1] and self.seconds() < _LEAST_S:
            self._begin(2 * len(self._matrix))

    def _begin(self, size: int) -> None:
        self._matrix = torch.full((size, size), 1.0 / size, device=self._device)
        self._product = torch.empty_like(self._matrix)

    def seconds(self) -> float:
        """Returns what it took this time [s]; waits for that."""
        start = self._timer.mark()
        self._multiply()
        return self._timer.seconds(start, self._timer.mark())

    @torch.no_grad()
    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
