"""What other ways to train would give, from what stock DDP's ranks took (layer P).

Means per step: c_r own work, w_r waiting and gradient exchange, n_r samples of rank r, out of R; x the exchange alone,
which is what the rank that comes last sees (`exchange_alone`).

    step       T = max_r (c_r + w_r)                 all ranks' are equal where the host waits for the exchange
    waited     sum_r (T - x - c_r)
    balanced   T - max c  +  max_r n'_r c_r / n_r    n': the shares that end first, within the engine's default bounds
    stale      x  +  sum n / sum_r (n_r / c_r)       nobody waits; its server takes as long as the exchange
    without r  T - max c  +  R / (R - 1) max_{i != r} c_i

Work is taken to grow in proportion to samples: one batch size says nothing of a fixed part. What steps have beyond the
slowest rank's mean work (exchange, steps that differ) stays as it was. Loading data and the optimizer's step are in
none of the times. Of a pipeline nothing is said: what layers and links cost is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, SpeedSample

__all__ = ["WhatIf", "exchange_alone", "what_if"]


def exchange_alone(waits_s: Sequence[float], ranks: int) -> float:
    """Returns what a rank sees of the gradient exchange when it comes last itself [s]; 0 without steps.

    If all are alike, each comes last in one of R steps: those have its shortest waits, and half of them are shorter
    than the quantile 1 / 2R. A rank that comes last more often has it, too; of the others the least is to be taken.

    Args:
        waits_s: from the end of its own work to the end of the exchange, of each step.
        ranks: R.
    """
    return sorted(waits_s)[len(waits_s) // (2 * ranks)] if waits_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A step of stock DDP, and of others on the same global batch; see the module.

    Attributes:
        ranks: how many.
        step_s: a step of stock DDP.
        waited_s: of all ranks together, per step, for slower ranks.
        balanced_s, stale_s: a step of the engine.
        slowest: rank with the most work per step ...
        without_s: ... and a step of stock DDP without it.
    """

    ranks: int
    step_s: float
    waited_s: float
    balanced_s: float
    stale_s: float
    slowest: int
    without_s: float

    def text(self, steps: int) -> str:
        """Returns two lines for people, on so many steps."""
        total_s, waited_s = self.ranks * self.step_s * steps, self.waited_s * steps

        def beside(seconds: float) -> str:
            change = 100.0 * (seconds / self.step_s - 1.0)
            return f"{seconds * 1e3:.1f} ms ({abs(change):.0f} % {'less' if change < 0 else 'more'})"

        return (
            f"StragglerMonitor: a step took {self.step_s * 1e3:.1f} ms; for slower ranks the {self.ranks} ranks waited"
            f" {waited_s:.1f} of {total_s:.1f} device-seconds ({100.0 * waited_s / total_s:.0f} %).\n"
            f"If work grows with samples, a step would take about {beside(self.balanced_s)} with"
            f" strategy='hetero_balanced', {beside(self.stale_s)} at best with 'hetero_stale', and"
            f" {beside(self.without_s)} with DDP without rank {self.slowest}, the slowest."
        )


def what_if(records: Sequence[SpeedSample], exchange_s: float) -> WhatIf | None:
    """Returns what others would take for the same global batch.

    Args:
        records: each rank's means per step under stock DDP.
        exchange_s: the gradient exchange alone, the least that a rank sees of it.

    Returns:
        None for fewer than two ranks, or if some rank has no samples or no time.
    """
    ranks = len(records)
    if ranks < 2 or any(r.samples < 1 or not r.compute_s > 0.0 for r in records):
        return None
    work_s = [r.compute_s for r in records]
    samples = sum(r.samples for r in records)
    step_s = max(r.compute_s + r.wait_s for r in records)
    rest_s = step_s - max(work_s)
    slowest = work_s.index(max(work_s))
    others_s = max(work_s[:slowest] + work_s[slowest + 1 :])
    equal = samples / ranks
    split = minimax(
        [AffineCost(fixed_s=0.0, per_sample_s=r.compute_s / r.samples) for r in records],
        samples,
        lower=max(1, int(equal / 4)),
        upper=min(samples, math.ceil(4 * equal)),
    )
    return WhatIf(
        ranks=ranks,
        step_s=step_s,
        waited_s=math.fsum(step_s - exchange_s - seconds for seconds in work_s),
        balanced_s=rest_s + split.makespan_s,
        stale_s=exchange_s + samples / math.fsum(r.samples / r.compute_s for r in records),
        slowest=slowest,
        without_s=rest_s + others_s * ranks / (ranks - 1),
    )
