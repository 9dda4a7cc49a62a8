"""Figures, statistics and tables; no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figure = dict[str, Any]
DASH = "–"
SETTLED = 10  # steps after the start, and after a change of speeds, before a step is called steady
TAKEN = 1.02  # emulated work may have taken so much of what the scenario says, or the devices are not those described


def figure(
    name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None,
    within: float | None = None,
) -> Figure:  # fmt: skip
    """Returns one figure with at most one goal.

    Args:
        name: of the case, a colon, what it is.
        value: measured.
        unit: of it; empty for a part of 1, ``x`` for a ratio.
        least, most: goals, a limit from below or above.
        within: goal, at most this far from 1.
    """
    goal, holds = None, None
    if least is not None:
        goal, holds = f">= {least:g}", value >= least
    elif most is not None:
        goal, holds = f"<= {most:g}", value <= most
    elif within is not None:
        goal, holds = f"{1.0 - within:g} to {1.0 + within:g}", abs(value - 1.0) <= within
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds}


def named(case: str) -> Callable[..., Figure]:
    """Returns `figure` for the figures of one case."""
    return lambda name, *args, **goal: figure(f"{case}: {name}", *args, **goal)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` % of all do not exceed (nearest rank).

    >>> percentile([4.0, 1.0, 3.0, 2.0], 75)
    3.0
    """
    ordered = sorted(values)
    return ordered[max(0, int(-(-len(ordered) * percent // 100)) - 1)]


def geometric(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the geometric mean of paired ratios and its standard error; the mean of the ratios themselves would
    exceed 1 even for two runs of the same thing."""
    logs = [math.log(r) for r in ratios]
    mean = math.exp(statistics.fmean(logs))
    return mean, mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median of ratios of values that were measured one after the other."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table; numbers with three digits, None as a dash."""

    def cell(value: Any) -> str:
        return DASH if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [list(head), ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def columns(rows: Sequence[Mapping[str, Any]], headings: Mapping[str, str]) -> str:
    """Returns rows as a Markdown table; ``headings``: key -> heading."""
    return markdown(list(headings.values()), [[row.get(key) for key in headings] for row in rows])
