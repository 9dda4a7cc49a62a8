"""Bytes from one process to another of its node, piece by piece, through a few blocks that both map (layer T).

    sender      free block ← piece   ── packet: where, how many bytes ──►   piece → its place      receiver
                the block is free    ◄── packet                       ──    the block is given back

Two copies in all, none by the kernel. The blocks stay in the processors' caches, as there are few of them and the same
ones are used again and again. Whoever copies sets the pace: a sender that finds no free block waits for the receiver.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from collections import deque

import numpy as np
import torch
from torch import Tensor

from lightning_hetero.transport.one_node.blocks import Blocks
from lightning_hetero.transport.one_node.packets import Packets

__all__ = ["BLOCK_BYTES", "Conveyor"]

BLOCK_BYTES = 2**20
"""Of one piece, at most."""

BLOCKS = 8

# Where a piece starts, how long it is, and the size of the memory, if it is new [bytes]. All 0: a block is free again.
_PACKET = struct.Struct("<QQQ")


class Conveyor:
    """One process's side, for both directions. Nothing waits here. Used by one thread.

    When `settled` on both sides, and all has been taken that was to come, either may `close` it: nothing gets lost.

    Args:
        connection: to the other process, of packets, see `Neighbours`; owned from here on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._packets = Packets(connection)
        self._ours: Tensor | None = None  # the memory that this side fills
        self._unsent_descriptor: tuple[int, int] | None = None  # and its size, until the other side is told
        self._theirs: Tensor | None = None
        self._sent = self._returned = 0  # pieces, of this side's
        self._come: deque[Tensor] = deque()

    @property
    def broken(self) -> str | None:
        """Why nothing comes and goes any more; None as long as it does."""
        return self._packets.broken

    @property
    def settled(self) -> bool:
        """Whether the other side has given back all blocks, and has been told all."""
        return self._sent == self._returned and not self._packets.unsent

    def watch(self, poll: select.poll) -> None:
        """Lets ``poll`` return when `look` has something to do."""
        self._packets.watch(poll)

    def look(self) -> None:
        """Takes in what the other side has told, and sends what could not be sent before."""
        self._packets.flush()
        while (received := self._packets.receive()) is not None:
            packet, descriptor = received
            start, size_bytes, new_bytes = _PACKET.unpack(packet)
            if descriptor is not None:
                try:
                    self._theirs = _tensor(mmap.mmap(descriptor, new_bytes))
                finally:
                    os.close(descriptor)
            if size_bytes:
                assert self._theirs is not None
                self._come.append(self._theirs[start : start + size_bytes])
            else:
                self._returned += 1

    # ---- out -------------------------------------------------------------------------------------------------------

    def room(self, size_bytes: int) -> Tensor | None:
        """Returns where to put the next piece, at most `BLOCK_BYTES`; None: no block is free at present.

        Raises:
            OSError: there is no memory for it, or no descriptor.
        """
        if self._sent - self._returned == BLOCKS:
            return None
        if self._ours is None:
            block, segment = Blocks().take(BLOCKS * BLOCK_BYTES)
            assert segment is not None
            self._unsent_descriptor = segment.descriptor, segment.size_bytes
            self._ours = block.tensor(BLOCKS * BLOCK_BYTES)
        start = self._sent % BLOCKS * BLOCK_BYTES
        return self._ours[start : start + size_bytes]

    def send(self, size_bytes: int) -> None:
        """Sends the piece that lies where `room` said."""
        descriptor, new_bytes = self._unsent_descriptor or (None, 0)
        self._unsent_descriptor = None
        start = self._sent % BLOCKS * BLOCK_BYTES
        self._sent += 1
        self._packets.send(_PACKET.pack(start, size_bytes, new_bytes), descriptor)

    # ---- in --------------------------------------------------------------------------------------------------------

    def piece(self) -> Tensor | None:
        """Returns the next piece that has come, in shared memory, until `give_back`; None: none so far."""
        return self._come[0] if self._come else None

    def give_back(self) -> None:
        """Lets the other side use the block again in which the piece has come."""
        self._come.popleft()
        self._packets.send(_PACKET.pack(0, 0, 0))

    def close(self) -> None:
        """Ends it at once. Idempotent."""
        self._packets.abort()
        self._come.clear()
        self._ours = self._theirs = None
        if self._unsent_descriptor is not None:
            os.close(self._unsent_descriptor[0])
            self._unsent_descriptor = None


def _tensor(memory: mmap.mmap) -> Tensor:
    return torch.from_numpy(np.frombuffer(memory, np.uint8))
