"""What a step takes of a device's memory (layer T)."""

from __future__ import annotations

from lightning_hetero.measure.device import Device
from lightning_hetero.shares.caps import MemoryCap, MemoryUse

__all__ = ["MemoryWatch"]


class MemoryWatch:
    """Measures the memory of steps and keeps `MemoryCap.estimate` up to date, where the device tells what it uses.

    Only of steps that teach something, because it takes time, and a peak that the user may read begins anew. Other
    processes may use the device as well, so what is there is asked anew whenever more samples than ever have fitted.

    Args:
        device: of this rank.
        cap: what is known of its memory.
    """

    def __init__(self, device: Device, cap: MemoryCap) -> None:
        self._device, self._cap = device, cap
        self._use = MemoryUse()
        self._begun = False
        self._base_bytes = 0.0
        self._limit_bytes = 0.0
        self._asked_for = -1

    def begin(self, samples: int) -> None:
        """A step begins."""
        self._begun = self._device.asynchronous and self._use.wants(samples)
        if self._begun:
            self._device.forget_peak()
            self._base_bytes = self._device.used_bytes()

    def end(self, samples: int) -> None:
        """Its backward pass is over, and all samples have fitted at once."""
        if not self._begun:
            return
        self._begun = False
        if not (peak_bytes := self._device.peak_bytes()):
            return
        self._use.observe(samples, self._base_bytes, peak_bytes)
        if self._asked_for != self._cap.safe:
            self._asked_for = self._cap.safe
            self._limit_bytes = self._device.free_bytes() + self._device.used_bytes()
        self._cap.estimate = self._use.most(self._limit_bytes)
