"""Exact min-max split of one global batch over unequal ranks.

LB-BSP (Chen et al., SoCC 2020) states the problem: minimise max_i T_i(x_i) with sum x_i = X and memory
bounds. Greedy allocation for it is textbook (Ibaraki and Katoh, *Resource Allocation Problems*, MIT Press,
1988). Ours: the search below, which finds greedy's answer without walking there unit by unit.

Legend: T_i(x) time of rank i for x samples [s]; N total [samples]; q quantum [samples]; D deadline [s].

The *offer* (i, x) is one more quantum for rank i that would then hold x; its time is T_i(x). Greedy starts at
the lower bounds and takes the offer of least (time, rank) until N is reached. As T_i never decreases, the
offers of a rank come in order. With K the number of quanta to be dealt out:

(1) Greedy is optimal. Let D* be the time of its last offer. Fewer than K offers have a time below D*, so any
    split takes one of at least D*; and the time at the lower bounds is paid by every split.
(2) For any D, if the offers of time <= D are at most K, greedy takes all of them. So one may start from any shares
    within such a deadline. Here it is just below the fractional optimum, from which few quanta are missing; a heap
    deals these out.

Exact min-max split where a rank gets no sample, or at least a given number: BatchNorm cannot do with one.

Legend as in `minimax`; m is the least that a rank with any samples gets. A rank of lower bound 0 is *free*: x_i = 0 or
m <= x_i <= upper_i. The others have x_i >= max(lower_i, m).

Let M_i(D) be the largest share of rank i with T_i <= D. Of the free ranks, k at most can have samples,
k = min(number of them with M_i(D) >= m, floor((N - sum of the others' lower bounds) / m)). Shares in use fill a whole
interval between the sums of their lower and upper ends, so **a split within D exists exactly if the others' M_i(D) and
the k largest M_i(D) of the free ranks sum to N or more**: fewer than k ranks, or other ranks, hold no more. This only
gets easier with D, so the least such D is found by bisection; within its k ranks the problem is `minimax`'s.
"""

from __future__ import annotations

import heapq
import math
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from lightning_hetero.types import Allocation, Cost, Status

Ints: TypeAlias = Sequence[int]

_BELOW = 1.0 - 1e-12  # of the total, which rounding may miss; all may be done long before the next rank begins
_CLOSE = 1e-13  # of the total: rounding
_MOST_TURNS = 200


def minimax(
    costs: Sequence[Cost], total: int, *, lower: int | Sequence[int] = 0, upper: int | Sequence[int] | None = None,
    quantum: int = 1,
) -> Allocation:  # fmt: skip
    """Splits ``total`` samples so that the slowest rank finishes as early as possible.

    Solves  min_x max_i T_i(x_i),  sum x_i = N,  lower_i <= x_i <= upper_i,  x_i a multiple of ``quantum``.
    Exact: ``makespan_s`` is that of the best of all splits, as computed by ``costs[i].seconds(x_i)`` in
    floats, provided these never decrease in x_i. O(n log n) for affine costs as a rule.

    Of all optimal splits the one returned is greedy's: quantum after quantum goes to the rank that then has
    the least time, ties to the lowest index. It has the lexicographically least sorted times if all costs
    increase strictly and no two ranks have offers of the same time; else not always, since greedy buys a
    cheap quantum even where a rank that is late anyway (a fixed cost, a flat piece) could hold it for
    nothing. Where costs are flat and equal, the lowest rank takes all it may: use bounds against that.

    Args:
        costs: one per rank, non-decreasing, times >= 0 [s].
        total: samples of the global batch, 0 to 2**53.
        lower: least samples, one for all ranks or one per rank, e.g. 2 for BatchNorm.
        upper: most samples, in the same form, e.g. what fits the memory; None for no bound.
        quantum: every share is a multiple of it [samples]; bounds are tightened to multiples.

    Returns:
        Shares, or the status INFEASIBLE and the reason. ``lower_bound_s`` is the optimum over fractional
        shares in the given bounds, quantum ignored, up to rounding (1e-9 of ``total``).

    Raises:
        ValueError: a time below 0 or NaN, or a cost that decreases.

    >>> from lightning_hetero.types import AffineCost
    >>> slow, fast = AffineCost(fixed_s=0.0, per_sample_s=3.0), AffineCost(fixed_s=0.0, per_sample_s=1.0)
    >>> minimax([fast, slow], total=8).shares
    (6, 2)
    >>> split = minimax([fast, slow], total=8, upper=[5, 8])
    >>> split.shares, split.makespan_s, round(split.lower_bound_s, 6)
    ((5, 3), 9.0, 9.0)
    >>> minimax([fast, slow], total=16, quantum=4).shares
    (12, 4)
    >>> minimax([fast, slow], total=10, quantum=4).reason
    'total=10 is not a multiple of quantum=4: use 8 or 12'
    """
    q = quantum
    lower, upper = read_bounds(len(costs), total, lower, upper)
    low, high = lower, [v if v < total else total for v in upper]
    reason = clash(low, upper, total)
    if q > 1 and not reason:
        low, high = [-(-v // q) * q for v in low], [v // q * q for v in high]
        reason = _quantum_clash(lower, upper, low, high, total, q)
    if reason:
        return infeasible(reason)
    level_s, bound_s = _level(costs, total, lower, upper, low, high)
    shares = deal(costs, level_s, total, low, high, q)
    makespan_s = float(max([cost.seconds(x) for cost, x in zip(costs, shares, strict=True)]))
    return Allocation(shares=tuple(shares), makespan_s=makespan_s, lower_bound_s=min(bound_s, makespan_s))


def deal(costs: Sequence[Cost], level_s: float, total: int, low: Ints, high: Ints, q: int = 1) -> list[int]:
    """Returns greedy's shares: those done just before ``level_s``, and what is left, offer by offer.

    Args:
        costs: non-decreasing; only `seconds` decides, `most_samples` tells where to look.
        level_s: about the time of the best split with fractions [s]; the nearer it is, the fewer offers are left.
        total, low, high, q: as in `minimax`; a split exists.
    """
    ranks = list(zip(costs, low, high, strict=True))
    start_s, early = min(level_s, sys.float_info.max), 1e-12
    while True:
        start_s = start_s * (1.0 - early) if start_s > 1e-300 else -1.0  # -1: nothing is done in time
        shares = [_about(cost, start_s, a, b, q) for cost, a, b in ranks]
        left = (total - sum(shares)) // q
        if left >= 0:
            break
        early = min(8.0 * early, 0.5)
    offers = [(cost.seconds(x + q), i) for i, ((cost, _, b), x) in enumerate(zip(ranks, shares, strict=True)) if x < b]
    heapq.heapify(offers)
    while left > 0:
        due_s, i = offers[0]
        cost, _, most = ranks[i]
        shares[i] += q
        left -= 1
        if shares[i] >= most:
            heapq.heappop(offers)
            continue
        next_s = cost.seconds(shares[i] + q)
        if next_s <= due_s and left:  # flat here: all that it does at this time is its own
            flat = most_in_time(cost, due_s, shares[i], min(most, shares[i] + left * q), q)
            left, shares[i] = left - (flat - shares[i]) // q, flat
            next_s = cost.seconds(flat + q) if flat < most else math.inf
        if shares[i] < most:
            heapq.heapreplace(offers, (next_s, i))
        else:
            heapq.heappop(offers)
    return shares


def _about(cost: Cost, deadline_s: float, low: int, high: int, q: int) -> int:
    """Returns a share within the deadline, at least ``low``: gallops down from where the fractional answer is."""
    most = cost.most_samples(deadline_s)
    if not most > low:
        return low
    good = high if most >= high else max(low, int(most) // q * q)
    if cost.seconds(good) <= deadline_s:
        return good
    late, step = good, q
    while good > low and cost.seconds(good) > deadline_s:
        late, good, step = good, max(low, good - step), 2 * step
    return most_in_time(cost, deadline_s, good, late - q, q) if good > low else low


def most_in_time(cost: Cost, deadline_s: float, low: int, high: int, q: int) -> int:
    """Returns the largest multiple of ``q`` that is done by the deadline, at least ``low``; only `seconds` decides."""
    units = range(low // q, high // q + 1)
    in_time = bisect_right(units, deadline_s, key=lambda u: cost.seconds(u * q))
    return units[max(0, in_time - 1)] * q


def _quantum_clash(lower: Ints, upper: Ints, low: Ints, high: Ints, total: int, q: int) -> str:
    if total % q:
        return f"total={total} is not a multiple of quantum={q}: use {total // q * q} or {total // q * q + q}"
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if a > b:
            span = f"lower={lower[i]} to upper={min(upper[i], total)}"
            return f"rank {i}: no multiple of quantum={q} in {span}: widen the bounds or lower quantum"
    reason = clash(low, high, total)
    return f"with bounds tightened to multiples of quantum={q}, {reason}, or lower quantum" if reason else ""


def _level(costs: Sequence[Cost], total: int, lower: Ints, upper: Ints, low: Ints, high: Ints) -> tuple[float, float]:
    """Returns the deadline at which fractional shares sum to ``total`` [s], and their makespan [s].

    The makespan is later only through lower bounds.
    """
    due = [c.seconds(x) for c, x in zip(costs, lower, strict=True)]
    if not all([t >= 0.0 for t in due]):  # NaN is refused too
        raise ValueError(f"costs take {due} s for lower={lower}: times must be numbers >= 0")
    if any([c.seconds(b) < c.seconds(a) for c, a, b in zip(costs, low, high, strict=True)]):
        raise ValueError("a cost's seconds() decreases with samples: the search needs non-decreasing costs")
    level_s = fractional_s(costs, total, lower, upper, start_s=max([c.seconds(total / len(costs)) for c in costs]))
    return level_s, max([level_s, *due])


def fractional_s(
    costs: Sequence[Cost], total: float, low: Sequence[float], high: Sequence[float], *, start_s: float = 1.0
) -> float:
    """Returns about when ``total`` samples are done first, fractions counted [s]; ``inf`` if they never are.

    False position in a bracket that begins with a factor of 2, halved in every third turn: what is done may jump.

    Args:
        costs: of which only `most_samples` is asked.
        total: samples, of all ranks together.
        low, high: of each rank's samples; the first ``low`` ones cost nothing here.
        start_s: where to look first.
    """
    ranks = list(zip(costs, low, high, strict=True))

    def surplus(at_s: float) -> float:
        return math.fsum([min(max(c.most_samples(at_s), a), b) for c, a, b in ranks]) - total * _BELOW

    early_s, less = 0.0, surplus(0.0)
    if less >= 0.0:
        return 0.0
    late_s = start_s if 0.0 < start_s < math.inf else 1.0
    more = surplus(late_s)
    if more < 0.0:
        while more < 0.0 and late_s < math.inf:
            less, early_s, late_s = more, late_s, 2.0 * late_s
            more = surplus(late_s)
    else:
        while (less := surplus(early_s := 0.5 * late_s)) >= 0.0:
            late_s, more = early_s, less
    for turn in range(_MOST_TURNS):
        middle_s, at_s = 0.5 * (early_s + late_s), early_s + (late_s - early_s) * (less / (less - more))
        if not early_s < middle_s < late_s:
            break
        at_s = at_s if turn % 3 < 2 and early_s < at_s < late_s else middle_s
        now = surplus(at_s)
        if abs(now) <= _CLOSE * total:
            return at_s
        if now > 0.0:
            late_s, more = at_s, now
        else:
            early_s, less = at_s, now
    return late_s


def read_bounds(
    n: int, total: int, lower: int | Sequence[int], upper: int | Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Returns lower and upper bounds, n each [samples]; an upper bound of None becomes ``total``."""
    upper = total if upper is None else upper
    low, high = ([bound] * n if isinstance(bound, int) else list(bound) for bound in (lower, upper))
    return low, high


def clash(lower: Sequence[int], upper: Sequence[int], total: int) -> str:
    """Returns which bounds leave no split of ``total``, with the numbers and the way out; "" if none do."""
    for i, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low > high:
            return f"rank {i}: lower={low} exceeds upper={high}: raise upper or lower the lower bound"
    least, most = sum(lower), sum(upper)
    if least > total:
        return f"lower bounds sum to {least}, above total={total}: lower the lower bounds or raise total"
    if most < total:
        return f"upper bounds sum to {most}, below total={total}: raise upper or lower total"
    return ""


def infeasible(reason: str) -> Allocation:
    """Returns the allocation that stands for "no split exists", with the reason in words."""
    return Allocation(shares=(), status=Status.INFEASIBLE, reason=reason)



_ENDLESS = 0x7FF0000000000000  # the place of infinity among the floats


def minimax_none_or_least(
    costs: Sequence[Cost], total: int, *, least: int, lower: int | Sequence[int] = 0,
    upper: int | Sequence[int] | None = None, quantum: int = 1,
) -> Allocation:  # fmt: skip
    """Splits ``total`` samples as `minimax` does, but a rank gets none of them or at least ``least``.

    Exact in the same sense. A rank without samples counts with ``costs[i].seconds(0)``, as in `minimax`.

    Args:
        costs, total, lower, upper, quantum: as in `minimax`.
        least: least samples of a rank that gets any; up to ``quantum`` it changes nothing.

    Returns:
        Shares, or the status INFEASIBLE and the reason. ``lower_bound_s`` is `minimax`'s without the rule.

    Raises:
        ValueError: as `minimax`.

    >>> from lightning_hetero.types import AffineCost
    >>> same = [AffineCost(fixed_s=0.0, per_sample_s=1.0)] * 3
    >>> minimax_none_or_least(same, 3, least=2).shares
    (3, 0, 0)
    >>> minimax_none_or_least(same, 5, least=2).shares
    (3, 2, 0)
    >>> minimax_none_or_least(same, 1, least=2).reason
    'total=1 cannot be split so that every rank gets none or 2 and more: raise total or upper bounds'
    """
    plain = minimax(costs, total, lower=lower, upper=upper, quantum=quantum)
    m = -(-least // quantum) * quantum
    if not plain.ok or obeys_least(plain.shares, m):
        return plain
    low, high = read_bounds(len(costs), total, lower, upper)
    low = [max(-(-a // quantum) * quantum, m) if a else 0 for a in low]
    high = [min(b, total) // quantum * quantum if b >= m else 0 for b in high]
    used = _ranks_in_use(costs, total, low, high, quantum, m)
    if used is None:
        return infeasible(
            f"total={total} cannot be split so that every rank gets none or {m} and more: raise total or upper bounds"
        )
    low = [max(a, m) if i in used else 0 for i, a in enumerate(low)]
    high = [b if i in used else 0 for i, b in enumerate(high)]
    best = minimax(costs, total, lower=low, upper=high, quantum=quantum)
    return replace(best, lower_bound_s=min(plain.lower_bound_s, best.makespan_s))


def obeys_least(shares: Ints, least: int) -> bool:
    """Whether each share is 0 or at least ``least``."""
    return all(x == 0 or x >= least for x in shares)


def _ranks_in_use(costs: Sequence[Cost], total: int, low: Ints, high: Ints, q: int, m: int) -> set[int] | None:
    """Returns the ranks with samples in a best split, as many as the least deadline allows; None: no such split."""
    if sum(low) > total or any(a > b for a, b in zip(low, high, strict=True)):
        return None
    bound = {i for i, a in enumerate(low) if a}
    free = [i for i, b in enumerate(high) if b >= m and i not in bound]
    most_free = (total - sum(low)) // m

    def in_use(deadline_s: float) -> set[int] | None:
        most = {i: most_in_time(costs[i], deadline_s, low[i], high[i], q) for i in (*bound, *free)}
        able = sorted((i for i in free if most[i] >= m), key=lambda i: (-most[i], i))
        used = bound.union(able[:most_free])
        return used if sum(most[i] for i in used) >= total else None

    early_s = max(c.seconds(a) for c, a in zip(costs, low, strict=True))
    return in_use(max(early_s, _least_float(lambda deadline_s: in_use(deadline_s) is not None)))


def _least_float(is_so: Callable[[float], bool]) -> float:
    """Returns the least float >= 0 from which on something holds, inf if it never does: by bisection over floats."""

    def at(place: int) -> float:
        return struct.unpack("<d", struct.pack("<q", place))[0]

    return at(bisect_left(range(_ENDLESS), True, key=lambda place: is_so(at(place))))
