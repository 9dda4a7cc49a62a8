"""One end of a link between two processes of a node: messages lie in memory that both map (layer T).

    post: the message is packed into a block  ── packet: which block ──►  take: its tensors are the block's memory
          the block is used again             ◄── packet: which blocks ──       when nothing refers to them any more

No thread, no copy but the one that packs, and a process wakes only if it waits: beside gloo over the loopback device,
where two copies go through the kernel and three threads wake per message, a message takes a fraction of the processor
time (`python -m benchmarks.walker`).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from array import array
from collections import deque

import torch
from torch import Tensor

from lightning_hetero.pipeline.runtime.execute.links.end import Arrivals, Come, LinkEnd
from lightning_hetero.pipeline.runtime.execute.links.messages import Message, pack
from lightning_hetero.transport.one_node.blocks import Block, Blocks, MappedBlocks, Segment
from lightning_hetero.transport.one_node.packets import PACKET_BYTES, Packets

__all__ = ["NodeEnd"]

# Kind; segment and start of a block; size of the segment, if it is new; bytes of header and payload; when it was ready,
# and when it was packed [s, time.monotonic, the same for both].
_PACKET = struct.Struct("<QQQQQQdd")
_MESSAGE, _FREED, _LAST = 1, 2, 3  # behind each: segments and starts of blocks that are free again
_MOST_FREED = (PACKET_BYTES - _PACKET.size) // 16
_WAITING = 4  # freed blocks; then they are told, though nothing goes that way


class NodeEnd(LinkEnd):
    """This rank's end. Used by one thread.

    Args:
        connection: to the neighbour, of packets, see `Neighbours`; owned from here on.
        arrivals: of what comes.
    """

    def __init__(self, connection: socket.socket, arrivals: Arrivals) -> None:
        self._packets = Packets(connection)
        self._arrivals = arrivals
        self._blocks = Blocks()
        self._filled: tuple[Block, Segment | None] | None = None  # what a message is packed into
        self._freed: deque[tuple[int, int]] = deque()
        self._mapped = MappedBlocks(self._freed.append)
        self._come: deque[Come] = deque()
        self._last = False  # has come

    @property
    def broken(self) -> str | None:
        return self._packets.broken

    # ---- out -------------------------------------------------------------------------------------------------------

    def post(self, message: Message | None) -> None:
        if message is None:
            self._packets.send(_PACKET.pack(_LAST, 0, 0, 0, 0, 0, 0.0, 0.0))
            return
        ready_s = time.monotonic()
        header, payload = pack(message, room=self._room)
        assert self._filled is not None
        (block, segment), self._filled = self._filled, None
        new_bytes, descriptor = (0, None) if segment is None else (segment.size_bytes, segment.descriptor)
        where, sizes = (block.segment, block.start, new_bytes), (len(header), payload.numel())
        packet = _PACKET.pack(_MESSAGE, *where, *sizes, ready_s, time.monotonic())
        self._packets.send(packet + self._told(), descriptor)

    def _room(self, header: bytes, size_bytes: int) -> Tensor:
        """Returns where a payload goes; the header goes behind it."""
        total_bytes = size_bytes + len(header)
        if not self._blocks.free(total_bytes):
            self._take_in()  # nothing else may come this way but what is free again
        block, _ = self._filled = self._blocks.take(total_bytes)
        block.write(header, size_bytes)
        return block.tensor(size_bytes) if size_bytes else torch.empty(0, dtype=torch.uint8)

    def _told(self) -> bytes:
        """The blocks that are free since this was last asked."""
        freed = array("Q")
        for _ in range(min(len(self._freed), _MOST_FREED)):
            freed.extend(self._freed.popleft())
        return freed.tobytes()

    def room(self, timeout_s: float) -> bool:
        """Takes in, meanwhile, what comes: the neighbour may wait for room itself."""
        packets = self._packets
        if not packets.unsent:
            return True
        deadline_s = time.monotonic() + timeout_s
        while packets.broken is None:
            self._take_in()
            packets.flush()
            rest_s = deadline_s - time.monotonic()
            if not packets.unsent or rest_s <= 0.0:
                break
            packets.wait(rest_s, unsent=True)
        return not packets.unsent

    def wait_out(self, timeout_s: float) -> bool:
        return self.room(timeout_s)

    # ---- in --------------------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> Come | str | None:
        if len(self._freed) >= _WAITING and self._packets.broken is None:
            self._packets.send(_PACKET.pack(_FREED, 0, 0, 0, 0, 0, 0.0, 0.0) + self._told())
        if not self._come:
            self._take_in()
        deadline_s = time.monotonic() + timeout_s if not self._come else 0.0
        while not self._come:
            if (end := self._end) is not None:
                return end
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0.0:
                return None
            self._packets.wait(rest_s)
            self._take_in(waited_for=True)
        return self._come.popleft()

    @property
    def _end(self) -> str | None:
        """Why nothing more comes; None: something may."""
        return "it has closed its links" if self._last else self._packets.broken

    def _take_in(self, *, waited_for: bool = False) -> None:
        """Takes in one message and what came before it, without waiting.

        Args:
            waited_for: it has come just now. Else it could have been used since it was packed.
        """
        while not self._last and (received := self._packets.receive()) is not None:
            packet, descriptor = received
            try:
                if self._understood(packet, descriptor, waited_for):
                    return
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _understood(self, packet: bytes, descriptor: int | None, waited_for: bool) -> bool:
        """Does what a packet says; returns whether it brought a message."""
        kind, segment, start, new_bytes, header_bytes, payload_bytes, ready_s, packed_s = _PACKET.unpack_from(packet)
        if len(packet) > _PACKET.size:
            freed = iter(array("Q", packet[_PACKET.size :]))
            for place in zip(freed, freed, strict=True):
                self._blocks.give_back(*place)
        if kind == _LAST:
            self._last = True
        if kind != _MESSAGE:
            return False
        if descriptor is not None:
            self._mapped.map(new_bytes, descriptor)
        header = self._mapped.read(segment, start + payload_bytes, header_bytes)
        if payload_bytes:
            payload = self._mapped.tensor(segment, start, payload_bytes)
        else:
            payload = torch.empty(0, dtype=torch.uint8)
            self._freed.append((segment, start))
        usable_s = self._arrivals.usable_s(packed_s, payload_bytes)
        arrived_s = time.monotonic() if waited_for else packed_s
        self._arrivals.came(
            sent_s=ready_s, back_s=0.0, arrived_s=arrived_s, usable_s=usable_s, size_bytes=payload_bytes
        )
        self._come.append((header, payload, usable_s, None))
        return True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def ended(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        if not self.room(timeout_s):
            return self._packets.broken is not None
        self._take_in()
        while self._end is None:
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0.0:
                return False
            self._packets.wait(rest_s)
            self._take_in()
        return True

    def abort(self) -> None:
        self._packets.abort()

    def close(self) -> None:
        self._packets.close()
