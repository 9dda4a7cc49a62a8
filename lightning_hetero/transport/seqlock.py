"""Memory that one side writes and the other reads without a lock: a worker's slot, the published parameters (layer T).

Both consist of a few 64-bit *words* and of bytes. Every word and byte has one writer; a sequence word is odd while the
bytes next to it are being written, so a reader notices a writer that was killed in the middle, and one that was faster
than itself. Idea: seqlocks, as in the Linux kernel; with two buffers a reader retries only if two publications begin
while it copies.

The words are aligned and written as a whole. x86 keeps the order of stores; for processors that do not, `_fence` lets
none pass.

Memory that a server and the workers of its node share: a file without a name.

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
import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hetero.transport.base import TornSlotError
from lightning_hetero.transport.progress import stamped

PAGE_BYTES = 4096
_LARGE_BYTES = 16 << 20  # copying so much takes milliseconds; starting a thread, tens of microseconds
_THREADS = 4  # more find little memory bandwidth left

_LOCK = threading.Lock()


def _fence() -> None:
    """Lets no load or store pass: two acquisitions in a row are a full barrier (one would admit both sides inside)."""
    for _ in range(2):
        with _LOCK:
            pass


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_bytes(out: Tensor, source: Tensor, threads: int) -> None:
    """Copies flat memory (uint8, contiguous, on the CPU, of one size).

    By `memmove`, not torch's loop: what is larger than the caches it writes past them, which is half the traffic.
    (glibc asks the processor for their size; where a virtual machine gets its host's, see
    ``GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold``.)

    Args:
        threads: how many may work, if it is large; more than four are not used.
    """
    parts = min(threads, _THREADS) if source.numel() >= _LARGE_BYTES else 1
    at = [source.numel() * k // parts // PAGE_BYTES * PAGE_BYTES for k in range(parts)] + [source.numel()]
    first, *others = [(out[a:b].numpy(), source[a:b].numpy()) for a, b in pairwise(at)]
    helpers = [threading.Thread(target=np.copyto, args=pair, name="copy") for pair in others]
    for helper in helpers:
        helper.start()
    np.copyto(*first)
    for helper in helpers:
        helper.join()


def _aligned(size_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def bytes_of(memory: Tensor) -> memoryview:
    """Returns the bytes of flat memory (uint8, on the CPU), for sockets."""
    array: Any = memory.numpy()
    return memoryview(array)


def _words(memory: Tensor, count: int) -> memoryview:
    # a memoryview, because it reads and writes a word as a whole, and as an int
    return bytes_of(memory[: 8 * count]).cast("q")


class Slot:
    """A worker's gradients; the worker writes, the server reads.

    Args:
        memory: ``Slot.size(n)`` bytes: a page with the sequence word, then the ``n`` bytes of `data`.
        data_bytes: ``n``.

    Attributes:
        data: uint8 (n,), page-aligned if ``memory`` is.
    """

    def __init__(self, memory: Tensor, data_bytes: int) -> None:
        self._memory = memory  # what the words are a view of
        self._words = _words(memory, 1)
        self.data = memory[PAGE_BYTES : PAGE_BYTES + data_bytes]

    @staticmethod
    def size(data_bytes: int) -> int:
        return PAGE_BYTES + _aligned(data_bytes)

    @classmethod
    def empty(cls, data_bytes: int) -> Slot:
        """Returns a slot in this process's own memory, with nothing in it."""
        return cls(torch.zeros(cls.size(data_bytes), dtype=torch.uint8), data_bytes)

    @property
    def sequence(self) -> int:
        return self._words[0]

    def mark(self, sequence: int) -> None:
        """Takes over the number which the writer of a copy has: odd = being written."""
        _fence()
        self._words[0] = sequence

    def open(self) -> None:
        """Begins to write. What a predecessor left open stays open, under another number."""
        now = self._words[0]
        self._words[0] = now + 1 + now % 2
        _fence()

    def close(self) -> int:
        """Ends writing; returns the number of this content.

        Raises:
            RuntimeError: it was not opened.
        """
        now = self._words[0]
        if now % 2 == 0:
            raise RuntimeError("close_slot without open_slot: open the slot before writing gradients into it")
        _fence()
        self._words[0] = now + 1
        return now + 1

    def check(self, sequence: int) -> Tensor:
        """Returns `data` if it holds the content numbered ``sequence``; raises TornSlotError otherwise."""
        now = self._words[0]
        if now % 2:
            raise TornSlotError(f"content {sequence} was asked for, but the slot is being written (sequence {now})")
        if now != sequence or now == 0:
            held = f"content {now}" if now else "nothing yet"
            raise TornSlotError(f"content {sequence} was asked for, but the slot holds {held}")
        _fence()
        return self.data


class ParameterArea:
    """The newest parameters; the server writes, every worker reads.

    Args:
        memory: ``ParameterArea.size(n)`` bytes: a page of words, then two buffers of ``n`` bytes, page-aligned.
        data_bytes: ``n``.

    Attributes:
        data: uint8, both buffers.
    """

    # words: publications so far; per buffer its sequence and its version; see `progress`
    _COUNT, _SEQUENCE, _VERSION, _PROGRESS = 0, (1, 2), (3, 4), 5

    def __init__(self, memory: Tensor, data_bytes: int) -> None:
        self._words = _words(memory, 6)
        first, second = PAGE_BYTES, PAGE_BYTES + _aligned(data_bytes)
        self._buffers = memory[first : first + data_bytes], memory[second : second + data_bytes]
        self.data = memory[first : second + data_bytes]

    @staticmethod
    def size(data_bytes: int) -> int:
        return PAGE_BYTES + 2 * _aligned(data_bytes)

    def publish(self, version: int, parameters: Tensor) -> None:
        """Copies ``parameters`` (uint8, n) into the older buffer and makes it the newest.

        With several threads if that takes time: most workers wait for it.
        """
        words = self._words
        count = words[self._COUNT] + 1
        which = count % 2
        words[self._SEQUENCE[which]] += 1
        _fence()
        copy_bytes(self._buffers[which], parameters, cores())
        words[self._VERSION[which]] = version
        _fence()
        words[self._SEQUENCE[which]] += 1
        words[self._COUNT] = count

    @property
    def progress(self) -> int:
        """What the server's main thread does, see `progress.work_of`."""
        return self._words[self._PROGRESS]

    def stamp(self, kind: int, number: int) -> None:
        """The main thread begins another work, see `progress.stamped`."""
        self._words[self._PROGRESS] = stamped(self._words[self._PROGRESS], kind, number)

    def read(self, into: Tensor) -> int:
        """Copies the newest parameters as a whole, to any device; returns their version.

        Raises:
            RuntimeError: nothing was published yet.
        """
        words = self._words
        while count := words[self._COUNT]:
            which = count % 2
            sequence = words[self._SEQUENCE[which]]
            if sequence % 2:  # a writer got ahead by a whole buffer since the count was read
                continue
            _fence()
            if into.is_cpu:
                copy_bytes(into, self._buffers[which], torch.get_num_threads())
            else:
                into.copy_(self._buffers[which])  # the host waits: only then it can be told whether it is torn
            version = words[self._VERSION[which]]
            _fence()
            if words[self._SEQUENCE[which]] == sequence:
                return version
        raise RuntimeError("no parameters were published yet: the server publishes before it answers a worker")

    def newest(self) -> int:
        """Returns the newest version, -1 before the first."""
        words = self._words
        while count := words[self._COUNT]:
            version = words[self._VERSION[count % 2]]
            _fence()
            if words[self._COUNT] == count:  # else the buffer may already be getting its next version
                return version
        return -1


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
