"""Measures the cluster at start-up: speeds, free memory and all links, in a fraction of a second (layer T).

    facts of all ranks ──► cached? ──► speed of each device, all at once ──► links, pair by pair ──► gather

*Speed*: seconds of a matrix product per FLOP and of an elementwise sum per byte, weighed as in a typical layer (20 FLOP
per byte). It ranks devices; what a layer costs ``pipeline.runtime.measure`` tells. All ranks measure at the same
time, since they will also train at the same time: processes that share a device see their share of it.

*Link* from a to b: a sends, b confirms with one byte, a reads its clock. One byte takes two latencies, a large message
takes its transfer more; the line through both gives ``latency_s`` (half of the fixed part: clocks of two hosts cannot
be compared, so a latency is the same in both directions) and ``bandwidth_bytes_per_s`` (of this direction alone).

Noise must not become structure: devices of the same kind whose speeds differ by less than 5 % are taken for equal, and
so are the links between the same two hosts; among the GPUs of one host, those that differ by less than 25 %.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.cluster.pairing import Pair, complete_links, level, meetings
from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain, override_cluster
from lightning_hetero.measure import cache
from lightning_hetero.measure.timer import Timer
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import Cluster, Device, Link

__all__ = ["free_memory_bytes", "measure_speed", "probe_cluster", "probe_key"]

VERSION = 1  # of the procedure; part of the cache's key
CACHE_KIND = "cluster"

_FLOP, _TRAFFIC_BYTES = 1e9, 5e7  # what "speed" is the inverse of the time of
_SPEED_PART = 0.3  # of the budget; the rest goes to the links
_REPEATS = 6
_SMALL_BYTES = 1
_FIRST_BYTES = 1 << 16  # grows from here until a message takes its part of the budget
_MOST_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}
_LEAST_LINK_S = 0.004  # a direction's part of the budget, however many ranks there are


def probe_cluster(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    given: Cluster | None = None,
    mem_bytes: float | None = None,
    dtype: torch.dtype = torch.float32,
    reference_rank: int = 0,
    budget_s: float = 0.4,
    speed_tolerance: float = 0.05,
    link_tolerance: float = 0.25,
    cache_folder: str | Path | None = None,
    now_s: float = math.nan,
    max_age_s: float = 86400.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Cluster:
    """Returns the same description of the group's devices and links on every rank. Collective; blocks.

    With NCCL the first message between two ranks makes their communicator, which takes far longer than the budget; the
    group that training will use pays that once.

    Args:
        group: the ranks in question; with gloo and CUDA devices, copies to and from the host count for the links.
        device: this rank's.
        given: used in place of measuring anything, e.g. an emulated cluster.
        mem_bytes: this rank may use no more than this, whatever is free [bytes]; ``None``: what is free.
        dtype: in which the speed is measured; what will be trained in.
        reference_rank: the device of speed 1, on which layers are profiled.
        budget_s: aimed-at length of the measurement [s].
        speed_tolerance: relative difference below which devices of the same kind are equally fast.
        link_tolerance: relative difference below which links among the GPUs of one host are equal.
        cache_folder: where the group's first rank keeps the result; ``None``: measured every time. Memory never comes
            from there.
        now_s: time of day [s], for the cache's age; the group's first rank needs it, without it nothing is kept.
        max_age_s: an older result is measured again [s].
        clock: host clock [s]; injectable for tests.

    Returns:
        The cluster, by rank in the group; names are ``host/cuda:1`` or ``host/cpu:<rank>``.

    Raises:
        ValueError: ``given`` has not one device per rank of the group, or an argument is out of its range.
        RuntimeError: a rank failed or did not answer within the group's timeout.
    """
    size = dist.get_world_size(group)
    if given is not None:
        if len(given.devices) != size:
            raise ValueError(
                f"the given cluster has {len(given.devices)} devices, but the group has {size} ranks: describe one"
                " device per rank"
            )
        return given
    if not 0 <= reference_rank < size:
        raise ValueError(f"reference_rank={reference_rank} must be in 0..{size - 1} (ranks of the group)")
    if not (math.isfinite(budget_s) and budget_s > 0.0):
        raise ValueError(f"budget_s={budget_s!r} must be a finite number > 0 (seconds)")
    if mem_bytes is not None and not mem_bytes > 0.0:
        raise ValueError(f"mem_bytes={mem_bytes!r} must be > 0 (bytes), or None for what is free")
    probe = _Probe(group, device, dtype, budget_s, clock)
    facts: list[dict[str, Any]] = probe.gather(probe.facts(mem_bytes))
    memory = [math.inf if fact["mem_bytes"] is None else fact["mem_bytes"] for fact in facts]
    key = probe_key([(f["host"], f["name"], f["kind"]) for f in facts], backend=probe.backend, dtype=dtype)
    # The first rank alone looks: files may differ from host to host, and all must agree on what is measured.
    found = _find(cache_folder, key, now_s, max_age_s, size) if probe.rank == 0 else None
    found = probe.gather(found)[0]
    if found is None:
        speed = probe.speed()
        links = probe.links(meetings([f["host"] for f in facts]))
        results: list[tuple[float, dict[Pair, Link]]] = probe.gather((speed, links))
        cluster = _assemble(facts, results, reference_rank, speed_tolerance, link_tolerance)
        if cache_folder is not None and probe.rank == 0 and math.isfinite(now_s):
            data = {"measured_s": now_s, "reference": reference_rank, "cluster": cluster_to_plain(cluster)}
            cache.save(cache_folder, CACHE_KIND, key, data)
    else:
        cluster = cluster_from_plain(found["cluster"])
        reference = cluster.devices[reference_rank].speed
        cluster = override_cluster(cluster, speeds=[d.speed / reference for d in cluster.devices])
    return override_cluster(cluster, mem_bytes=memory)


def probe_key(ranks: Sequence[tuple[str, str, str]], *, backend: str, dtype: torch.dtype) -> str:
    """Returns the cache key of a measurement.

    Args:
        ranks: (host, name of the device there, its kind), by rank.
        backend: of the group, e.g. ``gloo``.
        dtype: in which the speed is measured.
    """
    return cache.key_of([VERSION, [list(rank) for rank in ranks], backend, str(dtype), torch.__version__])


def free_memory_bytes(device: torch.device) -> float:
    """Returns what training may still use on the device; ``inf`` where nothing tells (CPU) [bytes]."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    # What this process's allocator holds without using it is as good as free.
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def measure_speed(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = 0.1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns how often per second the device does 1 GFLOP of matrix products and moves 50 MB elementwise.

    The generators of random numbers are not touched.

    Args:
        device: to measure.
        dtype: of the operands.
        budget_s: about how long to measure [s]; at least three repeats are made.
        clock: host clock [s]; injectable for tests.
    """
    side, length = (4096, 1 << 24) if device.type == "cuda" else (192, 1 << 19)
    a = torch.ones(side, side, dtype=dtype, device=device)
    x = torch.ones(length, dtype=dtype, device=device)
    product, total = torch.empty_like(a), torch.empty_like(x)
    timer = Timer(device, clock)
    products: list[float] = []
    sums: list[float] = []
    end_s, warm_ups = clock() + budget_s, 2
    while clock() < end_s or len(products) < 3 + warm_ups:
        start = timer.mark()
        torch.mm(a, a, out=product)
        middle = timer.mark()
        torch.add(x, x, out=total)
        end = timer.mark()
        products.append(timer.seconds(start, middle))
        sums.append(timer.seconds(middle, end))
    per_flop_s = median(products[warm_ups:]) / (2.0 * side**3)
    per_byte_s = median(sums[warm_ups:]) / (3.0 * length * x.element_size())
    return 1.0 / max(_FLOP * per_flop_s + _TRAFFIC_BYTES * per_byte_s, 1e-12)


def _find(
    folder: str | Path | None, key: str, now_s: float, max_age_s: float, size: int
) -> dict[str, Any] | None:
    found = None if folder is None else cache.load(folder, CACHE_KIND, key)
    try:
        if found is None or not 0.0 <= now_s - float(found["measured_s"]) <= max_age_s:
            return None
        return found if len(cluster_from_plain(found["cluster"]).devices) == size else None
    except (KeyError, TypeError, ValueError):  # written by something else
        return None


def _assemble(
    facts: Sequence[dict[str, Any]],
    results: Sequence[tuple[float, dict[Pair, Link]]],
    reference_rank: int,
    speed_tolerance: float,
    link_tolerance: float,
) -> Cluster:
    speeds = [speed for speed, _ in results]
    for kind in {fact["kind"] for fact in facts}:
        alike = [rank for rank, fact in enumerate(facts) if fact["kind"] == kind]
        for rank, speed in zip(alike, level([speeds[r] for r in alike], speed_tolerance), strict=True):
            speeds[rank] = speed
    devices = [
        Device(name=f"{fact['host']}/{fact['name']}", speed=speed / speeds[reference_rank])
        for fact, speed in zip(facts, speeds, strict=True)
    ]
    measured = {pair: link for _, links in results for pair, link in links.items()}
    wired = {fact["host"] for fact in facts if not fact["name"].startswith("cpu")}
    rows = complete_links(measured, [fact["host"] for fact in facts], wired=wired, tolerance=link_tolerance)
    return Cluster(devices=tuple(devices), links=rows)


class _Probe:
    """One rank's part."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        budget_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.group, self.device, self.dtype, self.budget_s, self.clock = group, device, dtype, budget_s, clock
        self.rank = dist.get_rank(group)
        self.backend = str(dist.get_backend(group))

    def facts(self, mem_bytes: float | None) -> dict[str, Any]:
        """Returns what tells this rank from others, and its memory now (None: no limit)."""
        device = self.device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            name, kind = f"cuda:{index}", torch.cuda.get_device_name(device)
        else:
            name, kind = f"{device.type}:{self.rank}", f"{platform.machine()}, {torch.get_num_threads()} threads"
        memory = min(free_memory_bytes(device), math.inf if mem_bytes is None else mem_bytes)
        return {
            "host": platform.node(),
            "name": name,
            "kind": kind,
            "mem_bytes": None if memory == math.inf else memory,
        }

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self.group)
        # NCCL moves objects through the current CUDA device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def speed(self) -> float:
        return measure_speed(
            self.device, dtype=self.dtype, budget_s=_SPEED_PART * self.budget_s, clock=self.clock
        )

    def links(self, rounds: Sequence[Sequence[Pair]]) -> dict[Pair, Link]:
        """Measures the links from this rank to those it meets; answers those that measure theirs to it."""
        links: dict[Pair, Link] = {}
        part_s = (1.0 - _SPEED_PART) * self.budget_s / max(1, 2 * len(rounds))
        for pairs in rounds:
            for a, b in pairs:
                if self.rank in (a, b):
                    wire = _Wire(self.group, b if self.rank == a else a, self.device, self.backend, self.clock)
                    for sender in (a, b):
                        if sender != self.rank:
                            wire.answer()
                        else:
                            links[self.rank, wire.peer] = wire.measure(max(part_s, _LEAST_LINK_S))
        return links


class _Wire:
    """Both roles in the measurement of one link. Every message is announced by its size; 0 ends the talk."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        backend: str,
        clock: Callable[[], float],
    ) -> None:
        self.peer = peer
        self._group, self._clock = group, clock
        self._peer = dist.get_global_rank(group, peer)
        self._wire = device if backend == "nccl" else torch.device("cpu")
        # Gloo cannot send from CUDA memory: a message then passes through pinned host memory at both ends.
        self._staged = self._wire.type != device.type and device.type == "cuda"
        self._timer = Timer(device)
        self._most_bytes = _MOST_BYTES.get(device.type, _MOST_BYTES["cpu"])
        self._body = torch.zeros(self._most_bytes, dtype=torch.uint8, device=self._wire, pin_memory=self._staged)
        self._own = torch.zeros_like(self._body, device=device) if self._staged else self._body
        self._byte = torch.zeros(1, dtype=torch.uint8, device=self._wire)
        self._size = torch.zeros(1, dtype=torch.int64, device=self._wire)

    def measure(self, budget_s: float) -> Link:
        """Returns the link to the peer, which must be in `answer`.

        The least of several times counts: whatever else the two processes' hosts do only ever adds to a time.
        """
        end_s = self._clock() + budget_s
        self._time(_SMALL_BYTES)  # connections and buffers
        small_s = self._least(_SMALL_BYTES, 4 * _REPEATS, end_s - 0.7 * budget_s)
        size, large_s = _FIRST_BYTES, self._time(_FIRST_BYTES)
        while size < self._most_bytes and (part_s := (end_s - self._clock()) / _REPEATS) > 2.0 * large_s:
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
            if self._clock() >= until_s:
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
                self._timer.wait()
            self._send(self._byte)

    def _time(self, size_bytes: int) -> float:
        self._send(self._size.fill_(size_bytes))
        self._receive(self._byte)  # the peer is ready: its being late is no part of the link
        self._timer.wait()
        start_s = self._clock()
        body = self._body[:size_bytes]
        if self._staged:
            body.copy_(self._own[:size_bytes])
        self._send(body)
        self._receive(self._byte)
        return self._clock() - start_s

    def _send(self, message: Tensor) -> None:
        self._settle(dist.isend(message, self._peer, group=self._group))

    def _receive(self, message: Tensor) -> None:
        self._settle(dist.irecv(message, self._peer, group=self._group))

    def _settle(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank belongs to the group"
        work.wait()
        if self._wire.type != "cpu":
            self._timer.wait()  # NCCL's wait is for the stream only
