"""All links of one rank to its neighbours in a pipeline (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.messages import Message
from lightning_hetero.pipeline.runtime.execute.stage_link import StageLink
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.groups import close_connections

_ABORT_S = 1.0  # how long threads may take to notice that a connection is closed

ClockOf = Callable[[int], Any]
"""From a neighbour, global rank, to what times that which comes from there, a `LinkClock`."""


class StageLinks:
    """All links of one rank, made and ended together.

    Args:
        wire: see `StageLink`; None: there are no neighbours.
        rank: this process, global.
        peers: its neighbours, global ranks.
        device: of this rank's layers: where received tensors are put.
        failures: looked at while waiting.
        timeout_s: how long `receive` waits at most.
        ways: by peer, for those to which payloads go directly, from the second step of a kind on, see `StageLink`.
        clock: see `ClockOf`; None: links are not emulated.
    """

    def __init__(
        self, wire: dist.ProcessGroup | None, rank: int, peers: Iterable[int], *, device: torch.device,
        failures: FailureBoard, timeout_s: float, ways: Mapping[int, DirectWay] | None = None,
        clock: ClockOf | None = None,
    ) -> None:  # fmt: skip
        self._wire, self._rank = wire, rank
        self._closed = False
        self._links = {
            peer: StageLink(
                wire, peer, rank=rank, device=device_of(device), clock=clock(peer) if clock else LinkClock(),
                failures=failures, timeout_s=timeout_s, way=(ways or {}).get(peer),
            )
            for peer in sorted(set(peers))
        }  # fmt: skip

    def send(self, peer: int, message: Message) -> None:
        """Posts a message, see `StageLink.send`."""
        self._links[peer].send(message)

    def receive(self, peer: int) -> Message:
        """Waits for the next message, see `StageLink.receive`."""
        return self._links[peer].receive()

    def settle(self) -> None:
        """Ends a step, see `StageLink.settle`."""
        for link in self._links.values():
            link.settle()

    def times(self) -> list[LinkTime]:
        """Returns what was timed of messages to this rank since it was last asked; nothing of direct ways."""
        taken = {peer: link.clock.take() for peer, link in self._links.items()}
        return [
            LinkTime(source=peer, target=self._rank, messages=messages, size_bytes=size_bytes, seconds=seconds)
            for peer, (messages, size_bytes, seconds) in taken.items()
            if messages
        ]

    def close(self) -> None:
        """Ends the links when all has been sent and the neighbours do the same; they can be waited for. Idempotent.

        Raises:
            RuntimeError: a neighbour is gone, or does not close its links in time.
        """
        if self._closed:
            return
        for link in self._links.values():
            link.say_last()
        try:
            for link in self._links.values():
                link.wait_closed()
        except BaseException:
            self.abort()
            raise
        self._let_go()

    def abort(self) -> None:
        """Ends the links at once, and with them all others that share the wire: neighbours that wait notice."""
        if self._closed:
            return
        for link in self._links.values():
            link.abort()
        if self._links:
            close_connections(self._wire)
        # A send that was posted while the connection broke, gloo may never end: that thread (a daemon) is left alone.
        deadline_s = awake_s() + _ABORT_S
        for link in self._links.values():
            link.forget(deadline_s)
        self._let_go()

    def _let_go(self) -> None:
        """The wire ends when nobody holds it any more; this object may live until garbage is collected."""
        self._closed = True
        self._links.clear()
        del self._wire
