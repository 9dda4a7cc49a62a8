"""Blocks of memory that one process fills and another one of the same node uses where they are (layer T).

    sender     block = blocks.take(size)  ── where it is ──►   receiver   tensor = mapped.tensor(...)
               blocks.give_back(...)      ◄── where it was ──             when that is freed

A block has no name and no place in a file system: it is gone with the processes that map it. So there is as much of it
as there is memory (the shared memory of a container, often 64 MiB, is not asked), and a killed run leaves nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Block", "Blocks", "MappedBlocks", "Segment", "are_to_be_had"]

_LEAST_BYTES = 4096  # of a block
_SEGMENT_BYTES = 2**20  # that are mapped at once, if blocks are smaller: each mapping holds a file descriptor


def are_to_be_had() -> bool:
    """Returns whether this system has such memory: Linux."""
    return hasattr(os, "memfd_create")


@dataclass(frozen=True, slots=True)
class Block:
    """One block, at the process that fills it.

    Attributes:
        segment: number of the mapping that it is a part of, from 0.
        start: its first byte there.
        size_bytes: of it.
        memory: of the segment.
    """

    segment: int
    start: int
    size_bytes: int
    memory: mmap.mmap

    def tensor(self, size_bytes: int) -> Tensor:
        """Returns its first bytes, uint8."""
        return torch.from_numpy(np.frombuffer(self.memory, np.uint8, size_bytes, self.start))

    def write(self, data: bytes, start: int) -> None:
        """Puts ``data`` there, from its byte ``start`` on."""
        start += self.start
        self.memory[start : start + len(data)] = data


@dataclass(frozen=True, slots=True)
class Segment:
    """A new mapping, for the receiver to be told of.

    Attributes:
        size_bytes: of it.
        descriptor: of its memory; to be closed by who is given it.
    """

    size_bytes: int
    descriptor: int


class Blocks:
    """What one process fills, for one other. As many are made as are in use at a time; all end with this object."""

    def __init__(self) -> None:
        self.segments = 0
        self._used: dict[tuple[int, int], Block] = {}  # by segment and start
        self._free: dict[int, list[Block]] = {}  # by size

    def free(self, size_bytes: int) -> bool:
        """Whether `take` has such a block without making one."""
        return bool(self._free.get(_rounded(size_bytes)))

    def take(self, size_bytes: int) -> tuple[Block, Segment | None]:
        """Returns a free block of at least that size, and the segment if one was made for it.

        Raises:
            OSError: there is no memory for it, or no descriptor.
        """
        size_bytes, segment = _rounded(size_bytes), None
        free = self._free.setdefault(size_bytes, [])
        if not free:
            segment = self._segment(size_bytes)
        block = free.pop()
        self._used[block.segment, block.start] = block
        return block, segment

    def _segment(self, size_bytes: int) -> Segment:
        """Makes blocks of that size."""
        total_bytes = max(size_bytes, _SEGMENT_BYTES)
        descriptor = os.memfd_create("lightning-hetero", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, total_bytes)
            memory = mmap.mmap(descriptor, total_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._free[size_bytes] += [
            Block(self.segments, start, size_bytes, memory)
            for start in reversed(range(0, total_bytes, size_bytes))  # the first one is used first
        ]
        self.segments += 1
        return Segment(total_bytes, descriptor)

    def give_back(self, segment: int, start: int) -> None:
        """Takes back what the receiver has freed."""
        block = self._used.pop((segment, start))
        self._free[block.size_bytes].append(block)


class MappedBlocks:
    """The same blocks at the process that uses them.

    Args:
        freed: called with segment and start of a block when nothing here uses it any more; in whatever thread that is.
    """

    def __init__(self, freed: Callable[[tuple[int, int]], None]) -> None:
        self._freed = freed
        self._segments: list[mmap.mmap] = []
        self._used: dict[tuple[int, int], weakref.ref[np.ndarray]] = {}

    def map(self, size_bytes: int, descriptor: int) -> None:
        """Maps a new segment; the descriptor is the caller's to close."""
        self._segments.append(mmap.mmap(descriptor, size_bytes))

    def read(self, segment: int, start: int, size_bytes: int) -> bytes:
        """Returns a copy of bytes of a segment."""
        return self._segments[segment][start : start + size_bytes]

    def tensor(self, segment: int, start: int, size_bytes: int) -> Tensor:
        """Returns the first bytes of a block; it is freed with the tensor's storage, all views included."""
        array = np.frombuffer(self._segments[segment], np.uint8, size_bytes, start)
        place = segment, start
        self._used[place] = weakref.ref(array, lambda _: self._freed(place))
        return torch.from_numpy(array)


def _rounded(size_bytes: int) -> int:
    """Returns one of few sizes, so that blocks are used again."""
    return max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
