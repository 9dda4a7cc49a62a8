"""Measures a link with the process group that carries messages over it (layer T).

From a to b: a sends, b confirms with one byte, a reads its clock. One byte takes two latencies, a large message takes
its transfer more; the line through both gives ``latency_s`` (half of the fixed part: clocks of two hosts cannot be
compared, so a latency is the same in both directions) and ``bandwidth_bytes_per_s`` (of this direction alone).
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.measure.device import device_of
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import Link

_REPEATS = 6
_SMALL_BYTES = 1
_FIRST_BYTES = 1 << 16  # grows from here until a message takes its part of the budget
_MOST_BYTES, _MOST_BYTES_ACCELERATOR = 1 << 22, 1 << 26


class LinkProbe:
    """Both roles in the measurement of one link. Every message is announced by its size; 0 ends the talk.

    Args:
        group: that carries messages.
        peer: the other rank in it.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.peer, self._group = peer, group
        self._peer = dist.get_global_rank(group, peer)
        self._on = device_of(device)
        # Gloo does not send from a device's memory: a message passes through pinned host memory at both ends.
        self._staged = self._on.asynchronous and dist.get_backend(group) == "gloo"
        self._wire = torch.device("cpu") if self._staged else device
        self._most_bytes = _MOST_BYTES_ACCELERATOR if self._on.asynchronous else _MOST_BYTES
        self._body = torch.zeros(self._most_bytes, dtype=torch.uint8, device=self._wire, pin_memory=self._staged)
        self._own = torch.zeros_like(self._body, device=device) if self._staged else self._body
        self._byte = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        self._size = torch.zeros(1, dtype=torch.int64, device=self._wire)

    def measure(self, budget_s: float) -> Link:
        """Returns the link to the peer, which must be in `answer`.

        The least of several times counts: whatever else the two processes' hosts do only ever adds to a time.
        """
        end_s = time.perf_counter() + budget_s
        self._time(_SMALL_BYTES)  # connections and buffers
        small_s = self._least(_SMALL_BYTES, 4 * _REPEATS, end_s - 0.7 * budget_s)
        size, large_s = _FIRST_BYTES, self._time(_FIRST_BYTES)
        while size < self._most_bytes and (part_s := (end_s - time.perf_counter()) / _REPEATS) > 2.0 * large_s:
            size = min(self._most_bytes, int(size * min(16.0, part_s / max(large_s, 1e-9))))
            large_s = self._time(size)
        large_s = min(large_s, self._least(size, _REPEATS, end_s))
        self._send(self._size.fill_(0))
        cost = fit_affine([_SMALL_BYTES, size], [small_s, large_s])
        # Where noise hides the transfer, all of the time is taken for it: no link is free.
        rate = 1.0 / cost.per_sample_s if cost.per_sample_s > 0.0 else size / max(large_s, 1e-9)
        return Link(bandwidth_bytes_per_s=rate, latency_s=cost.fixed_s / 2.0)

    def _least(self, size_bytes: int, repeats: int, until_s: float) -> float:
        least_s = self._time(size_bytes)
        for _ in range(repeats - 1):
            if time.perf_counter() >= until_s:
                break
            least_s = min(least_s, self._time(size_bytes))
        return least_s

    def answer(self) -> None:
        """Takes in what the peer's `measure` sends and confirms it, until it has seen enough."""
        while True:
            self._receive(self._size)
            size = int(self._size.item())
            if size == 0:
                return
            self._send(self._byte)
            body = self._body[:size]
            self._receive(body)
            if self._staged:
                self._own[:size].copy_(body)
                self._on.synchronize()
            self._send(self._byte)

    def _time(self, size_bytes: int) -> float:
        self._send(self._size.fill_(size_bytes))
        self._receive(self._byte)  # the peer is ready: its being late is no part of the link
        self._on.synchronize()
        start_s = time.perf_counter()
        body = self._body[:size_bytes]
        if self._staged:
            body.copy_(self._own[:size_bytes])
        self._send(body)
        self._receive(self._byte)
        return time.perf_counter() - start_s

    def _send(self, message: Tensor) -> None:
        self._settle(dist.isend(message, self._peer, group=self._group))

    def _receive(self, message: Tensor) -> None:
        self._settle(dist.irecv(message, self._peer, group=self._group))

    def _settle(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank belongs to the group"
        work.wait()
        if not self._staged:
            self._on.synchronize()  # NCCL's wait is for the stream only
