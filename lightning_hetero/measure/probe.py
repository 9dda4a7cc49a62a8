"""Measures the cluster at start-up: speeds, free memory and all links, in a fraction of a second (layer T).

    facts of all ranks ──► cached? ──► speed of each device, all at once ──► links, pair by pair ──► gather

*Speed*: seconds of a matrix product per FLOP and of an elementwise sum per byte, weighed as in a typical layer (20 FLOP
per byte). It ranks devices; what a layer costs ``pipeline.runtime.measure`` tells. All ranks measure at the same
time, since they will also train at the same time: processes that share a device see their share of it.

*Links* are measured with what will carry the messages, see `LinkProbe`: the backend of the devices' memory (NCCL) if
ranks will send one another from device to device, else the group.

Noise must not become structure: devices of the same kind whose speeds differ by less than 5 % are taken for equal, and
so are the links between the same two hosts; among the GPUs of one host, those that differ by less than 25 %.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.cluster.pairing import Pair, budget_bytes, complete_links, level, meetings
from lightning_hetero.cluster.spec import cluster_from_plain, cluster_to_plain, override_cluster
from lightning_hetero.measure import cache
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.link_probe import LinkProbe
from lightning_hetero.measure.timer import Timer
from lightning_hetero.types import Cluster, Device, Link

VERSION = 2  # of the procedure; part of the cache's key
CACHE_KIND = "cluster"

_FLOP, _TRAFFIC_BYTES = 1e9, 5e7  # what "speed" is the inverse of the time of
_SPEED_PART = 0.3  # of the budget; the rest goes to the links
_MOST_SIDE = 4096  # of matrices on accelerators, which grow until a product takes its part of the speed's budget
_PRODUCT_PART = 0.05
_LEAST_LINK_S = 0.004  # a direction's part of the budget, however many ranks there are


def probe_cluster(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    given: Cluster | None = None,
    mem_bytes: float | None = None,
    direct: str = "",
    communicators: int = 0,
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
        group: the ranks in question; with gloo and accelerators, copies to and from the host count for the links.
        device: this rank's.
        given: used in place of measuring anything, e.g. an emulated cluster.
        mem_bytes: this rank may use no more than this, whatever `budget_bytes` makes of what is free [bytes].
        direct: backend of messages from device to device, e.g. ``nccl``, the same on all ranks, which are then all of
            the default group's; of use if each has a device to itself. Empty: the group carries what is sent.
        communicators: of ``direct`` that training will have on a rank; what one takes of its memory is measured.
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
    facts: list[dict[str, Any]] = probe.gather(probe.facts())
    places = [(fact["host"], fact["device"]) for fact in facts]
    apart = bool(direct) and size > 1 and len(set(places)) == size
    carried = _direct_group(direct, device) if apart else nullcontext((group, 0.0))
    with carried as (carrier, communicator_bytes):
        budget = budget_bytes(
            device_of(device).free_bytes(),
            ranks=places.count(places[probe.rank]),
            communicators_bytes=communicators * communicator_bytes,
        )
        memory: list[float] = probe.gather(min(budget, math.inf if mem_bytes is None else mem_bytes))
        backend = str(dist.get_backend(carrier))
        key = probe_key([(f["host"], f["name"], f["kind"]) for f in facts], backend=backend, dtype=dtype)
        # The first rank alone looks: files may differ from host to host, and all must agree on what is measured.
        found = _find(cache_folder, key, now_s, max_age_s, size) if probe.rank == 0 else None
        found = probe.gather(found)[0]
        results: list[tuple[float, dict[Pair, Link]]] = []
        if found is None:
            speed = probe.speed()
            links = probe.links(meetings([f["host"] for f in facts]), carrier)
            results = probe.gather((speed, links))
    if found is not None:
        cluster = cluster_from_plain(found["cluster"])
        reference = cluster.devices[reference_rank].speed
        cluster = override_cluster(cluster, speeds=[d.speed / reference for d in cluster.devices])
    else:
        cluster = _assemble(facts, results, reference_rank, speed_tolerance, link_tolerance)
        if cache_folder is not None and probe.rank == 0 and math.isfinite(now_s):
            data = {"measured_s": now_s, "reference": reference_rank, "cluster": cluster_to_plain(cluster)}
            cache.save(cache_folder, CACHE_KIND, key, data)
    return override_cluster(cluster, mem_bytes=memory)


def probe_key(ranks: Sequence[tuple[str, str, str]], *, backend: str, dtype: torch.dtype) -> str:
    """Returns the cache key of a measurement.

    Args:
        ranks: (host, name of the device there, its kind), by rank.
        backend: of what carries messages, e.g. ``gloo``.
        dtype: in which the speed is measured; of float32, what torch may do to be faster counts as well.
    """
    how = [str(dtype), torch.get_float32_matmul_precision()]
    return cache.key_of([VERSION, [list(rank) for rank in ranks], backend, how, torch.__version__])


@contextmanager
def _direct_group(backend: str, device: torch.device) -> Iterator[tuple[dist.ProcessGroup, float]]:
    """Makes a group of all ranks for as long as it is needed; yields what it takes of the device's memory, too."""
    on = device_of(device)
    with on.current():
        before = on.free_bytes()
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        on.synchronize()
        yield group, max(0.0, before - on.free_bytes())
        dist.destroy_process_group(group)


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
    large = device_of(device).asynchronous
    side, length = (512, 1 << 24) if large else (192, 1 << 19)
    a = torch.ones(side, side, dtype=dtype, device=device)
    x = torch.ones(length, dtype=dtype, device=device)
    product, total = torch.empty_like(a), torch.empty_like(x)
    timer = Timer(device, clock)
    timer.warm_up(lambda: torch.mm(a, a, out=product))
    while large and side < _MOST_SIDE:  # else it would be the launch that is timed
        start = timer.mark()
        torch.mm(a, a, out=product)
        if timer.seconds(start, timer.mark()) > _PRODUCT_PART * budget_s:
            break
        side *= 2
        a = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(a)
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

    def facts(self) -> dict[str, Any]:
        """Returns what tells this rank from others."""
        on, number = device_of(self.device), self.rank
        kind = f"{platform.machine()}, {torch.get_num_threads()} threads"
        if on.asynchronous:
            number, kind = self.device.index or 0, on.name()
        name = f"{self.device.type}:{number}"
        return {"host": platform.node(), "name": name, "kind": kind, "device": on.identity() or name}

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self.group)
        with device_of(self.device).current():  # NCCL moves objects through it
            dist.all_gather_object(values, value, group=self.group)
        return values

    def speed(self) -> float:
        return measure_speed(
            self.device, dtype=self.dtype, budget_s=_SPEED_PART * self.budget_s, clock=self.clock
        )

    def links(self, rounds: Sequence[Sequence[Pair]], carrier: dist.ProcessGroup) -> dict[Pair, Link]:
        """Measures the links from this rank to those it meets; answers those that measure theirs to it."""
        links: dict[Pair, Link] = {}
        part_s = (1.0 - _SPEED_PART) * self.budget_s / max(1, 2 * len(rounds))
        for pairs in rounds:
            for a, b in pairs:
                if self.rank in (a, b):
                    wire = LinkProbe(carrier, b if self.rank == a else a, self.device, self.clock)
                    for sender in (a, b):
                        if sender != self.rank:
                            wire.answer()
                        else:
                            links[self.rank, wire.peer] = wire.measure(max(part_s, _LEAST_LINK_S))
        return links
