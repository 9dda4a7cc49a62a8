"""Whole samples per pipeline, so that the slowest finishes as early as possible.

`level` is the deadline by which the pipelines do all samples if fractions of micro-batches count. It
is a lower bound of the exact answer, at a fraction of the price, and the search over groupings lives on it. `share` is
exact: `minimax`'s greedy, started at the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.solvers.minimax import deal, fractional_s
from lightning_hetero.solvers.placement.pipe_cost import PipeCost


def level(costs: Sequence[PipeCost], samples: int) -> float:
    """Returns a time before which the pipelines cannot do ``samples`` samples, each one at least [s].

    ``inf`` if they never can; else early by the last, partly filled micro-batches of `share`'s answer at most. (Where
    memory is short and micro-batches are few it may be late.)
    """
    if not _possible(costs, samples):
        return math.inf
    if len(costs) == 1:
        return costs[0].seconds(samples)
    return max(_level(costs, samples), *[cost.first_s for cost in costs])


def _possible(costs: Sequence[PipeCost], samples: int) -> bool:
    return len(costs) <= samples <= sum([cost.most for cost in costs]) and all([cost.most > 0 for cost in costs])


def _level(costs: Sequence[PipeCost], samples: int) -> float:
    """Returns about when ``samples`` are done, fractions counted, where the first of each costs nothing [s]."""
    most, first_s = [cost.most for cost in costs], max([cost.first_s for cost in costs])
    return fractional_s(costs, samples, [1] * len(costs), most, start_s=first_s)


def share(costs: Sequence[PipeCost], samples: int) -> tuple[list[int], float]:
    """Returns the samples of each pipeline, one at least, and when the slowest is done [s].

    None and ``inf`` if it cannot be. Exact: of all splits none is faster.
    """
    if not _possible(costs, samples):
        return [], math.inf
    if len(costs) == 1:
        return [samples], costs[0].seconds(samples)
    shares = deal(costs, _level(costs, samples), samples, [1] * len(costs), [cost.most for cost in costs])
    return shares, max([cost.seconds(n) for cost, n in zip(costs, shares, strict=True)])
