"""Whole samples per pipeline, so that the slowest finishes as early as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.solvers.minimax import deal, fractional_s
from lightning_hetero.solvers.placement.pipes import PipeCost


def share(costs: Sequence[PipeCost], samples: int) -> tuple[list[int], float]:
    """Returns the samples of each pipeline, one at least, and when the slowest is done [s].

    None and ``inf`` if it cannot be. Exact: of all splits none is faster. It is `minimax`'s greedy, started where the
    pipelines do all samples if fractions of micro-batches count.
    """
    ones, most = [1] * len(costs), [cost.most for cost in costs]
    if not len(costs) <= samples <= sum(most) or min(most) < 1:
        return [], math.inf
    level_s = fractional_s(costs, samples, ones, most, start_s=max([cost.first_s for cost in costs]))
    shares = deal(costs, level_s, samples, ones, most)
    return shares, max([cost.seconds(n) for cost, n in zip(costs, shares, strict=True)])
