"""How far each rank falls behind: pure scores from the measurements of one step (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.types import SpeedSample

__all__ = ["imbalance", "straggler_scores"]


def straggler_scores(records: Sequence[SpeedSample]) -> list[float]:
    """Returns each rank's speed relative to the fastest, in (0, 1]; NaN where nothing was measured.

    Speed is samples per second of own work, so a rank that got fewer samples is not taken for a fast one.
    """
    speeds = [max(1, r.samples) / r.compute_s if r.compute_s > 0 else math.nan for r in records]
    fastest = max((s for s in speeds if not math.isnan(s)), default=math.nan)
    return [s / fastest for s in speeds]


def imbalance(compute_s: Sequence[float]) -> float:
    """Returns the slowest rank's work over the mean of all; 1.0 is perfect balance, NaN if nothing was measured."""
    total = math.fsum(compute_s)
    return max(compute_s) * len(compute_s) / total if total > 0 else math.nan
