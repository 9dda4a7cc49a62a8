"""The links of one rank to its neighbours in a pipeline: first in, first out, beside computation (layer T).

    neighbours of the same node      memory that both map, a socket that tells of it     `node_end`
    other neighbours                 gloo, a thread for each direction                   `wire_end`
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.decide.link_clock import LinkClock
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.links.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.links.end import Arrivals, LinkEnd
from lightning_hetero.pipeline.runtime.execute.links.messages import Message, unpack
from lightning_hetero.pipeline.runtime.execute.links.node_end import NodeEnd
from lightning_hetero.pipeline.runtime.execute.links.wire_end import WireEnd
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.patience import Patience
from lightning_hetero.types import Link

__all__ = ["Links"]

LOOK_S = 1.0  # at the failure board, while waiting
_ABORT_S = 1.0  # how long threads may take to notice that a connection is closed


class Links:
    """All links of one rank.

    Args:
        wire: gloo process group with this rank and its neighbours in it; only carries these links' messages from one
            to the other, so several `Links`, of different neighbours or one after the other, may share it. None: all
            neighbours are on the node.
        rank: this process, global.
        peers: its neighbours, global ranks.
        device: where received tensors are put.
        failures: looked at while waiting.
        timeout_s: how long `receive` waits at most.
        emulated: by (source, target): a message can be received no earlier than over such a link. Ranks share a clock,
            so they must be on one machine.
        ways: by peer, for those to which payloads go directly, from the second step of a kind on, see `settle`.
        node: the ranks of this one's node. With those of the peers, and without a direct way, the wire is not used, and
            the constructor waits for their `Links` to be made, too.

    Raises:
        RuntimeError: a peer of this node is gone, or does not make its links in time.
    """

    def __init__(
        self,
        wire: dist.ProcessGroup | None,
        rank: int,
        peers: Iterable[int],
        *,
        device: torch.device,
        failures: FailureBoard,
        timeout_s: float,
        emulated: Mapping[tuple[int, int], Link] | None = None,
        ways: Mapping[int, DirectWay] | None = None,
        node: Neighbours | None = None,
    ) -> None:
        peers = sorted(set(peers))
        self._ways = {peer: way for peer, way in (ways or {}).items() if peer in peers}
        self._device = device_of(device)
        self._seen: set[Any] = set()  # kinds of messages
        self._direct: set[Any] = set()
        self._failures = failures
        self._patience = Patience(failures, timeout_s)
        self._closed = False
        emulated = emulated or {}
        self._rank, self._clocks = rank, {peer: LinkClock() for peer in peers}
        self._ends: dict[int, LinkEnd] = {}
        arrivals = {peer: Arrivals(self._clocks[peer], emulated.get((peer, rank))) for peer in peers}
        near = [peer for peer in peers if node is not None and peer in node and peer not in self._ways]
        if node is not None:
            self._connect(node, near, arrivals)
        for peer in peers:
            if peer not in near:
                assert wire is not None
                self._ends[peer] = WireEnd(
                    wire,
                    dist.get_group_rank(wire, peer),
                    names=(f"pipeline-send-{rank}-{peer}", f"pipeline-receive-{peer}-{rank}"),
                    device=self._device,
                    way=self._ways.get(peer),
                    direct=self._direct,
                    arrivals=arrivals[peer],
                )

    def _connect(self, node: Neighbours, near: Iterable[int], arrivals: Mapping[int, Arrivals]) -> None:
        try:
            for peer in sorted(near, reverse=True):  # as `Neighbours.meet` demands
                connection = node.meet(peer, self._patience, "did not make its links")
                self._ends[peer] = NodeEnd(connection, arrivals[peer])
        except BaseException:
            self.abort()
            raise

    def send(self, peer: int, message: Message) -> None:
        """Posts a message, does not wait for it to be out.

        Raises:
            RuntimeError: the peer is gone; names the cause.
            TypeError: a value that cannot travel.
        """
        end = self._ends[peer]
        if self._ways:
            self._seen.add(message.kind)
        end.post(message)
        deadline_s: float | None = None
        while end.broken is None and not end.room(LOOK_S):
            deadline_s = deadline_s or self._patience.deadline_s()
            self._patience.look(peer, deadline_s, "took nothing")
        if end.broken is not None:
            raise self._lost(peer, end.broken)

    def flush(self, peer: int) -> None:
        """Waits until everything posted is out."""
        end, deadline_s = self._ends[peer], self._patience.deadline_s()
        while not end.wait_out(LOOK_S):
            if end.broken is not None:
                raise self._lost(peer, end.broken)
            self._patience.look(peer, deadline_s, "took nothing")

    def receive(self, peer: int) -> Message:
        """Waits for the next message.

        Raises:
            RuntimeError: a rank has failed, the peer is gone, or nothing came in time; names rank and cause.
        """
        end, deadline_s = self._ends[peer], self._patience.deadline_s()
        while (came := end.take(LOOK_S)) is None:
            self._patience.look(peer, deadline_s, "sent nothing")
        if not isinstance(came, tuple):
            raise self._lost(peer, came)
        header, payload, usable_s, arrived = came
        while (early_s := usable_s - time.monotonic()) > 0.0:  # over an emulated link it would still be on its way
            time.sleep(min(early_s, LOOK_S))
            if early_s > LOOK_S:
                self._failures.check()
        if arrived is not None:
            arrived.hold()
        self._device.keep_for_stream(payload)
        return unpack(header, payload)

    def _lost(self, peer: int, why: str | Exception) -> Exception:
        """Returns the error to raise: what went wrong on this side, or that the peer is gone."""
        return why if isinstance(why, Exception) else self._failures.lost(peer, why)

    def settle(self) -> None:
        """Ends a step: all that goes directly is out, and messages of the kinds that it had go so from now on.

        Before, they go over the hosts: so nothing that a device runs for the first time waits for a neighbour. And what
        comes behind it, e.g. sums of gradients, is not begun before what the neighbours need for theirs.

        Raises:
            RuntimeError: a rank has failed, or a peer is gone.
        """
        for peer in self._ways:
            self.flush(peer)
        self._direct |= self._seen

    def times(self) -> list[LinkTime]:
        """Returns what was timed of messages to this rank since it was last asked; nothing of direct ways."""
        found: list[LinkTime] = []
        for peer, clock in self._clocks.items():
            messages, size_bytes, seconds = clock.take()
            if messages:
                found.append(
                    LinkTime(
                        source=peer, target=self._rank, messages=messages, size_bytes=size_bytes, seconds=seconds
                    )
                )
        return found

    def close(self) -> None:
        """Ends the links when all has been sent and the neighbours do the same; they can be waited for. Idempotent.

        Raises:
            RuntimeError: a neighbour is gone, or does not close its links in time.
        """
        if self._closed:
            return
        for end in self._ends.values():
            end.post(None)
        deadline_s = self._patience.deadline_s()
        try:
            for peer, end in self._ends.items():
                while not end.ended(LOOK_S):
                    self._patience.look(peer, deadline_s, "did not close its links")
        except BaseException:
            self.abort()
            raise
        self._closed = True
        self._let_go()

    def abort(self) -> None:
        """Ends the links at once, and with them all others that share the wire: neighbours that wait are told."""
        if self._closed:
            return
        self._closed = True
        for end in self._ends.values():
            end.abort()
        # A send that was posted while the connection broke, gloo may never end: that thread (a daemon) is left alone.
        deadline_s = time.monotonic() + _ABORT_S
        for end in self._ends.values():
            end.ended(max(0.0, deadline_s - time.monotonic()))
        self._let_go()

    def _let_go(self) -> None:
        """The wire ends when nobody holds it any more; this object may live until garbage is collected."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()
