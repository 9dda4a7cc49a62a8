"""Where a device's part of a slot is made, and how it gets into the slot beside the device's other work (layer T).

    compute stream   gradient --> image --> stamp                          the next gradients ...
    side stream                              '--> image to slot --> stamp
    host                                                              '--> reached: the part is in the slot

On the host the image is the slot itself, and there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_hetero.measure.device import HostDevice, Stamp, device_of


def lock_pages(memories: Iterable[Tensor], devices: Sequence[HostDevice]) -> list[Callable[[], None]]:
    """Locks the host's memory (uint8) for copies to and from devices, once, where that is to be had; returns what ends
    it."""
    locked: list[Callable[[], None]] = []
    for memory in memories:
        for device in devices:
            if (unlock := device.page_lock(memory.data_ptr(), memory.numel())) is not None:
                locked.append(unlock)
                break
    return locked


class Image:
    """See the module; of one slot on one device.

    Args:
        device: whose gradients and buffers it is for.
        slot: on the host; page-locked, or a device waits for each copy.

    Attributes:
        bytes: memory on the device, in the slot's layout.
        asynchronous: it is not the slot itself.
    """

    def __init__(self, device: torch.device, slot: Tensor) -> None:
        self._device, self._slot = device_of(device), slot
        self.asynchronous = self._device.asynchronous
        self.bytes = torch.zeros_like(slot, device=device) if self.asynchronous else slot
        self._stream = self._device.side_stream()
        self._landed: Stamp | None = None

    def send(self, start: int, stop: int) -> Stamp:
        """Copies what the current stream has written of it into the slot; returns when that has landed."""
        if not self.asynchronous:
            return self._device.stamp()
        written = self._device.stamp()
        with self._device.on(self._stream):
            written.hold()
            self._slot[start:stop].copy_(self.bytes[start:stop], non_blocking=True)
            self._landed = self._device.stamp()
        return self._landed

    def hold(self) -> None:
        """Has the current stream wait for all that was sent: the next to read from the device finds it landed."""
        if self._landed is not None:
            self._landed.hold()

    def wait(self) -> None:
        """Has the host wait for all that was sent, which may not be on its way when the slot goes."""
        if self._landed is not None:
            self._landed.wait()


class Readout:
    """Collects flat tensors of bytes; `read` fetches them all."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, list[int]]] = []

    def add(self, part: Tensor) -> list[int]:
        """Returns the list that `read` fills with the bytes of ``part`` (uint8, flat)."""
        into: list[int] = []
        self._parts.append((part, into))
        return into

    def read(self) -> None:
        """Waits for the devices' current streams, and reads what was added since the last time."""
        by_device: dict[torch.device, list[tuple[Tensor, list[int]]]] = {}
        for part, into in self._parts:
            by_device.setdefault(part.device, []).append((part, into))
        self._parts = []
        for parts in by_device.values():
            found = iter(torch.cat([part for part, _ in parts]).cpu().tolist())
            for part, into in parts:
                into[:] = [next(found) for _ in range(part.numel())]
