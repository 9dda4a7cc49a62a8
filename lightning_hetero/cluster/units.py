"""Sizes, rates, times and numbers of tasks as people and schedulers write them; and back to text (layer P).

A bare number is in the base unit: bytes, bytes per second, seconds. ``null`` and "inf" mean no limit where that has a
meaning. Powers of ten and of two are distinct (GB, GiB), and so are bits and bytes: "Gb/s" is refused, because half
of those who write it mean the other one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from lightning_hetero.types import Cluster, Link

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)\s*([^\d\s].*?)?\s*")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of SLURM: the tasks of a node, and of how many nodes

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_RATES = {
    **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
    **{f"{prefix}{bit}": f / 8 for prefix, f in _DECIMAL.items() for bit in ("bit/s", "bps")},
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}


def as_bytes(name: str, value: Any) -> float:
    """Returns a size > 0 [bytes]; ``inf`` for ``None`` (no limit).

    Raises:
        ValueError: not a size.
    """
    return _positive(name, value, _BYTES, 'a size > 0 such as "24 GiB", "2.0 GB" or a number of bytes, or null')


def as_rate(name: str, value: Any) -> float:
    """Returns a bandwidth > 0 [bytes/s]; ``inf`` for ``None`` (transfers cost their latency only).

    Raises:
        ValueError: not a bandwidth.
    """
    wanted = 'a bandwidth > 0 such as "25 Gbit/s", "3 GB/s" or a number of bytes per second, or null'
    return _positive(name, value, _RATES, wanted)


def as_seconds(name: str, value: Any) -> float:
    """Returns a finite time >= 0 [s].

    Raises:
        ValueError: not a time.
    """
    wanted = 'a time >= 0 such as "50 us", "0.2 ms" or a number of seconds'
    seconds = _read(name, value, _SECONDS, wanted)
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return seconds


def bytes_text(size_bytes: float) -> str:
    """Returns a size in powers of two, e.g. ``"24 GiB"``; ``"no limit"`` for ``inf``."""
    return "no limit" if size_bytes == math.inf else _text(size_bytes, _BYTES, "TiB GiB MiB KiB B")


def rate_text(bytes_per_s: float) -> str:
    """Returns a bandwidth in powers of ten, e.g. ``"3.12 GB/s"``; ``"free"`` for ``inf``."""
    return "free" if bytes_per_s == math.inf else _text(bytes_per_s, _RATES, "TB/s GB/s MB/s kB/s B/s")


def seconds_text(seconds: float) -> str:
    """Returns a time in the unit that reads best, e.g. ``"50 us"``."""
    return _text(seconds, _SECONDS, "s ms us ns") if seconds else "0 s"


def tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node, by node, from SLURM's notation; empty if it is none.

    >>> tasks_per_node("6,1(x2)")
    [6, 1, 1]
    """
    matches = [_TASKS.fullmatch(entry.strip()) for entry in text.split(",")]
    return [] if None in matches else [int(m[1]) for m in matches if m for _ in range(int(m[2] or 1))]


def _text(number: float, units: Mapping[str, float], best: str) -> str:
    unit = next((u for u in best.split() if number >= units[u]), best.split()[-1])
    return f"{number / units[unit]:{'.0f' if number >= 100 * units[unit] else '.3g'}} {unit}"


def _positive(name: str, value: Any, units: Mapping[str, float], wanted: str) -> float:
    number = math.inf if value is None else _read(name, value, units, wanted)
    if not number > 0.0:
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return number


def _read(name: str, value: Any, units: Mapping[str, float], wanted: str) -> float:
    if isinstance(value, str):
        # YAML 1.1 reads 1e9 as text: a number in quotes is a number.
        match = _QUANTITY.fullmatch(value)
        unit = "" if match is None else match[2] or ""
        if match is None or (unit and unit not in units):
            known = f" (units: {', '.join(units)})" if units else ""
            raise ValueError(f"{name}={value!r} must be {wanted}{known}")
        return float(match[1]) * units.get(unit, 1.0)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return number


# ---- a cluster as text -------------------------------------------------------------------------------------------


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
    rows += [(f"{at:4d}", d.name, f"{d.speed:.3g}", bytes_text(d.mem_bytes)) for at, d in enumerate(cluster.devices)]
    lines = _aligned(rows)
    between = {(a, b): cluster.links[a][b] for a in range(n) for b in range(n) if a != b}
    alike = len(set(between.values())) == 1
    if alike:
        link = cluster.links[0][1]
        rate, wait = rate_text(link.bandwidth_bytes_per_s), seconds_text(link.latency_s)
        lines.append(f"links: {rate}, {wait} between any two")
    for title, part, text in _PARTS if between and not alike else ():
        values = {pair: part(link) for pair, link in between.items()}
        if n <= most:
            cells = [[str(a), *(text(values[a, b]) if a != b else "-" for b in range(n))] for a in range(n)]
            lines += [f"{title}, from row to column", *_aligned([["", *map(str, range(n))], *cells])]
        else:
            low, middle, high = map(text, (min(values.values()), median(values.values()), max(values.values())))
            lines.append(f"{title} of {len(values)} links: {low} to {high}, median {middle}")
    return "\n".join(lines)


_PARTS: tuple[tuple[str, Callable[[Link], float], Callable[[float], str]], ...] = (
    ("bandwidth", lambda link: link.bandwidth_bytes_per_s, rate_text),
    ("latency", lambda link: link.latency_s, seconds_text),
)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
