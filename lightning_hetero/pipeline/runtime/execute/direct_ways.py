"""Payloads that go from device to device, past the hosts' memory: NCCL's communicators (layer T).

    sender     waits until the payload is computed
               header ── wire (gloo) ──► receiver
                                         makes room
               ◄── wire: clear ─────────
               posts its send            posts its receive
               payload ─── device ─────► payload

An operation of NCCL waits on the device, where nothing can reach it, and a device that waits frees no memory. So
it is only begun when the other side is about to do its part without needing anything more, a computation least of all:
nobody waits for a rank that is late, or dead, but on the host, where failures are looked for. Each direction of each
pair has its own communicator, because one carries out its operations one after the other.

A device takes its turn in one of these transfers at a time, and of two ranks the lower one takes its own first. So none
waits for another in a circle, even where a device can do only one thing after another: because of a setting
(``CUDA_LAUNCH_BLOCKING=1``, ``CUDA_DEVICE_MAX_CONNECTIONS=1``, ``NCCL_LAUNCH_ORDER_IMPLICIT=1``), or while it loads a
kernel that it has not run before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.decide.links import RankDevice
from lightning_hetero.transport.groups import close_connections, make_group
from lightning_hetero.transport.sockets import FOREVER

_HOST_BACKENDS = {"", "gloo", "mpi"}
_TAG = 0x9A58


def rank_device(device: torch.device, backend: str | None) -> RankDevice:
    """Returns what a rank computes on, as `direct_pairs` wants to know it.

    Args:
        device: of this rank.
        backend: of the run's process groups, e.g. ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    parts = [part.rpartition(":") for part in (backend or "").split(",")]
    own = next((name for kind, _, name in parts if kind in ("", device.type)), "")
    if not device_of(device).asynchronous or own in _HOST_BACKENDS:
        return RankDevice(identity="", backend="")
    return RankDevice(identity=device_of(device).identity(), backend=own)


def _nothing() -> None: ...


class DirectWay:
    """The way to one neighbour and back.

    Args:
        there: process group of the two ranks, for what goes to the peer.
        back: another one, for what comes from it.
        rank, peer: this process and the neighbour, global.
        device: of this rank.
        turn: held while this rank takes part in a transfer, whoever the neighbour is.
    """

    def __init__(
        self, there: Any, back: Any, rank: int, peer: int, device: torch.device, turn: threading.Lock
    ) -> None:
        self._there, self._back = there, back
        self._to, self._from = dist.get_group_rank(there, peer), dist.get_group_rank(back, peer)
        self._device, self._turn, self._is_first = device_of(device), turn, rank < peer
        # NCCL's operations end on the device; gloo's only when they are waited for.
        self._on_device = dist.get_backend(there) != "gloo"
        self._streams = [self._device.side_stream() for _ in range(2)]

    def send(self, payload: Tensor, announce: Callable[[], None] = _nothing) -> None:
        """Sends a payload and waits until it is out. For the sending thread.

        Args:
            payload: on the device, where it has been computed; whoever calls holds it meanwhile.
            announce: says to the peer that it comes, and returns when that has made room; by default the peer knows.

        Raises:
            RuntimeError: it has failed.
        """
        outer, inner = (self._turn, nullcontext()) if self._is_first else (nullcontext(), self._turn)
        with outer:
            announce()
            with inner, self._device.on(self._streams[0]):
                self._carried(self._there.send([payload], self._to, _TAG))

    def receive(self, size_bytes: int, clear: Callable[[], None] = _nothing) -> Tensor:
        """Returns a payload that has been announced, when it is here. For the receiving thread.

        Args:
            size_bytes: of it.
            clear: says to the peer that there is room; by default it knows.

        Raises:
            RuntimeError: it has failed, or there is no room.
        """
        with self._turn, self._device.on(self._streams[1]):
            payload = torch.empty(size_bytes, dtype=torch.uint8, device=self._device.device)
            clear()
            self._carried(self._back.recv([payload], self._from, _TAG))
        return payload

    def _carried(self, work: Any) -> None:
        """Waits on the host until an operation has ended."""
        if not self._on_device:
            work.wait(FOREVER)
            return
        work.wait()  # the stream does
        self._device.stamp().wait()
        work.is_completed()  # takes note of what went wrong
        work.wait()  # raises it

    def abort(self) -> None:
        """Ends what is under way, on the device too; the way is of no use afterwards."""
        for group in (self._there, self._back):
            with contextlib.suppress(RuntimeError):  # it may have been aborted, or never begun
                group.abort() if self._on_device else close_connections(group)


class DirectWays:
    """All direct ways of a run.

    Args:
        rank: this process, global.
        backend, timeout: of the groups.
        device: of this rank.

    Attributes:
        by_peer: this rank's.
    """

    def __init__(self, rank: int, *, backend: str, timeout: timedelta | None, device: torch.device) -> None:
        self._rank, self._backend, self._timeout, self._device = rank, backend, timeout, device
        self._groups: dict[tuple[int, int], Any] = {}
        self._turn = threading.Lock()
        self.by_peer: dict[int, DirectWay] = {}

    def prepare(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes the ways that are missing, and keeps the others; collective over all ranks.

        Args:
            pairs: of source and target, sorted, the same on all ranks; see `direct_pairs`.
        """
        pairs = [pair for pair in pairs if pair not in self._groups]
        for pair in pairs:
            self._groups[pair] = make_group(sorted(pair), self._timeout, self._backend)
        for peer in [b for a, b in pairs if a == self._rank]:
            there, back = self._groups[self._rank, peer], self._groups[peer, self._rank]
            self.by_peer[peer] = DirectWay(there, back, self._rank, peer, self._device, self._turn)
        # A greeting makes a communicator, which takes both ends: one after the other, in one order, never in a circle.
        with device_of(self._device).current():
            for a, b in pairs:
                if self._rank == a:
                    greeting = torch.zeros(1, dtype=torch.uint8, device=self._device)
                    device_of(self._device).stamp().wait()
                    self.by_peer[b].send(greeting)
                elif self._rank == b:
                    self.by_peer[a].receive(1)

    def close(self) -> None:
        """Destroys the groups; not after a failure, when peers may be gone."""
        for group in self._groups.values():
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._groups.clear()
        self.by_peer.clear()
