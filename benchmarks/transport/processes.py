"""The processes of the benchmark: four workers that share a gloo group, and one server per transport.

Every measured round begins with a barrier of the group; its time is the slowest worker's. Slots are summed as the
parameter server does it (`GradientSum`, `ThreadShards`), with the area that is published as the
sum's memory: no optimizer steps.
"""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.stale.runtime.memory.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, Spares, runs
from lightning_hetero.stale.runtime.serve.thread_shards import ThreadShards
from lightning_hetero.transport.base import Arrived, Ask, Gone, Listener, Reply, Request, Say, WorkerLink
from lightning_hetero.transport.pairs.listener import PairLink, PairListener
from lightning_hetero.transport.seqlock import copy_bytes
from lightning_hetero.transport.shared_memory.listener import SharedMemoryLink, SharedMemoryListener

__all__ = ["TRANSPORTS", "Summer", "layout_of", "serve", "span", "work"]

TRANSPORTS = ("shared memory", "pairs")
TOKEN = b"of the benchmark"
DONE = Reply(kind=Say.DONE)
PARAMETER_FLOATS = 1_000_000


def layout_of(floats: int) -> FlatLayout:
    """Returns the layout of a model with so many numbers, in parameters of at most a million."""
    sizes = [min(PARAMETER_FLOATS, floats - start) for start in range(0, floats, PARAMETER_FLOATS)]
    return FlatLayout.of([(f"parameter {i}", torch.empty(size)) for i, size in enumerate(sizes)])


def span(layout: FlatLayout) -> tuple[int, int]:
    """Returns the bytes of the gradients in the slot; there are no gaps."""
    (start, _), (_, stop) = layout.gradient_ranges[0], layout.gradient_ranges[-1]
    return start, stop


def serve(kind: str, workers: int, floats: int, talk: Connection) -> None:
    """Answers MEET at once, and a round of PUSHes when it has summed all slots and published the sum."""
    _prepare()
    layout = layout_of(floats)
    sizes = {"slot_bytes": layout.slot_bytes, "parameter_bytes": layout.bytes}
    listener: Listener
    if kind == "pairs":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        listener = PairListener(store, ranks=range(workers), token=TOKEN, **sizes)
    else:
        listener = SharedMemoryListener.create(None, ranks=range(workers), **sizes)
    talk.send(listener.address)
    summer, gone, version = Summer(layout), 0, 0
    while gone < workers:
        for event in listener.events(None):
            gone += isinstance(event, Gone)
            if isinstance(event, Arrived) and event.request.kind == Ask.MEET:
                listener.reply(event.rank, DONE)
            elif isinstance(event, Arrived):
                summer.take(listener.gradient(event.rank, event.request.slot))
        summer.sum_up()
        if summer.taken == workers:
            version += 1
            listener.publish(version, summer.area)
            summer.begin()
            for rank in range(workers):
                listener.reply(rank, DONE)
    summer.close()
    listener.close()


class Summer:
    """Sums slots into an area, as the parameter server does.

    Attributes:
        area: uint8, the sum of all taken since `begin`.
        taken: their number.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout, self._spares = layout, Spares(layout)
        self.area = torch.zeros(layout.bytes, dtype=torch.uint8)
        self._shards = ThreadShards([entry.numel for entry in layout.parameters])
        self._runs = [runs(layout, part) for part in self._shards.parts]
        self._seen: dict[int, list[torch.Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """Begins the next sum, which overwrites the last."""
        self.taken = 0
        self._pool = GradientSum(self._layout, self._spares)
        for i, view in enumerate(self._layout.views(self.area)):
            self._spares.give(i, view)

    def take(self, slot: torch.Tensor) -> None:
        """Takes a slot, which stays as it is until `sum_up`."""
        if (values := self._seen.get(slot.data_ptr())) is None:
            values = self._seen[slot.data_ptr()] = self._layout.values_of(slot)
        self._pool.wait([1] * len(values), values, self._pool.count(1.0, 1, 1.0))
        self.taken += 1

    def sum_up(self) -> None:
        """Adds what was taken and is still in its slot."""
        if self._pool.waits:
            self._shards.run(lambda shard: [self._pool.sum_up(run) for run in self._runs[shard]])
            self._pool.summed_up()

    def close(self) -> None:
        """Ends its threads."""
        self._shards.close()


def work(rank: int, workers: int, group_file: str, talk: Connection) -> None:
    """Runs the jobs that come over ``talk``: (name, arguments) -> result; None ends it."""
    _prepare()
    dist.init_process_group("gloo", group_file, timedelta(seconds=300), workers, rank)
    links: dict[str, WorkerLink] = {}
    while (job := talk.recv()) is not None:
        name, *args = job
        talk.send(_JOBS[name](links, rank, *args))
    for link in links.values():
        link.close()
    dist.destroy_process_group()


def _prepare() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


def _connect(links: dict[str, WorkerLink], rank: int, kind: str, address: str) -> None:
    make: Any = PairLink if kind == "pairs" else SharedMemoryLink
    links[kind] = make(address, rank, **({"token": TOKEN} if kind == "pairs" else {}))


def _disconnect(links: dict[str, WorkerLink], rank: int, kind: str) -> None:
    links.pop(kind).close()


def _rounds(links: dict[str, WorkerLink], rank: int, floats: int, rounds: int) -> dict[str, list[float]]:
    """Times ``rounds`` of each way to get the sum of all gradients, interleaved; checks each sum."""
    gradient = torch.full((floats,), float(rank + 1))
    result = torch.empty_like(gradient)
    gradients = slice(*span(layout_of(floats)))
    expected = float(sum(range(1, dist.get_world_size() + 1)))
    times_s: dict[str, list[float]] = {name: [] for name in ("all_reduce", *links)}
    for _ in range(rounds):
        for name in times_s:
            result.copy_(gradient)
            dist.barrier()
            start = time.perf_counter()
            if name == "all_reduce":
                dist.all_reduce(result)
            else:
                _push_and_pull(links[name], gradient, result, gradients)
            times_s[name].append(time.perf_counter() - start)
            if result[0] != expected or result[-1] != expected:
                raise RuntimeError(f"{name}: the sum is {result[0]}, not {expected}")
    return times_s


def _push_and_pull(link: WorkerLink, gradient: torch.Tensor, result: torch.Tensor, gradients: slice) -> None:
    link.open_slot()
    copy_bytes(link.gradient[gradients], gradient.view(torch.uint8), 1)
    link.call(Request(kind=Ask.PUSH, slot=link.close_slot()))
    link.read_parameters(result.view(torch.uint8))


def _latency(links: dict[str, WorkerLink], rank: int, kind: str, calls: int) -> float:
    """Returns the median time [s] of a small request and its answer; rank 0 alone asks."""
    if rank != 0:
        return 0.0
    times_s: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        links[kind].call(Request(kind=Ask.MEET))
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


_JOBS: dict[str, Any] = {
    "connect": _connect,
    "disconnect": _disconnect,
    "latency": _latency,
    "rounds": _rounds,
}
