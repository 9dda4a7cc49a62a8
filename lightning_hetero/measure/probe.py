"""Measures the cluster at start-up: speeds, free memory and all links, in a fraction of a second (layer T).

    facts of all ranks ──► speed of each device, all at once ──► links, pair by pair ──► gather

*Speed*: seconds of a matrix product per FLOP and of an elementwise sum per byte, weighed as in a typical layer (20 FLOP
per byte). It ranks devices; what a layer costs ``pipeline.runtime.measure`` tells. All ranks measure at the same
time, since they will also train at the same time: processes that share a device see their share of it.

*Links* are measured with what will carry the messages, see `LinkProbe`: the backend of the devices' memory (NCCL) if
ranks will send one another from device to device, else the group.

Noise must not become structure: devices of the same kind whose speeds differ by less than 5 % are taken for equal, and
so are the links between the same two hosts; among the GPUs of one host, those that differ by less than 25 %.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_hetero.cluster.pairing import Pair, budget_bytes, complete_links, level, meetings
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.link_probe import LinkProbe
from lightning_hetero.measure.timer import Timer
from lightning_hetero.types import Cluster, Device, Link

_FLOP, _TRAFFIC_BYTES = 1e9, 5e7  # what "speed" is the inverse of the time of
_SPEED_S, _LINKS_S = 0.12, 0.28  # how long they are measured, about
_LEAST_LINK_S = 0.004  # a direction's part of that, however many ranks there are
_MOST_SIDE = 4096  # of matrices on accelerators, which grow until a product takes its part of the time
_PRODUCT_PART = 0.05
_SPEED_TOLERANCE, _LINK_TOLERANCE = 0.05, 0.25


class _Facts(NamedTuple):
    """What tells one rank from others.

    Attributes:
        host: its name.
        name: of the device there.
        kind: of the device.
        device: what no other device is called.
    """

    host: str
    name: str
    kind: str
    device: str


def probe_cluster(
    group: dist.ProcessGroup, device: torch.device, *, direct: str = "", communicators: int = 0,
    dtype: torch.dtype = torch.float32, links: bool = True,
) -> Cluster:  # fmt: skip
    """Returns the same description of the group's devices and links on every rank. Collective; blocks.

    With NCCL the first message between two ranks makes their communicator, which takes far longer than the measurement;
    the group that training will use pays that once.

    Args:
        group: the ranks in question; with gloo and accelerators, copies to and from the host count for the links.
        device: this rank's.
        direct: backend of messages from device to device, e.g. ``nccl``, the same on all ranks, which are then all of
            the default group's; of use if each has a device to itself. Empty: the group carries what is sent.
        communicators: of ``direct`` that training will have on a rank; what one takes of its memory is measured.
        dtype: in which the speed is measured; what will be trained in.
        links: whether speeds and links are measured; else speeds are equal, and links free.

    Returns:
        The cluster, by rank in the group; the first device has speed 1. Names are ``host/cuda:1`` or
        ``host/cpu:<rank>``.

    Raises:
        RuntimeError: a rank failed or did not answer within the group's timeout.
    """
    size, rank, on = dist.get_world_size(group), dist.get_rank(group), device_of(device)

    def gathered(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        with on.current():  # NCCL moves objects through it
            dist.all_gather_object(values, value, group=group)
        return values

    facts: list[_Facts] = gathered(_facts(device, rank))
    hosts, places = [fact.host for fact in facts], [(fact.host, fact.device) for fact in facts]
    apart = bool(direct) and size > 1 and len(set(places)) == size
    with _direct_group(direct, device) if apart else nullcontext((group, 0.0)) as (carrier, communicator_bytes):
        reserved_bytes = communicators * communicator_bytes
        ranks = places.count(places[rank])
        memory = budget_bytes(on.free_bytes(), ranks=ranks, communicators_bytes=reserved_bytes)
        speed = measure_speed(device, dtype) if links else 1.0
        results = gathered((memory, speed, _links(carrier, device, meetings(hosts)) if links else {}))
    speeds = [speed for _, speed, _ in results]
    for kind in {fact.kind for fact in facts}:
        alike = [rank for rank, fact in enumerate(facts) if fact.kind == kind]
        for rank, speed in zip(alike, level([speeds[r] for r in alike], _SPEED_TOLERANCE), strict=True):
            speeds[rank] = speed
    devices = [
        Device(name=f"{fact.host}/{fact.name}", speed=speed / speeds[0], mem_bytes=memory)
        for fact, speed, (memory, _, _) in zip(facts, speeds, results, strict=True)
    ]
    measured = {pair: link for *_, links in results for pair, link in links.items()}
    if not links:
        return Cluster(devices=tuple(devices), links=((Link(),) * size,) * size)
    wired = {fact.host for fact in facts if not fact.name.startswith("cpu")}
    return Cluster(
        devices=tuple(devices),
        links=complete_links(measured, hosts, wired=wired, tolerance=_LINK_TOLERANCE),
    )


def _facts(device: torch.device, rank: int) -> _Facts:
    on, number = device_of(device), rank
    kind = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if on.asynchronous:
        number, kind = device.index or 0, on.name()
    name = f"{device.type}:{number}"
    return _Facts(platform.node(), name, kind, on.identity() or name)


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


def measure_speed(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Returns how often per second the device does 1 GFLOP of matrix products and moves 50 MB elementwise.

    The generators of random numbers are not touched.

    Args:
        device: to measure.
        dtype: of the operands.
    """
    large = device_of(device).asynchronous
    side, length = (512, 1 << 24) if large else (192, 1 << 19)
    a = torch.ones(side, side, dtype=dtype, device=device)
    x = torch.ones(length, dtype=dtype, device=device)
    product, total = torch.empty_like(a), torch.empty_like(x)
    timer = Timer(device)
    timer.warm_up(lambda: torch.mm(a, a, out=product))
    while large and side < _MOST_SIDE:  # else it would be the launch that is timed
        start = timer.mark()
        torch.mm(a, a, out=product)
        if timer.seconds(start, timer.mark()) > _PRODUCT_PART * _SPEED_S:
            break
        side *= 2
        a = torch.ones(side, side, dtype=dtype, device=device)
        product = torch.empty_like(a)
    products: list[float] = []
    sums: list[float] = []
    end_s, warm_ups = time.perf_counter() + _SPEED_S, 2
    while time.perf_counter() < end_s or len(products) < 3 + warm_ups:
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


def _links(carrier: dist.ProcessGroup, device: torch.device, rounds: Sequence[Sequence[Pair]]) -> dict[Pair, Link]:
    """Measures the links from this rank to those it meets; answers those that measure theirs to it."""
    rank, links = dist.get_rank(carrier), dict[Pair, Link]()
    part_s = max(_LINKS_S / max(1, 2 * len(rounds)), _LEAST_LINK_S)
    for pairs in rounds:
        for a, b in pairs:
            if rank in (a, b):
                wire = LinkProbe(carrier, b if rank == a else a, device)
                for sender in (a, b):
                    if sender != rank:
                        wire.answer()
                    else:
                        links[rank, wire.peer] = wire.measure(part_s)
    return links
