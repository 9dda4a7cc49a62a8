"""Payloads that go from device to device, past the hosts' memory: NCCL's communicators (layer T).

    sender     header ── wire (gloo) ──► receiver
                                         makes room, posts its receive
               ◄── wire: clear ─────────
               posts its send ── device ──► payload

An operation of NCCL waits on the device, where nothing can be told to it, and a device that waits frees no memory. So
it is only begun when the other side is known to do its part without needing anything more: nobody waits for a rank that
is late, or dead, but on the host, where failures are looked for. Each direction of each pair has a communicator of its
own, because one carries out its operations one after the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.pipeline.decide.direct_links import RankDevice
from lightning_hetero.transport.pairs.frames import FOREVER

__all__ = ["DirectWay", "DirectWays", "device_of"]

_POLL_S = 5e-5
_TAG, _TAG_OF_THE_END = 0x9A58, 0x9A59


def device_of(device: torch.device, backend: str | None) -> RankDevice:
    """Returns what a rank computes on, as `direct_pairs` wants to know it.

    Args:
        device: of this rank.
        backend: of the run's process groups, e.g. ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    if device.type != "cuda" or "nccl" not in (backend or ""):
        return RankDevice(identity="", backend="")
    return RankDevice(identity=str(torch.cuda.get_device_properties(device).uuid), backend="nccl")


class DirectWay:
    """The way to one neighbour and back.

    Args:
        there: process group of the two ranks, for what goes to the peer.
        back: another one, for what comes from it.
        peer: the neighbour, global rank.
        device: of this rank.
    """

    def __init__(
        self, there: dist.ProcessGroup, back: dist.ProcessGroup, peer: int, device: torch.device
    ) -> None:
        self._there: Any = there  # torch's stubs do not know of send and recv
        self._back: Any = back
        self._to, self._from = dist.get_group_rank(there, peer), dist.get_group_rank(back, peer)
        self._device = device
        # NCCL's operations end on the device; gloo's only when they are waited for.
        self._polled = dist.get_backend(there) == "nccl"
        on_cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_cuda else []

    def send(self, payload: Tensor, ready: Any) -> None:
        """Sends a payload and waits until it is out; the peer has cleared it. For the sending thread.

        Args:
            payload: on the device; whoever calls holds it meanwhile.
            ready: event after which its bytes are there; None: they are.
        """
        with self._on_stream(0):
            if ready is not None:
                self._streams[0].wait_event(ready)
            work = self._there.send([payload], self._to, _TAG)
        while not self.arrived(work):
            time.sleep(_POLL_S)

    def post_receive(self, size_bytes: int) -> tuple[Tensor, Any]:
        """Returns room for a payload, and what `arrived` is to be asked for. For the receiving thread."""
        with self._on_stream(1):
            payload = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            return payload, self._back.recv([payload], self._from, _TAG)

    def settled(self, work: Any) -> Any:
        """Waits, in the receiving thread, for a backend whose operations end only by that; None: it has ended."""
        if self._polled:
            return work
        work.wait(FOREVER)
        return None

    def arrived(self, work: Any) -> bool:
        """Returns whether an operation has ended; does not wait, but for a backend that cannot tell.

        Raises:
            RuntimeError: it has failed.
        """
        if not self._polled:
            work.wait(FOREVER)
            return True
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong
        return True

    def take_over(self, payload: Tensor) -> Tensor:
        """Lets the caller's stream use what has arrived."""
        if payload.device.type == "cuda":
            payload.record_stream(torch.cuda.current_stream(payload.device))
        return payload

    def abort(self) -> None:
        """Ends what is under way, on the device too; the way is of no use afterwards."""
        for group, peer in ((self._there, self._to), (self._back, self._from)):
            with contextlib.suppress(RuntimeError):  # it may have been aborted, or never begun
                if self._polled:
                    group.abort()
                else:  # gloo closes its connections when any of its waits times out
                    end = torch.empty(1, dtype=torch.uint8)
                    group.recv([end], peer, _TAG_OF_THE_END).wait(timedelta(milliseconds=1))

    def _on_stream(self, number: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()


class DirectWays:
    """All direct ways of a run; the constructor is collective over all ranks, whether they have one or not.

    Args:
        pairs: of source and target, sorted, the same on all ranks; see `direct_pairs`.
        rank: this process, global.
        backend, timeout: of the groups.
        device: of this rank.

    Attributes:
        by_peer: this rank's.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[int, int]],
        *,
        rank: int,
        backend: str,
        timeout: timedelta | None,
        device: torch.device,
    ) -> None:
        self._rank, self._backend, self._timeout, self._device = rank, backend, timeout, device
        self._groups: dict[tuple[int, int], Any] = {}
        self.by_peer: dict[int, DirectWay] = {}
        self.prepare(pairs)

    def prepare(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes the ways that are missing, and keeps the others; collective, as the constructor."""
        pairs = [pair for pair in pairs if pair not in self._groups]
        for pair in pairs:
            self._groups[pair] = dist.new_group(sorted(pair), self._timeout, self._backend)
        for peer in [b for a, b in pairs if a == self._rank]:
            there, back = self._groups[self._rank, peer], self._groups[peer, self._rank]
            self.by_peer[peer] = DirectWay(there, back, peer, self._device)
        with _current(self._device):
            self._greet(pairs, self._rank)

    def _greet(self, pairs: Sequence[tuple[int, int]], rank: int) -> None:
        """Makes the communicators, which takes both ends, one after the other in one order: never in a circle."""
        for a, b in pairs:
            if rank == a:
                way = self.by_peer[b]
                ready = None
                greeting = torch.zeros(1, dtype=torch.uint8, device=way._device)
                if greeting.device.type == "cuda":
                    ready = torch.cuda.Event()
                    ready.record()
                way.send(greeting, ready)
            elif rank == b:
                way = self.by_peer[a]
                _, work = way.post_receive(1)
                while not way.arrived(work):
                    time.sleep(_POLL_S)

    def close(self) -> None:
        """Destroys the groups; not after a failure, when peers may be gone."""
        for group in self._groups.values():
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._groups.clear()
        self.by_peer.clear()


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
