"""Bytes that devices compute and the host reads together: it waits once per device (layer T)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Readout"]


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
