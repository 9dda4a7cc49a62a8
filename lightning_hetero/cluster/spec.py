"""A cluster as people write it down, read into a `Cluster`, and written as plain values again (layer P).

    devices:                                  # or nodes: [{name, count, devices, link}], each with a link inside
      - {name: fast, speed: 1.0, mem: 24 GiB, count: 2}
      - {name: slow, speed: 0.25, mem: 8 GiB, count: 2}
    link: {bandwidth: 25 Gbit/s, latency: 50 us}             # between any two devices; with nodes: of two nodes
    links:                                                   # what differs; the later entry holds
      - {between: [fast, slow], bandwidth: 1 Gbit/s}         # both directions; names of devices or nodes, or ranks
      - {from: 0, to: 3, latency: 2 ms}                      # one direction
    matrix: {bandwidth: [[...], ...], latency: [[...], ...]} # row: from, column: to; null leaves what holds already

Ranks count the devices in the order written. Nothing here touches a file or a device. The format is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

from lightning_hetero.checked import finite_or_none, is_list, mapping, real, whole
from lightning_hetero.cluster.units import as_bytes, as_rate, as_seconds
from lightning_hetero.types import Cluster, Device, Link

_FREE = Link()
_SPEC = ("devices", "nodes", "link", "links", "matrix")
_DEVICE = ("name", "speed", "mem", "count")
_NODE = ("name", "count", "devices", "link")
_LINK = ("bandwidth", "latency")


# ---- reading ---------------------------------------------------------------------------------------------------


def cluster_from_plain(spec: Mapping[str, Any] | Cluster) -> Cluster:
    """Reads a description made of plain mappings, lists, numbers and strings; see the module's head.

    Args:
        spec: what YAML or JSON holds, or Hydra hands over; a `Cluster` is returned unchanged. Keys:
            ``devices``: list of ``{name, speed, mem, count}``, all optional: speed relative to the device that layers
            are profiled on (1), ``mem`` such as "24 GiB" or bytes (null: no limit), ``count`` equal ones (1).
            ``nodes``: instead of ``devices``: list of ``{name, count, devices, link}``; its ``link`` holds among its
            devices (left out: the outer ``link``).
            ``link``: ``{bandwidth, latency}`` between all others; left out: free.
            ``links``, ``matrix``: exceptions, in this order.

    Returns:
        The cluster; devices without a name are numbered, ``fast:0``, and prefixed by their node,
        ``left/fast:0``.

    Raises:
        TypeError: a mapping or a list is expected and something else was given.
        ValueError: an unknown key or name, a value out of its range, a matrix of the wrong shape.

    >>> link = {"bandwidth": "25 Gbit/s", "latency": "50 us"}
    >>> c = cluster_from_plain({"devices": [{"name": "a", "mem": "2 GiB"}, {"name": "b", "speed": 0.5}], "link": link})
    >>> [(d.name, d.speed, d.mem_bytes) for d in c.devices], c.links[0][1].bandwidth_bytes_per_s
    ([('a', 1.0, 2147483648.0), ('b', 0.5, inf)], 3125000000.0)
    """
    if isinstance(spec, Cluster):
        return spec
    given = mapping("cluster", spec, _SPEC)
    if ("devices" in given) == ("nodes" in given):
        raise ValueError(f"cluster has keys {sorted(given)}: give either devices or nodes")
    devices: list[Device] = []
    inner: list[tuple[str, dict[str, Any], range]] = []  # links inside nodes, by the nodes' ranks
    if "devices" in given:
        devices = _devices("devices", given["devices"], prefix="")
    else:
        numbers: Counter[str] = Counter()
        for at, entry in _entries("nodes", given["nodes"], _NODE):
            link = {} if entry.get("link") is None else mapping(f"{at}.link", entry["link"], _LINK)
            for name in _names(at, entry, "node", numbers):
                first = len(devices)
                devices += _devices(f"{at}.devices", entry.get("devices"), prefix=f"{name}/")
                inner.append((f"{at}.link", link, range(first, len(devices))))
    free = ((_FREE,) * len(devices),) * len(devices)
    table = _Table(Cluster(devices=tuple(devices), links=free))
    if given.get("link") is not None:
        table.put("link", mapping("link", given["link"], _LINK), permutations(range(len(devices)), 2))
    for at, link, ranks in inner:
        table.put(at, link, permutations(ranks, 2))
    if given.get("links"):
        table.put_links(given["links"])
    if given.get("matrix") is not None:
        matrix = mapping("matrix", given["matrix"], _LINK)
        _read_matrix("matrix.bandwidth", matrix.get("bandwidth"), table.bandwidth, as_rate)
        _read_matrix("matrix.latency", matrix.get("latency"), table.latency, as_seconds)
    return table.cluster()


def _devices(at: str, value: Any, *, prefix: str) -> list[Device]:
    devices: list[Device] = []
    numbers: Counter[str] = Counter()  # of names that repeat
    for here, entry in _entries(at, value, _DEVICE):
        speed = real(f"{here}.speed", entry.get("speed", 1.0), above=True)
        mem_bytes = as_bytes(f"{here}.mem", entry.get("mem"))
        names = _names(here, entry, "device", numbers)
        devices += [Device(name=prefix + name, speed=speed, mem_bytes=mem_bytes) for name in names]
    return devices


def _names(at: str, entry: Mapping[str, Any], default: str, numbers: Counter[str]) -> list[str]:
    """Returns a name for each of the entry's ``count``; a given name without count stays."""
    base = entry.get("name", default)
    if not isinstance(base, str) or not base:
        raise ValueError(f"{at}.name={base!r} must be a text that is not empty")
    if "name" in entry and "count" not in entry:
        return [base]
    count, first = whole(f"{at}.count", entry.get("count", 1), least=1), numbers[base]
    numbers[base] += count
    return [f"{base}:{number}" for number in range(first, first + count)]


class _Table:
    """A cluster's bandwidths [bytes/s] and latencies [s] by (from, to), which exceptions overwrite in turn."""

    def __init__(self, cluster: Cluster) -> None:
        self.devices = cluster.devices
        self.bandwidth = [[link.bandwidth_bytes_per_s for link in row] for row in cluster.links]
        self.latency = [[link.latency_s for link in row] for row in cluster.links]

    def put(self, at: str, values: Mapping[str, Any], pairs: Iterable[tuple[int, int]]) -> None:
        """Sets what ``values`` names of bandwidth and latency."""
        rate = as_rate(f"{at}.bandwidth", values["bandwidth"]) if "bandwidth" in values else None
        seconds = as_seconds(f"{at}.latency", values["latency"]) if "latency" in values else None
        for a, b in pairs:
            self.bandwidth[a][b] = self.bandwidth[a][b] if rate is None else rate
            self.latency[a][b] = self.latency[a][b] if seconds is None else seconds

    def put_links(self, links: Any) -> None:
        """Sets what entries of ``links`` name."""
        for at, entry in _entries("links", links, ("between", "from", "to", *_LINK)):
            if not set(entry) & set(_LINK):
                raise ValueError(f"{at}={entry!r} changes nothing: give bandwidth, latency or both")
            self.put(at, entry, self._ends(at, entry))

    def _ends(self, at: str, entry: Mapping[str, Any]) -> list[tuple[int, int]]:
        both, one = "between" in entry, {"from", "to"} & set(entry)
        if both == bool(one) or (one and len(one) < 2):
            raise ValueError(f"{at}={entry!r} must name its ends: either between: [a, b], or from: a and to: b")
        if both:
            ends = _sequence(f"{at}.between", entry["between"])
            if len(ends) != 2:
                raise ValueError(f"{at}.between={list(ends)!r} must hold two ends, e.g. [0, 3] or [left, right]")
            here, there = (self.ranks(f"{at}.between[{i}]", end) for i, end in enumerate(ends))
        else:
            here, there = self.ranks(f"{at}.from", entry["from"]), self.ranks(f"{at}.to", entry["to"])
        pairs = [(a, b) for a, b in product(here, there) if a != b]
        if not pairs:
            raise ValueError(f"{at}={entry!r} joins rank {here[0]} with itself: name two different devices")
        return pairs + [(b, a) for a, b in pairs] if both else pairs

    def ranks(self, at: str, end: Any) -> list[int]:
        """Returns the ranks an end of a link stands for: a rank, or every device of that name or node."""
        if isinstance(end, str):
            names = [_known_as(device.name) for device in self.devices]
            if ranks := [rank for rank, known in enumerate(names) if end in known]:
                return ranks
            choice = ", ".join(sorted(set[str]().union(*names)))
            raise ValueError(f"{at}={end!r} is no device and no node: choose one of {choice}, or a rank")
        rank, n = whole(at, end), len(self.devices)
        if rank >= n:
            raise ValueError(f"{at}={rank} must be a rank in 0..{n - 1}: the cluster has {n} devices")
        return [rank]

    def cluster(self) -> Cluster:
        @cache  # a thousand devices have a million links, few of them different
        def link(bandwidth: float, latency: float) -> Link:
            return Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency)

        rows = zip(self.bandwidth, self.latency, strict=True)
        return Cluster(devices=self.devices, links=tuple(tuple(map(link, *row)) for row in rows))


def _known_as(name: str) -> set[str]:
    """Returns the names by which a device can be called: its own, its node's, and both without their numbers.

    >>> sorted(_known_as("left:0/fast:1"))
    ['fast', 'fast:1', 'left', 'left:0', 'left:0/fast:1']
    """
    node, _, own = name.rpartition("/")
    return {name, own, own.rpartition(":")[0], node, node.rpartition(":")[0]} - {""}


def _read_matrix(at: str, value: Any, into: list[list[float]], read: Callable[[str, Any], float]) -> None:
    if value is None:
        return
    n = len(into)
    rows = [_sequence(f"{at}[{a}]", row) for a, row in enumerate(_sequence(at, value))]
    if len(rows) != n or any(len(row) != n for row in rows):
        sizes = [len(row) for row in rows]
        raise ValueError(f"{at} has rows of {sizes} entries; {n} devices need {n} rows of {n} (row: from, column: to)")
    for (a, row), b in product(enumerate(rows), range(n)):
        if row[b] is not None:
            into[a][b] = read(f"{at}[{a}][{b}]", row[b])


def _sequence(at: str, value: Any) -> Sequence[Any]:
    if not is_list(value):
        raise TypeError(f"{at}={value!r} must be a list")
    return value


def _entries(at: str, value: Any, keys: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    entries = [(f"{at}[{i}]", mapping(f"{at}[{i}]", v, keys)) for i, v in enumerate(_sequence(at, value))]
    if not entries:
        raise ValueError(f"{at} is empty: name at least one, e.g. {{name: fast, speed: 1.0, count: 2}}")
    return entries


# ---- writing and changing -----------------------------------------------------------------------------------------


def cluster_to_plain(cluster: Cluster) -> dict[str, Any]:
    """Returns strict JSON values which `cluster_from_plain` reads back as an equal cluster.

    Infinite memory and bandwidth become ``None``; every device and every link is written out.
    """
    return {
        "devices": [{"name": d.name, "speed": d.speed, "mem": finite_or_none(d.mem_bytes)} for d in cluster.devices],
        "matrix": {
            "bandwidth": [[finite_or_none(link.bandwidth_bytes_per_s) for link in row] for row in cluster.links],
            "latency": [[link.latency_s for link in row] for row in cluster.links],
        },
    }


def equal_cluster(size: int, *, link: Link = _FREE, mem_bytes: float = math.inf) -> Cluster:
    """Returns ``size`` devices of speed 1 with the same link between any two.

    Raises:
        ValueError: ``size`` < 1, or ``mem_bytes`` is not positive.
    """
    size = whole("size", size, least=1)
    devices = tuple(Device(name=f"device:{rank}", mem_bytes=mem_bytes) for rank in range(size))
    links = tuple(tuple(_FREE if a == b else link for b in range(size)) for a in range(size))
    return Cluster(devices=devices, links=links)


def override_cluster(
    cluster: Cluster, *, speeds: Sequence[float] | None = None, mem_bytes: Sequence[float | None] | None = None,
    links: Sequence[Sequence[Link]] | None = None,
) -> Cluster:  # fmt: skip
    """Returns the cluster with other speeds, memory or links, e.g. emulated ones in place of measured ones.

    Args:
        cluster: what to change; names stay.
        speeds: by rank.
        mem_bytes: by rank; ``None``: no limit [bytes].
        links: ``links[a][b]`` from rank a to rank b.

    Raises:
        ValueError: not as many as there are devices, or a value out of its range.
    """
    n = len(cluster.devices)
    for name, given in (("speeds", speeds), ("mem_bytes", mem_bytes)):
        if given is not None and len(given) != n:
            raise ValueError(f"{name}={list(given)!r} must have one entry per device: the cluster has {n}")
    caps = [device.mem_bytes for device in cluster.devices] if mem_bytes is None else mem_bytes
    rates = [device.speed for device in cluster.devices] if speeds is None else speeds
    devices = tuple(
        replace(device, speed=float(speed), mem_bytes=math.inf if cap is None else float(cap))
        for device, speed, cap in zip(cluster.devices, rates, caps, strict=True)
    )
    return Cluster(devices=devices, links=cluster.links if links is None else tuple(map(tuple, links)))
