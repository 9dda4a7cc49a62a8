"""What every rank of a run has, for all of them, where they are on one node (layer T).

    start    its bytes into a slot of its own memory, which all others map; a packet to each: the slot is filled
    wait     for their packets; their slots are copied out

No thread takes part, and nobody is woken but who waits: a collective of gloo's wakes threads at both ends of each
message. See `transport.one_round` for between nodes, and `python -m benchmarks.one_round` for what both take.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor

from lightning_hetero.transport.one_node.blocks import Blocks
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.one_node.packets import Packets
from lightning_hetero.transport.patience import Failures, Patience

__all__ = ["SLOT_BYTES", "NearRound", "NearWork"]

SLOT_BYTES = 2**18
"""What a rank can have for the others, at most."""

# A slot is filled again when all have copied it out. Whoever starts a round has waited for all but one of those before;
# so have the others when they start the one that it has waited for last: nobody is still at the fourth last.
_SLOTS, _OPEN = 4, 1

_LOOK_S = 1.0  # at what became of others, while waiting
_SILENT = "sent nothing"
_PACKET = struct.Struct("<QQ")  # number of the round, and its bytes


class NearRound:
    """The ranks of a run, which are all on one node; the constructor is collective. Used by one thread.

    Args:
        node: all of them. Connections to one peer are made by both in the same order, whatever they are for.
        rank, world_size: of the run.
        failures: looked at while waiting.
        timeout_s: how long one waits for the others at most.

    Raises:
        RuntimeError: a rank has failed or is gone, or did not answer in time.
        OSError: there is no memory, or no descriptor.
    """

    def __init__(
        self, node: Neighbours, rank: int, world_size: int, *, failures: Failures, timeout_s: float
    ) -> None:
        self._rank, self._patience = rank, Patience(failures, timeout_s)
        self._number = self._open = 0  # rounds started; not waited for so far
        block, segment = Blocks().take(_SLOTS * SLOT_BYTES)
        assert segment is not None
        self._memory = {rank: np.frombuffer(block.memory, np.uint8)}
        self._packets: dict[int, Packets] = {}
        self._filled = {peer: 0 for peer in range(world_size) if peer != rank}  # rounds, of which a packet has come
        try:
            for peer in sorted(self._filled, reverse=True):  # as `Neighbours.meet` demands
                self._packets[peer] = Packets(node.meet(peer, self._patience, "did not connect"))
                self._packets[peer].send(_PACKET.pack(0, segment.size_bytes), os.dup(segment.descriptor))
            for peer in self._packets:
                self._map(peer)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(segment.descriptor)

    def _map(self, peer: int) -> None:
        """Waits for a peer's memory."""
        deadline_s, packets = self._patience.deadline_s(), self._packets[peer]
        while (received := packets.receive()) is None:
            packets.wait(_LOOK_S)
            if packets.broken is not None:
                raise self._patience.failures.lost(peer, packets.broken)
            self._patience.look(peer, deadline_s, _SILENT)
        packet, descriptor = received
        assert descriptor is not None
        try:
            memory = mmap.mmap(descriptor, _PACKET.unpack(packet)[1])
        finally:
            os.close(descriptor)
        self._memory[peer] = np.frombuffer(memory, np.uint8)

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def takes(self, size_bytes: int) -> bool:
        """Whether a round of so many bytes can be started now; the same on all ranks, if they wait in one order."""
        return size_bytes <= SLOT_BYTES and self._open <= _OPEN

    def start(self, pieces: Sequence[Tensor]) -> tuple[NearWork, Tensor]:
        """Starts a round that `takes` it; collective.

        Args:
            pieces: uint8, one after another what this rank has; as many bytes on all ranks.

        Returns:
            To be waited for, in the order of rounds; and where the bytes are then [ranks, bytes].
        """
        size_bytes = sum(piece.numel() for piece in pieces)
        self._number += 1
        self._open += 1
        start = self._number % _SLOTS * SLOT_BYTES
        torch.cat(list(pieces), out=torch.from_numpy(self._memory[self._rank][start : start + size_bytes]))
        packet = _PACKET.pack(self._number, size_bytes)
        for packets in self._packets.values():
            packets.send(packet)
        rows = torch.empty((1 + len(self._packets), size_bytes), dtype=torch.uint8)
        return NearWork(self, self._number, rows, self._patience.deadline_s()), rows

    def arrived(self, number: int, timeout_s: float) -> int | None:
        """Waits until the packets of a round have come; returns a rank whose packet has not in time, None: all have."""
        deadline_s = time.monotonic() + timeout_s
        for peer, packets in self._packets.items():
            while self._filled[peer] < number:
                if (received := packets.receive()) is not None:
                    self._filled[peer] = _PACKET.unpack(received[0])[0]
                    continue
                rest_s = deadline_s - time.monotonic()
                if packets.broken is not None or rest_s <= 0.0:
                    return peer
                packets.wait(rest_s, unsent=packets.unsent)
                packets.flush()
        return None

    def copy_out(self, number: int, rows: Tensor) -> None:
        """Copies out what all have for a round whose packets have come."""
        start, size_bytes = number % _SLOTS * SLOT_BYTES, rows.shape[1]
        for rank, row in enumerate(rows.numpy()):
            row[:] = self._memory[rank][start : start + size_bytes]
        self._open -= 1

    def lost(self, peer: int, deadline_s: float) -> RuntimeError | None:
        """Returns the error if nothing will come from a peer any more, or nothing has come until the deadline."""
        if (broken := self._packets[peer].broken) is not None:
            return self._patience.failures.lost(peer, broken)
        return self._patience.out(peer, _SILENT) if time.monotonic() >= deadline_s else None

    def close(self) -> None:
        """Ends all connections; what others have not read is lost. Idempotent."""
        for packets in self._packets.values():
            packets.close()
        self._memory.clear()


class NearWork:
    """One round, to be waited for as `torch.distributed.Work`: see `FailureBoard.wait`."""

    def __init__(self, among: NearRound, number: int, rows: Tensor, deadline_s: float) -> None:
        self._among, self._number, self._rows, self._deadline_s = among, number, rows, deadline_s
        self._done = False
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once what went wrong."""
        if not self._done and self._error is None:
            self._advance(0.0)
        return self._done or self._error is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until all have come.

        Raises:
            RuntimeError: they have not in time; or a rank is lost.
        """
        left_s = max(0.0, self._deadline_s - time.monotonic())
        timeout_s = left_s if timeout is None else min(left_s, timeout.total_seconds())
        if not self._done and self._error is None:
            self._advance(timeout_s)
        if self._error is not None:
            raise self._error
        if not self._done:
            raise RuntimeError(f"not all ranks have come within {timeout_s:g} s, the timeout")
        return True

    def _advance(self, timeout_s: float) -> None:
        peer = self._among.arrived(self._number, timeout_s)
        if peer is None:
            self._among.copy_out(self._number, self._rows)
            self._done = True
        else:
            self._error = self._among.lost(peer, self._deadline_s)
