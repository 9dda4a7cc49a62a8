"""Whole samples per pipeline, so that the slowest finishes as early as possible.

`level` is the closed form: the deadline by which the pipelines do all samples if fractions of micro-batches count. It
is a lower bound of the exact answer, at a fraction of the price, and the search over groupings lives on it. `share` is
exact: greedy by earliest finish, as in `minimax`, started at the level, where little is left to hand out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

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
    return len(costs) <= samples <= sum([cost.most for cost in costs]) and all(
        [cost.most > 0 for cost in costs]
    )


def _level(costs: Sequence[PipeCost], samples: int) -> float:
    """Returns the time at which ``samples`` are done, fractions counted, where the first of each costs nothing.

    Newton's method in a bracket: what is done is a sum of few straight pieces for each pipeline, nearly convex.
    """
    low_s, high_s = 0.0, max([cost.first_s for cost in costs])
    while done(costs, high_s) < samples:
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


def done(costs: Sequence[PipeCost], deadline_s: float) -> float:
    """Returns how many samples are done by the deadline, fractions of micro-batches counted, one at least of each."""
    return _pace(costs, deadline_s)[0]


def share(costs: Sequence[PipeCost], samples: int) -> tuple[list[int], float]:
    """Returns the samples of each pipeline, one at least, and when the slowest is done [s].

    None and ``inf`` if it cannot be. Exact: of all splits none is faster. At the level greedy would have handed out
    all offers in time: take them (T never decreases: the most samples in time are found by bisection), then go on one
    by one.
    """
    if not _possible(costs, samples):
        return [], math.inf
    if len(costs) == 1:
        return [samples], costs[0].seconds(samples)
    level_s = _level(costs, samples)
    # What is done at the level itself may be one too many. Without a level all is handed out one by one.
    level_s = level_s * (1.0 - 1e-9) if level_s < math.inf else 0.0
    while (left := samples - sum(shares := [_in_time(cost, level_s) for cost in costs])) < 0:
        level_s *= 0.9  # where memory is short the level may be late
    offers = [
        (cost.seconds(n + 1), i)
        for i, (cost, n) in enumerate(zip(costs, shares, strict=True))
        if n < cost.most
    ]
    heapq.heapify(offers)
    for _ in range(left):
        i = offers[0][1]
        shares[i] += 1
        if shares[i] < costs[i].most:
            heapq.heapreplace(offers, (costs[i].seconds(shares[i] + 1), i))
        else:
            heapq.heappop(offers)
    return shares, max([cost.seconds(n) for cost, n in zip(costs, shares, strict=True)])


def _in_time(cost: PipeCost, deadline_s: float) -> int:
    """Returns the most samples done by the deadline, at least 1: gallops down from the fractional answer."""
    late = math.floor(cost.most_samples(deadline_s)) + 1
    step, good = 1, max(1, late - 1)
    while good > 1 and cost.seconds(good) > deadline_s:
        late, good, step = good, max(1, good - step), 2 * step
    while late - good > 1:
        middle = (good + late) // 2
        good, late = (middle, late) if cost.seconds(middle) <= deadline_s else (good, middle)
    return good
