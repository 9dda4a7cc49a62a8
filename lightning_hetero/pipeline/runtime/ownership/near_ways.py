"""Parcels between ranks of one node, through memory that both map (layer T).

    each turn    with every peer: one piece out, if a block is free, and one piece in, if one has come
    else         wait until a peer tells something; look at the failure board once a second

Each piece is copied twice, and summed up on either side right after, while it is in that processor's cache. Connections
are made for one migration and end with it.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterable, Mapping

import torch

from lightning_hetero.pipeline.runtime.ownership.new_memory import made_ready
from lightning_hetero.pipeline.runtime.ownership.parcel_bytes import ParcelBytes
from lightning_hetero.transport.one_node.conveyor import BLOCK_BYTES, Conveyor
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.patience import Failures, Patience

__all__ = ["NearWays"]

_LOOK_S = 1.0  # at the failure board, while waiting


class NearWays:
    """From this rank to others of its node.

    Args:
        node: the ranks of it. Connections to one peer are made by both in the same order, whatever they are for: so all
            ranks call `carry` at the same point between other uses.
        rank: this one.
        failures: looked at while waiting.
        timeout_s: how long nothing may come or go.
    """

    def __init__(self, node: Neighbours, rank: int, *, failures: Failures, timeout_s: float) -> None:
        self._node, self._rank = node, rank
        self._patience = Patience(failures, timeout_s)

    def between(self, source: int, target: int) -> bool:
        """Whether there is a way from one rank to another; the same on all ranks."""
        return self._node.are_near(source, target)

    def carry(self, outgoing: Mapping[int, ParcelBytes], incoming: Mapping[int, ParcelBytes]) -> None:
        """Sends and receives all; returns when the peers have what was sent.

        Args:
            outgoing: by target; there must be a way to it.
            incoming: by source, likewise.

        Raises:
            RuntimeError: a rank has failed, a peer is gone, or nothing came or went in time; names rank and cause.
            OSError: there is no memory for what is sent through, or no descriptor.
        """
        lanes: dict[int, _Lane] = {}
        try:
            peers = {
                peer for ways in (outgoing, incoming) for peer, data in ways.items() if not data.exhausted
            }
            for peer in sorted(peers, reverse=True):  # as `Neighbours.meet` demands
                connection = self._node.meet(peer, self._patience, "did not connect")
                lanes[peer] = _Lane(Conveyor(connection), outgoing.get(peer), incoming.get(peer))
            with made_ready([tensor for data in incoming.values() for tensor in data.in_place]):
                self._run(lanes)
        finally:
            for lane in lanes.values():
                lane.conveyor.close()

    def _run(self, lanes: Mapping[int, _Lane]) -> None:
        """Takes turns until all is where it belongs."""
        deadline_s = self._patience.deadline_s()
        while True:
            moved = [lane.step() for lane in lanes.values()]  # of each
            waiting = {peer: lane.conveyor for peer, lane in lanes.items() if not lane.done}
            if not waiting:
                return
            if any(moved):
                deadline_s = self._patience.deadline_s()
                continue
            for peer, conveyor in waiting.items():
                if conveyor.broken is not None:
                    raise self._patience.failures.lost(peer, conveyor.broken)
            if not _told(waiting.values(), _LOOK_S):
                self._patience.look(min(waiting), deadline_s, "neither sent nor took layers")


def _told(conveyors: Iterable[Conveyor], timeout_s: float) -> bool:
    """Waits until one of these has something to do; returns whether one has."""
    poll = select.poll()
    for conveyor in conveyors:
        conveyor.watch(poll)
    return bool(poll.poll(1e3 * timeout_s))


class _Lane:
    """One peer.

    Args:
        conveyor: to and from it.
        source: what goes there, if anything does.
        sink: what comes from there, likewise.
    """

    def __init__(self, conveyor: Conveyor, source: ParcelBytes | None, sink: ParcelBytes | None) -> None:
        self.conveyor, self._source, self._sink = conveyor, source, sink
        self._out = deque(() if source is None else source.portions(BLOCK_BYTES))  # bytes of each piece
        self._in = deque(() if sink is None else sink.portions(BLOCK_BYTES))

    @property
    def done(self) -> bool:
        return not self._out and not self._in and self.conveyor.settled

    def step(self) -> bool:
        """Sends a piece and receives one, where that is possible now; returns whether it was."""
        self.conveyor.look()
        sent, received = self._send(), self._receive()
        return sent or received

    def _send(self) -> bool:
        room = self.conveyor.room(self._out[0]) if self._out else None
        if room is None:
            return False
        assert self._source is not None
        size_bytes = self._out.popleft()
        pieces = self._source.take(size_bytes)
        if len(pieces) == 1:
            room.copy_(pieces[0])
        else:
            torch.cat(pieces, out=room)
        self.conveyor.send(size_bytes)
        self._source.complete()()
        return True

    def _receive(self) -> bool:
        piece = self.conveyor.piece()
        if piece is None:
            return False
        assert self._sink is not None and piece.numel() == self._in[0]
        rooms = self._sink.take(self._in.popleft())
        torch._foreach_copy_(rooms, list(piece.split([room.numel() for room in rooms])))
        self.conveyor.give_back()
        self._sink.complete()()
        return True
