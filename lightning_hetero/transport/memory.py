"""Memory that a server and the workers of its node share: a file without a name (layer T).

    parameters    words and two buffers, see `ParameterArea`
    a slot for each rank of this node    a sequence word and gradients, see `Slot`

A worker gets the file's descriptor over its socket, when it has shown who it is. The memory is free when the last
process that has it is gone, however that ends. Workers elsewhere have no part of it: the server keeps a copy of their
slot in its own memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_hetero.transport.seqlock import ParameterArea, Slot


def _file(size_bytes: int) -> int:
    """Returns the descriptor of a file without a name, of zeros; in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lightning-hetero")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _mapped(descriptor: int) -> Tensor:
    """Returns a file's memory (uint8), shared with every process that maps it; the descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)


def map_parts(descriptor: int, slot_bytes: int, parameter_bytes: int, slot_at: int) -> tuple[Slot, ParameterArea]:
    """Returns a worker's slot and the parameters, and closes the descriptor.

    Args:
        descriptor: from the server.
        slot_bytes, parameter_bytes: sizes of their content.
        slot_at: where the slot begins [bytes].
    """
    try:
        memory = _mapped(descriptor)
    finally:
        os.close(descriptor)
    slot, parameters = memory[slot_at : slot_at + Slot.size(slot_bytes)], memory[: ParameterArea.size(parameter_bytes)]
    return Slot(slot, slot_bytes), ParameterArea(parameters, parameter_bytes)


class ServerMemory:
    """The server's end: slots and parameters, mapped at first use, so that a fork in between is safe.

    Args:
        near: ranks that share this memory; none: there is no file.
        slot_bytes, parameter_bytes: sizes.

    Attributes:
        descriptor: of the file; None without a file, or when it is closed.
        slot_at: where each near rank's slot begins [bytes].
        state: what workers get that ask for the state.
    """

    def __init__(self, near: Iterable[int], *, slot_bytes: int, parameter_bytes: int) -> None:
        self.slot_bytes, self.parameter_bytes = slot_bytes, parameter_bytes
        first, size = ParameterArea.size(parameter_bytes), Slot.size(slot_bytes)
        self.slot_at = {rank: first + i * size for i, rank in enumerate(sorted(near))}
        self.descriptor = _file(first + len(self.slot_at) * size) if self.slot_at else None
        self.state = b""
        self._memory: Tensor | None = None
        self._slots: dict[int, Slot] = {}
        self._parameters: ParameterArea | None = None

    def slot(self, rank: int) -> Slot:
        """Returns a worker's slot, or the copy of one that is elsewhere."""
        if (slot := self._slots.get(rank)) is None:
            if (at := self.slot_at.get(rank)) is None:
                slot = Slot.empty(self.slot_bytes)
            else:
                slot = Slot(self._mapped()[at : at + Slot.size(self.slot_bytes)], self.slot_bytes)
            self._slots[rank] = slot
        return slot

    def forget(self, rank: int) -> None:
        """A worker is gone: lets go of the copy of its slot."""
        if rank not in self.slot_at:
            self._slots.pop(rank, None)

    @property
    def parameters(self) -> ParameterArea:
        """What is published."""
        if self._parameters is None:
            size = ParameterArea.size(self.parameter_bytes)
            memory = self._mapped()[:size] if self.slot_at else torch.zeros(size, dtype=torch.uint8)
            self._parameters = ParameterArea(memory, self.parameter_bytes)
        return self._parameters

    def _mapped(self) -> Tensor:
        if self._memory is None:
            assert self.descriptor is not None
            self._memory = _mapped(self.descriptor)
        return self._memory

    def close(self) -> None:
        """Lets go of all; idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self._slots, self._parameters, self._memory = {}, None, None
