"""Whole samples per pipeline, so that the slowest finishes as early as possible.

`level` is the closed form: the deadline by which the pipelines do all samples if fractions of micro-batches count. It
is a lower bound of the exact answer, at a fraction of the price, and the search over groupings lives on it. `share` is
exact: `minimax`'s greedy, started at the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.solvers.minimax import deal
from lightning_hetero.solvers.placement.pipe_cost import PipeCost

_CLOSE = 1e-12
_MOST_TURNS = 200


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
    """Returns the time at which ``samples`` are done, fractions counted, where the first of each costs nothing.

    Newton's method in a bracket: what is done is a sum of few straight pieces for each pipeline, nearly convex.
    """
    low_s, high_s = 0.0, max([cost.first_s for cost in costs])
    while _pace(costs, high_s)[0] < samples:
        low_s, high_s = high_s, 2.0 * high_s
        if not 0.0 < high_s < math.inf:
            return math.inf
    at_s = high_s
    for _ in range(_MOST_TURNS):
        now, per_s = _pace(costs, at_s)
        if now >= samples:
            high_s = at_s
        else:
            low_s = at_s
        if abs(now - samples) <= _CLOSE * samples or high_s - low_s <= _CLOSE * high_s:
            break
        at_s = at_s - (now - samples) / per_s if per_s > 0.0 else low_s
        if not low_s < at_s < high_s:
            at_s = 0.5 * (low_s + high_s)
    return at_s


def _pace(costs: Sequence[PipeCost], deadline_s: float) -> tuple[float, float]:
    total, per_s = 0.0, 0.0
    for cost in costs:
        most, rate = cost.pace(deadline_s)
        if most > 1.0:
            total, per_s = total + most, per_s + rate
        else:
            total += 1.0
    return total, per_s


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
