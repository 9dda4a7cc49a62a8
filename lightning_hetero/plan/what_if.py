"""The same set-up with one thing changed (layer P).

{without: rank or name}                                   a device, or all of that name, is not there
{add: {name, speed, mem, count}, link: {bandwidth, latency}, price: 0.4}   devices more, linked so to all others
{links: [{between: [left, right], bandwidth: 10 Gbit/s}]} as in a cluster's description
{batch: 2}                                                times the global batch
{speed: {rank or name: 0.5}}                              times the speed
{price: {rank or name: 0.4}}                              money per hour, e.g. of a spot instance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from lightning_hetero.checked import is_list, real
from lightning_hetero.cluster.spec import cluster_from_plain, override_cluster, ranks_named, relinked
from lightning_hetero.plan.paste import hydra_text
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import Cluster, Link

_KINDS = ("without", "add", "links", "batch", "speed", "price")
_FEW = 16  # devices up to which each kind of them is tried to be left out


def usual_changes(setup: Setup, resting: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Returns what people ask first: each kind of device that does not rest left out, slowest first, and the batch
    doubled.

    >>> from lightning_hetero.types import AffineCost
    >>> devices = [{"name": "fast", "count": 2}, {"name": "old", "speed": 0.25}]
    >>> costs = tuple(AffineCost(fixed_s=0.0, per_sample_s=seconds) for seconds in (1.0, 1.0, 4.0))
    >>> setup = Setup(cluster=cluster_from_plain({"devices": devices}), global_batch=8, costs=costs)
    >>> usual_changes(setup)
    [{'without': 2}, {'without': 1}, {'batch': 2}]
    """
    kinds: dict[tuple[float, float, float], int] = {}
    costs = setup.step_costs()
    each = setup.global_batch / setup.ranks
    for rank, device in enumerate(setup.cluster.devices):
        if rank in resting:
            continue
        price = setup.prices[rank] if setup.prices else 0.0
        kinds[costs[rank].seconds(each), device.mem_bytes, price] = rank  # the last one of each kind
    slowest_first = [rank for _, rank in sorted(kinds.items(), key=lambda item: -item[0][0])]
    left_out = [{"without": rank} for rank in slowest_first] if 1 < setup.ranks <= _FEW else []
    return [*left_out, {"batch": 2}]


def changed(setup: Setup, change: Mapping[str, Any]) -> tuple[str, Setup]:
    """Returns what is changed, in words, and the changed set-up.

    Args:
        setup: the present one.
        change: see the module.

    Raises:
        TypeError, ValueError: an unknown key, a device that is not there, or a value out of its range.
    """
    given = _mapping("what_if", change)
    kinds = [kind for kind in _KINDS if kind in given]
    extra = set(given) - set(_KINDS) - ({"link", "price"} if "add" in given else set())
    if extra or (len(kinds) != 1 and kinds != ["add", "price"]):
        raise ValueError(
            f"what_if={given!r} must hold one of the keys {', '.join(_KINDS)} (add also takes link and price)"
        )
    kind, value = kinds[0], given[kinds[0]]
    if kind == "without":
        gone = ranks_named(setup.cluster, value, at="what_if.without")
        if len(gone) == setup.ranks:
            raise ValueError(f"what_if.without={value!r} leaves no device: the cluster has {setup.ranks}")
        return f"without {', '.join(map(setup.name, gone))}", without(setup, gone)
    if kind == "add":
        return _added(setup, value, given.get("link"), given.get("price"))
    if kind == "links":
        return f"links {hydra_text(value)}", replace(setup, cluster=relinked(setup.cluster, value))
    if kind == "batch":
        factor = real("what_if.batch", value, above=True)
        batch = max(1, round(setup.global_batch * factor))
        return f"{factor:g} x the batch ({batch} samples)", replace(setup, global_batch=batch)
    if kind == "speed":
        return f"speed {hydra_text(value)}", _sped(setup, value)
    return f"price {hydra_text(value)}", _priced(setup, value)


def without(setup: Setup, gone: Sequence[int]) -> Setup:
    """Returns the set-up without some ranks; the global batch stays."""
    keep = tuple(rank for rank in range(setup.ranks) if rank not in gone)
    links = tuple(tuple(setup.cluster.links[a][b] for b in keep) for a in keep)
    return setup.with_devices(keep, Cluster(devices=tuple(setup.cluster.devices[rank] for rank in keep), links=links))


def _added(setup: Setup, value: Any, link: Any, price: Any) -> tuple[str, Setup]:
    spec: dict[str, Any] = {"devices": list(value) if is_list(value) else [value]}
    new = cluster_from_plain(spec if link is None else {**spec, "link": link})
    count, old = len(new.devices), setup.cluster
    if link is None:  # as the slowest link there is: nobody adds a device that is better connected than the others
        between = [old.links[a][b] for a in range(setup.ranks) for b in range(setup.ranks) if a != b] or [Link()]
        slowest = min(x.bandwidth_bytes_per_s for x in between)
        wire = Link(bandwidth_bytes_per_s=slowest, latency_s=max(x.latency_s for x in between))
    else:
        wire = cluster_from_plain({"devices": [{"count": 2}], "link": link}).links[0][1]
    rows = [(*row, *[wire] * count) for row in old.links] + [(wire,) * (setup.ranks + count)] * count
    more: dict[str, Any] = {}
    if setup.costs:  # what the first device costs, by speed
        first_speed = old.devices[0].speed
        more["costs"] = setup.costs + tuple(setup.costs[0].times(first_speed / one.speed) for one in new.devices)
    if setup.slowness:
        more["slowness"] = setup.slowness + ((1.0,) * setup.series,) * count
    if setup.prices:
        each = setup.prices[-1] if price is None else real("what_if.price", price)
        more["prices"] = setup.prices + (each,) * count
    cluster = Cluster(devices=old.devices + new.devices, links=tuple(rows))
    return f"with {', '.join(device.name for device in new.devices)}", replace(setup, cluster=cluster, **more)


def _sped(setup: Setup, factors: Any) -> Setup:
    speeds, costs = [device.speed for device in setup.cluster.devices], list(setup.costs)
    for rank, factor in _by_rank(setup, "speed", factors, above=True):
        speeds[rank] *= factor
        if costs:
            costs[rank] = costs[rank].times(1.0 / factor)
    return replace(setup, cluster=override_cluster(setup.cluster, speeds=speeds), costs=tuple(costs))


def _priced(setup: Setup, given: Any) -> Setup:
    prices = list(setup.prices or (0.0,) * setup.ranks)
    for rank, price in _by_rank(setup, "price", given):
        prices[rank] = price
    return replace(setup, prices=tuple(prices))


def _by_rank(setup: Setup, kind: str, given: Any, *, above: bool = False) -> list[tuple[int, float]]:
    """Returns numbers given by rank or name, by rank; keys of mappings are texts, ranks too."""
    found: list[tuple[int, float]] = []
    for end, value in _mapping(f"what_if.{kind}", given).items():
        number = real(f"what_if.{kind}.{end}", value, above=above)
        ranks = ranks_named(setup.cluster, int(end) if end.isdecimal() else end, at=f"what_if.{kind}")
        found += [(rank, number) for rank in ranks]
    return found


def _mapping(at: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{at}={value!r} must be a mapping, e.g. {{without: 3}}")
    return {str(key): item for key, item in cast("Mapping[Any, Any]", value).items()}
