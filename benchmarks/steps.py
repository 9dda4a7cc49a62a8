"""Statistics of step times; no torch."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least ``percent`` % of all do not exceed (nearest rank).

    >>> percentile([4.0, 1.0, 3.0, 2.0], 75)
    3.0
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
