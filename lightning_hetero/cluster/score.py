"""How far ranks fall behind, and what stock DDP's monitor says at the end of a fit (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.cluster.engine_times import would_take_s
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.types import SpeedSample

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
    speeds = [n / r.compute_s if r.compute_s > 0 else math.nan for r, n in zip(records, items_of(records), strict=True)]
    fastest = max((s for s in speeds if not math.isnan(s)), default=math.nan)
    return [s / fastest for s in speeds]


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


def last_lines(ledger: RunLedger, *, sharded: bool = False) -> str:
    """Returns lines for people on a fit under stock DDP: what its ranks waited, and what others would take.

    Work is taken to grow in proportion to samples: one batch size says nothing of a fixed part. Loading data and the
    optimizer's step are in none of the times. Nothing is said of a pipeline: what layers and links cost is not
    measured.

    Args:
        ledger: of the fit.
        sharded: whether the model is, so that only one engine trains it.

    Returns:
        Nothing for fewer than two ranks, or where nothing is known.
    """
    ranks, batch = len(ledger.ranks), ledger.batch
    if ranks < 2 or not ledger.steps:
        return ""
    total = ledger.total
    waited = (
        f"StragglerMonitor: {100.0 * ledger.waited:.0f} % of your {ranks} ranks' time in steps was waiting for slower"
        f" ranks ({total.idle_s:.1f} of {total.total_s:.1f} device-seconds)."
    )
    if ledger.too_few:
        return f"{waited} {ledger.too_few}."
    try:
        found, step_s = would_take_s(costs_of(ledger), batch), ledger.step_s
    except ValueError:  # a rank has no samples, or there are too few to share
        return waited

    def told(seconds: float) -> str:
        ratio = step_s / seconds
        return f"{seconds * 1e3:.1f} ms ({f'{ratio:.2f} times as fast' if ratio >= 1.02 else 'not faster'})"

    took = f"{waited} A step took {step_s * 1e3:.1f} ms.\nIf work grows with samples, it would take about"
    balanced = f"{took} {told(found['balanced'])} with strategy='hetero_{'sharded' if sharded else 'balanced'}'"
    return f"{balanced}." if sharded else f"{balanced}, and {told(found['stale'])} with 'hetero_stale'."
