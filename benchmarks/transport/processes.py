"""The processes of the benchmark: four workers that share a gloo group, and one server per transport.

Every measured round begins with a barrier of the group; its time is the slowest worker's.
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

from lightning_hetero.transport.base import Arrived, Ask, Gone, Link, Listener, Reply, Request, Say
from lightning_hetero.transport.pairs import PairLink, PairListener
from lightning_hetero.transport.shared_memory import SharedMemoryLink, SharedMemoryListener

__all__ = ["TRANSPORTS", "serve", "work"]

TRANSPORTS = ("shared memory", "pairs")
TOKEN = b"of the benchmark"
DONE = Reply(kind=Say.DONE)
BLOCK_FLOATS = 1 << 17  # 512 KiB


def serve(kind: str, workers: int, size_bytes: int, talk: Connection) -> None:
    """Answers MEET at once, and a round of PUSHes when it has summed all slots and published the sum."""
    _prepare()
    sizes = {"slot_bytes": size_bytes, "parameter_bytes": size_bytes}
    listener: Listener
    if kind == "pairs":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        listener = PairListener(store, ranks=range(workers), token=TOKEN, **sizes)
    else:
        listener = SharedMemoryListener.create(None, ranks=range(workers), **sizes)
    talk.send(listener.address)
    total = torch.zeros(size_bytes, dtype=torch.uint8)
    gone, version, pushed = 0, 0, 0
    while gone < workers:
        slots: list[torch.Tensor] = []
        for event in listener.events(None):
            gone += isinstance(event, Gone)
            if isinstance(event, Arrived) and event.request.kind == Ask.MEET:
                listener.reply(event.rank, DONE)
            elif isinstance(event, Arrived):
                slots.append(listener.gradient(event.rank, event.request.slot).view(torch.float32))
        _add(total.view(torch.float32), slots, fresh=pushed == 0)
        pushed += len(slots)
        if pushed == workers:
            version, pushed = version + 1, 0
            listener.publish(version, total)
            for rank in range(workers):
                listener.reply(rank, DONE)
    listener.close()


def _add(pool: torch.Tensor, slots: list[torch.Tensor], *, fresh: bool) -> None:
    """Adds all slots that have come meanwhile in one pass over the pool, by blocks that stay in the cache."""
    if not slots:
        return
    for start in range(0, pool.numel(), BLOCK_FLOATS):
        block = slice(start, start + BLOCK_FLOATS)
        target, parts = pool[block], [slot[block] for slot in slots]
        if fresh and len(parts) > 1:
            torch.add(parts[0], parts[1], out=target)
            parts = parts[2:]
        elif fresh:
            target.copy_(parts[0])
            parts = []
        for part in parts:
            target.add_(part)


def work(rank: int, workers: int, group_file: str, talk: Connection) -> None:
    """Runs the jobs that come over ``talk``: (name, arguments) -> result; None ends it."""
    _prepare()
    dist.init_process_group("gloo", group_file, timedelta(seconds=300), workers, rank)
    links: dict[str, Link] = {}
    while (job := talk.recv()) is not None:
        name, *args = job
        talk.send(_JOBS[name](links, rank, *args))
    for link in links.values():
        link.close()
    dist.destroy_process_group()


def _prepare() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)


def _connect(links: dict[str, Link], rank: int, kind: str, address: str) -> None:
    make: Any = PairLink if kind == "pairs" else SharedMemoryLink
    links[kind] = make(address, rank, **({"token": TOKEN} if kind == "pairs" else {}))


def _disconnect(links: dict[str, Link], rank: int, kind: str) -> None:
    links.pop(kind).close()


def _rounds(links: dict[str, Link], rank: int, floats: int, rounds: int) -> dict[str, list[float]]:
    """Times ``rounds`` of each way to get the sum of all gradients, interleaved; checks each sum."""
    gradient = torch.full((floats,), float(rank + 1))
    result = torch.empty_like(gradient)
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
                _push_and_pull(links[name], gradient, result)
            times_s[name].append(time.perf_counter() - start)
            if result[0] != expected or result[-1] != expected:
                raise RuntimeError(f"{name}: the sum is {result[0]}, not {expected}")
    return times_s


def _push_and_pull(link: Link, gradient: torch.Tensor, result: torch.Tensor) -> None:
    link.open_slot()
    link.gradient.copy_(gradient.view(torch.uint8))
    link.call(Request(kind=Ask.PUSH, slot=link.close_slot()))
    link.read_parameters(result.view(torch.uint8))


def _latency(links: dict[str, Link], rank: int, kind: str, calls: int) -> float:
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
