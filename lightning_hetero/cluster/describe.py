"""A cluster as text for people (layer P)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from lightning_hetero.cluster.units import bytes_text, rate_text, seconds_text
from lightning_hetero.types import Cluster, Link

__all__ = ["describe_cluster"]


def describe_cluster(cluster: Cluster, *, most: int = 12) -> str:
    """Returns the cluster as a table for people.

    Args:
        cluster: what to show.
        most: up to so many devices every link is shown; beyond, only how they are distributed.

    >>> from lightning_hetero.cluster.spec import equal_cluster
    >>> slow = Link(bandwidth_bytes_per_s=125e6, latency_s=2e-4)
    >>> print(describe_cluster(equal_cluster(2, link=slow, mem_bytes=2.0**31)))
    rank  device    speed  memory
       0  device:0  1      2 GiB
       1  device:1  1      2 GiB
    links: 125 MB/s, 200 us between any two
    """
    n = len(cluster.devices)
    rows = [("rank", "device", "speed", "memory")]
    rows += [
        (f"{rank:4d}", d.name, f"{d.speed:.3g}", bytes_text(d.mem_bytes)) for rank, d in enumerate(cluster.devices)
    ]
    lines = _aligned(rows)
    between = [cluster.links[a][b] for a in range(n) for b in range(n) if a != b]
    kinds = Counter(between)
    if not between:
        return "\n".join(lines)
    if len(kinds) == 1:
        return "\n".join([*lines, f"links: {_link_text(between[0])} between any two"])
    if n <= most:
        for title, text in (("bandwidth", _bandwidth_text), ("latency", _latency_text)):
            head = ("", *map(str, range(n)))
            body = [
                (str(a), *("-" if a == b else text(cluster.links[a][b]) for b in range(n))) for a in range(n)
            ]
            lines += [f"{title}, from row to column", *_aligned([head, *body])]
    elif len(kinds) <= most:
        counted = sorted(kinds.items(), key=lambda item: (-item[1], item[0].latency_s))
        lines += [f"links: {count} of {_link_text(link)}" for link, count in counted]
    else:
        rates = [link.bandwidth_bytes_per_s for link in between]
        waits = [link.latency_s for link in between]
        for title, values, text in (("bandwidth", rates, rate_text), ("latency", waits, seconds_text)):
            low, middle, high = text(min(values)), text(median(values)), text(max(values))
            lines.append(f"{title} of {len(between)} links: {low} to {high}, median {middle}")
    return "\n".join(lines)


def _bandwidth_text(link: Link) -> str:
    return rate_text(link.bandwidth_bytes_per_s)


def _latency_text(link: Link) -> str:
    return seconds_text(link.latency_s)


def _link_text(link: Link) -> str:
    return f"{_bandwidth_text(link)}, {_latency_text(link)}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
