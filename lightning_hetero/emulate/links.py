"""Links as a description of a cluster has them, on ranks of one machine: what crosses one takes its time (layer T).

They are put around the calls that sum gradients and send layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_hetero.types import Cluster


def slow(call: Callable[..., Any], seconds: Callable[[], float], *, within: bool = False) -> Callable[..., Any]:
    """Returns a call that takes time, too.

    Args:
        call: what is done.
        seconds: how long it takes on the described links, asked when it is done [s].
        within: the time that it really takes counts.
    """

    def slowed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        result = call(*args, **kwargs)
        time.sleep(max(0.0, seconds() - (time.monotonic() - began_s if within else 0.0)))
        return result

    return slowed


def sums_s(cluster: Cluster, sizes_bytes: Mapping[tuple[int, ...], float], rank: int) -> float:
    """Returns how long a rank takes part in summing gradients [s].

    As the planner has it, see `lightning_hetero.solvers.placement.sync`: per set of owners a ring by rank, over its
    slowest link, one set after the other.

    Args:
        cluster: devices and links.
        sizes_bytes: of the gradients, by owners.
        rank: sets without it take it no time.

    >>> from lightning_hetero.types import Device, Link
    >>> link = Link(bandwidth_bytes_per_s=100.0, latency_s=0.5)
    >>> two = Cluster(devices=(Device(name="a"), Device(name="b")), links=((link, link), (link, link)))
    >>> sums_s(two, {(1, 0): 400.0}, rank=0), sums_s(two, {(1,): 400.0}, rank=1)
    (5.0, 0.0)
    """
    total_s = 0.0
    for owners, size_bytes in sizes_bytes.items():
        k, ring = len(owners), sorted(owners)
        if k < 2 or rank not in owners or not size_bytes:
            continue
        links = [cluster.links[ring[i]][ring[(i + 1) % k]] for i in range(k)]
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        total_s += 2.0 * (k - 1) * (size_bytes / k / slowest + max(link.latency_s for link in links))
    return total_s


def parcels_s(cluster: Cluster, sent_bytes: Mapping[tuple[int, int], float]) -> float:
    """Returns how long layers are on their way to other ranks [s].

    As the controller has it: a rank sends one message at a time, and receives one, all ranks side by side.

    Args:
        cluster: devices and links.
        sent_bytes: by (source, target).

    >>> from lightning_hetero.types import Device, Link
    >>> link = Link(bandwidth_bytes_per_s=100.0, latency_s=0.5)
    >>> three = Cluster(devices=tuple(Device(name=n) for n in "abc"), links=((link,) * 3,) * 3)
    >>> parcels_s(three, {(0, 1): 100.0, (0, 2): 200.0, (1, 2): 100.0}), parcels_s(three, {})
    (4.0, 0.0)
    """
    busy: dict[tuple[str, int], float] = {}
    for (source, target), size_bytes in sent_bytes.items():
        seconds = cluster.links[source][target].seconds(size_bytes)
        for end in (("sends", source), ("receives", target)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values(), default=0.0)
