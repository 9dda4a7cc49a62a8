"""Scores of how far ranks fall behind, and what other ways to train would give, from measured steps (layer P).

Means per step of stock DDP: c_r own work, w_r waiting and gradient exchange, n_r samples of rank r, out of R; x the
exchange alone, which is what the rank that comes last sees (`exchange_alone`).

    step       T = max_r (c_r + w_r)                 all ranks' are equal where the host waits for the exchange
    waited     sum_r (T - x - c_r)
    balanced   T - max c  +  max_r n'_r c_r / n_r    n': the shares that end first, within the engine's default bounds
    stale      x  +  sum n / sum_r (n_r / c_r)       nobody waits; its server takes as long as the exchange
    without r  T - max c  +  R / (R - 1) max_{i != r} c_i

Work is taken to grow in proportion to samples: one batch size says nothing of a fixed part. What steps have beyond the
slowest rank's mean work (exchange, steps that differ) is unchanged. Loading data and the optimizer's step are in
none of the times. Nothing is said of a pipeline: what layers and links cost is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, Cost, SpeedSample

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


def exchange_alone(waits_s: Sequence[float], ranks: int) -> float:
    """Returns what a rank sees of the gradient exchange when it comes last itself [s]; 0 without steps.

    If all are equal, each comes last in one of R steps: those have its shortest waits, and half of them are shorter
    than the quantile 1 / 2R. A rank that comes last more often has it, too; of the others the least is to be taken.

    Args:
        waits_s: from the end of its work to the end of the exchange, of each step.
        ranks: R.
    """
    return sorted(waits_s)[len(waits_s) // (2 * ranks)] if waits_s else 0.0


def least_s(costs: Sequence[Cost], total: float) -> float:
    """Returns the least time in which workers that never rest compute so many samples, fractions allowed [s].

    A worker that is given nothing pays nothing.

    >>> fast, slow = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=9.0, per_sample_s=1.0)
    >>> round(least_s([fast, slow], 8.0), 9), round(least_s([fast, fast], 8.0), 9)
    (8.0, 4.0)
    """

    def done(deadline_s: float) -> float:
        return math.fsum(max(0.0, cost.most_samples(deadline_s)) for cost in costs)

    early_s, late_s = 0.0, min(cost.seconds(total) for cost in costs)
    while True:
        middle_s = 0.5 * (early_s + late_s)
        if not early_s < middle_s < late_s or late_s - early_s <= 1e-12 * late_s:
            return late_s
        if done(middle_s) >= total:
            late_s = middle_s
        else:
            early_s = middle_s


def other_engines_text(records: Sequence[SpeedSample], exchange_s: float, steps: int) -> str:
    """Returns two lines for people: what stock DDP's ranks waited, and what others would take for the same batch.

    Args:
        records: each rank's means per step under stock DDP.
        exchange_s: the gradient exchange alone, the least that a rank sees of it.
        steps: how many there were.

    Returns:
        Nothing for fewer than two ranks, or if some rank has no samples or no time.
    """
    ranks = len(records)
    if ranks < 2 or any(r.samples < 1 or not r.compute_s > 0.0 for r in records):
        return ""
    work_s, samples = [r.compute_s for r in records], sum(r.samples for r in records)
    step_s = max(r.compute_s + r.wait_s for r in records)
    rest_s, slowest = step_s - max(work_s), work_s.index(max(work_s))
    costs = [AffineCost(fixed_s=0.0, per_sample_s=r.compute_s / r.samples) for r in records]
    equal = samples / ranks
    split = minimax(costs, samples, lower=max(1, int(equal / 4)), upper=min(samples, math.ceil(4 * equal)))
    without_s = max(work_s[:slowest] + work_s[slowest + 1 :]) * ranks / (ranks - 1)
    total_s = ranks * step_s * steps
    waited_s = math.fsum(step_s - exchange_s - seconds for seconds in work_s) * steps

    def beside(seconds: float) -> str:
        change = 100.0 * (seconds / step_s - 1.0)
        return f"{seconds * 1e3:.1f} ms ({abs(change):.0f} % {'less' if change < 0 else 'more'})"

    return (
        f"StragglerMonitor: a step took {step_s * 1e3:.1f} ms; for slower ranks the {ranks} ranks waited"
        f" {waited_s:.1f} of {total_s:.1f} device-seconds ({100.0 * waited_s / total_s:.0f} %).\n"
        f"If work grows with samples, a step would take about {beside(rest_s + split.makespan_s)} with"
        f" strategy='hetero_balanced', {beside(exchange_s + least_s(costs, samples))} at best with 'hetero_stale', and"
        f" {beside(rest_s + without_s)} with DDP without rank {slowest}, the slowest."
    )
