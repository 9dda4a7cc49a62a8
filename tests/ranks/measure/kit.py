"""A device whose host runs ahead, by virtual clocks; a stopwatch that is read late."""

from __future__ import annotations

import torch

from lightning_hetero.measure.device import HostDevice, Stamp, device_of
from lightning_hetero.measure.step_clock import Stopwatch


class Late(Stopwatch):
    """Knows a step's time one step later, as an accelerator does."""

    def __init__(self) -> None:
        super().__init__(device_of("cpu"))

    @property
    def known(self) -> bool:
        return super().known and len(self._done) > 1


class VirtualStamp(Stamp):
    """A time on the device's clock."""

    def __init__(self, device: VirtualGpu, at_s: float) -> None:
        super().__init__(at_s)
        self._device = device

    def reached(self) -> bool:
        return self._device.host_s >= self._at_s

    def wait(self) -> None:
        self._device.host_s = max(self._device.host_s, self._at_s)

    def seconds_until(self, later: Stamp) -> float:
        assert later.reached(), "CUDA knows no time between events of which one has not come"
        return super().seconds_until(later)


class VirtualGpu(HostDevice):
    """One host and one stream, both of which pass time only when told.

    Attributes:
        host_s: where the host is.
        tail_s: when the stream has done all that was submitted.
    """

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.host_s = self.tail_s = 0.0

    def stamp(self, *, timing: bool = False) -> Stamp:
        return VirtualStamp(self, max(self.tail_s, self.host_s))

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.tail_s)

    def submit(self, seconds: float) -> None:
        """Queues work that takes so long."""
        self.tail_s = max(self.tail_s, self.host_s) + seconds
