"""How far each rank falls behind: pure scores from the measurements of one step (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.types import SpeedSample

__all__ = ["imbalance", "items_of", "not_working", "shares_text", "straggler_scores", "waiting"]

_MOST_SHARES = 8  # one by one


def items_of(records: Sequence[SpeedSample]) -> list[float]:
    """Returns each rank's work: its items if those of all are known, else its samples, at least 1."""
    if records and all(r.work > 0 for r in records if r.compute_s > 0):
        return [r.work for r in records]
    return [float(max(1, r.samples)) for r in records]


def straggler_scores(records: Sequence[SpeedSample]) -> list[float]:
    """Returns each rank's speed relative to the fastest, in (0, 1]; NaN where nothing was measured.

    Speed is items (samples, if work is not counted) per second of own work: neither is a rank that got less work taken
    for a fast one, nor one with a long batch for a slow one.
    """
    speeds = [
        n / r.compute_s if r.compute_s > 0 else math.nan for r, n in zip(records, items_of(records), strict=True)
    ]
    fastest = max((s for s in speeds if not math.isnan(s)), default=math.nan)
    return [s / fastest for s in speeds]


def waiting(records: Sequence[SpeedSample]) -> float:
    """Returns the part of the ranks' time in a step that they wait for the slowest; NaN if nothing was measured.

    The exchange of gradients, what the rank with the shortest wait sees of it, is none.
    """
    most_s = max((r.compute_s for r in records), default=0.0)
    step_s = most_s + min((r.wait_s for r in records), default=0.0)
    if not most_s > 0.0:
        return math.nan
    return math.fsum(most_s - r.compute_s for r in records) / (len(records) * step_s)


def not_working(records: Sequence[SpeedSample]) -> float:
    """Returns the part of the ranks' time that is not their own work, of ranks that do not end a step together, or
    have bubbles; NaN if nothing was measured."""
    work_s, wait_s = math.fsum(r.compute_s for r in records), math.fsum(r.wait_s for r in records)
    return wait_s / (work_s + wait_s) if work_s > 0.0 else math.nan


def shares_text(samples: Sequence[int]) -> str:
    """Returns shares in a few letters.

    >>> shares_text([21, 11]), shares_text([4] * 8 + [32])
    ('21/11', '4..32')
    """
    if len(samples) <= _MOST_SHARES:
        return "/".join(map(str, samples))
    return f"{min(samples)}..{max(samples)}"


def imbalance(compute_s: Sequence[float]) -> float:
    """Returns the slowest rank's work over the mean of all; 1.0 is perfect balance, NaN if nothing was measured."""
    total = math.fsum(compute_s)
    return max(compute_s) * len(compute_s) / total if total > 0 else math.nan
