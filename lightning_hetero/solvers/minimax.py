"""Exact min-max split of one global batch over unequal ranks.

LB-BSP (Chen et al., SoCC 2020) states the problem: minimise max_i T_i(x_i) with sum x_i = X and memory
bounds. Greedy allocation for it is textbook (Ibaraki and Katoh, *Resource Allocation Problems*, MIT Press,
1988). Ours: the search below, which finds greedy's answer without walking there unit by unit.

Legend: T_i(x) time of rank i for x samples [s]; N total [samples]; q quantum [samples]; D deadline [s].

The *offer* (i, x) is one more quantum for rank i that would then hold x; its time is T_i(x). Greedy starts at
the lower bounds and takes the offer of least (time, rank) until N is reached. As T_i never decreases, the
offers of a rank come in order: greedy merges n sorted lists, **it takes the K offers least in (time, rank)**,
K = (N - sum lower) / q. Three facts follow, and the whole file rests on them.

(1) Greedy is optimal. Let D* be the time of its last offer. Fewer than K offers have a time below D*, so any
    split takes one of at least D*; and the time at the lower bounds is paid by every split.
(2) For any D, if the offers of time <= D are at most K, greedy takes all of them. So one may start from any
    such deadline, and a poor one costs time, never correctness.
(3) The answer depends on T_i at whole numbers only, as floats. Sums, roots and inverses (`most_samples`)
    merely suggest deadlines. So every machine that is given the same floats finds the same split.

Saturating costs T_i(x) = max(c_i, L_i(x)) with lines L_i need no search of their own. A rank pays its floor c_i for any
x, so max_i T_i(x_i) = max(max_i c_i, max_i L_i(x_i)): **the split that is best for the lines is best for the costs.**
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.solvers.apportion import as_count, clash, infeasible, read_bounds
from lightning_hetero.types import AffineCost, Allocation, Cost, LearnedCost, SaturatingCost

__all__ = ["minimax"]

_FEW_RANKS = 64  # up to here plain Python beats NumPy's fixed cost per call
Ints: TypeAlias = Sequence[int]
_Rank: TypeAlias = tuple[float, float, int, int]  # fixed_s, samples_per_s, lower, upper
_ALL_AFFINE = {AffineCost}  # exact types: a subclass may override seconds()
_LINES = {AffineCost, SaturatingCost}


def minimax(
    costs: Sequence[Cost],
    total: int,
    *,
    lower: int | Sequence[int] = 0,
    upper: int | Sequence[int] | None = None,
    quantum: int = 1,
) -> Allocation:
    """Splits ``total`` samples so that the slowest rank finishes as early as possible.

    Solves  min_x max_i T_i(x_i),  sum x_i = N,  lower_i <= x_i <= upper_i,  x_i a multiple of ``quantum``.
    Exact: ``makespan_s`` is that of the best of all splits, as computed by ``costs[i].seconds(x_i)`` in
    floats, provided these never decrease in x_i. O(n log N) for affine costs as a rule.

    Of all optimal splits the one returned is greedy's: quantum after quantum goes to the rank that then has
    the least time, ties to the lowest index. It has the lexicographically least sorted times if all costs
    increase strictly and no two ranks have offers of the same time; else not always, since greedy buys a
    cheap quantum even where a rank that is late anyway (a fixed cost, a flat piece) could hold it for
    nothing. Where costs are flat and equal, the lowest rank takes all it may: use bounds against that.
    Where all costs are `AffineCost` or `SaturatingCost` it is greedy's on their lines, so floors do not tie.

    Args:
        costs: one per rank, non-decreasing, times >= 0 [s].
        total: samples of the global batch, 0 to 2**53.
        lower: least samples, one for all ranks or one per rank, e.g. 2 for BatchNorm.
        upper: most samples, likewise, e.g. what fits the memory; None for no bound.
        quantum: every share is a multiple of it [samples]; bounds are tightened to multiples.

    Returns:
        Shares, or the status INFEASIBLE and the reason. ``lower_bound_s`` is the optimum over fractional
        shares in the given bounds, quantum ignored, up to rounding (1e-9 of ``total``).

    Raises:
        TypeError: ``total``, ``quantum`` or a bound is not a whole number.
        ValueError: no costs, wrong lengths, a negative number, ``quantum`` < 1, or a time below 0 or NaN.

    >>> slow, fast = AffineCost(fixed_s=0.0, per_sample_s=3.0), AffineCost(fixed_s=0.0, per_sample_s=1.0)
    >>> minimax([fast, slow], total=8).shares
    (6, 2)
    >>> split = minimax([fast, slow], total=8, upper=[5, 8])
    >>> split.shares, split.makespan_s, split.lower_bound_s
    ((5, 3), 9.0, 9.0)
    >>> minimax([fast, slow], total=16, quantum=4).shares
    (12, 4)
    >>> minimax([SaturatingCost(floor_s=7.0, fixed_s=0.0, per_sample_s=1.0), slow], total=8).makespan_s
    7.0
    >>> minimax([fast, slow], total=10, quantum=4).reason
    'total=10 is not a multiple of quantum=4: use 8 or 12'
    """
    n = len(costs)
    if n == 0:
        raise ValueError("costs is empty: pass one cost per rank")
    total, q = as_count("total", total), as_count("quantum", quantum, least=1)
    lower, upper = read_bounds(n, total, lower, upper)
    low, high = lower, [v if v < total else total for v in upper]
    reason = clash(low, upper, total)
    if q > 1 and not reason:
        low, high = [-(-v // q) * q for v in low], [v // q * q for v in high]
        reason = _quantum_clash(lower, upper, low, high, total, q)
    if reason:
        return infeasible(reason)
    kinds = set(map(type, costs))
    if kinds == _ALL_AFFINE:
        return _split_affine(cast(Sequence[AffineCost], costs), total, lower, upper, low, high, q)
    if not kinds <= _LINES:
        return _search(_Ranks(costs, lower, upper, low, high, q), total)
    learned = cast(Sequence[LearnedCost], costs)
    lines = [c.line if isinstance(c, SaturatingCost) else c for c in learned]
    floor_s = max([c.floor_s for c in learned if isinstance(c, SaturatingCost)])
    best = _split_affine(lines, total, lower, upper, low, high, q)
    return replace(
        best, makespan_s=max(floor_s, best.makespan_s), lower_bound_s=max(floor_s, best.lower_bound_s)
    )


def _split_affine(
    costs: Sequence[AffineCost], total: int, lower: Ints, upper: Ints, low: Ints, high: Ints, q: int
) -> Allocation:
    quick = _few_affine(costs, total, lower, upper, low, high, q) if len(costs) <= _FEW_RANKS else None
    return quick or _search(_AffineRanks(costs, lower, upper, low, high, q), total)


def _quantum_clash(lower: Ints, upper: Ints, low: Ints, high: Ints, total: int, q: int) -> str:
    if total % q:
        return f"total={total} is not a multiple of quantum={q}: use {total // q * q} or {total // q * q + q}"
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        if a > b:
            span = f"lower={lower[i]} to upper={min(upper[i], total)}"
            return f"rank {i}: no multiple of quantum={q} in {span}: widen the bounds or lower quantum"
    reason = clash(low, high, total)
    return f"with bounds tightened to multiples of quantum={q}, {reason}, or lower quantum" if reason else ""


def _few_affine(
    costs: Sequence[AffineCost], total: int, lower: Ints, upper: Ints, low: Ints, high: Ints, q: int
) -> Allocation | None:
    """Starts at the fractional optimum, where by (2) only the rounded-off parts remain: at most n quanta.

    None where floats are too coarse for that (slopes of 0, or lost beside the fixed cost): search instead.
    """
    fixed = [c.fixed_s for c in costs]
    slope = [c.per_sample_s for c in costs]
    if min(slope) < 1e-100 or max(slope) > 1e100 or max(fixed) > 1e100:
        return None
    level, bound = _water_level(fixed, slope, total, lower, upper)
    limits = list(zip(fixed, slope, lower, upper, strict=True))
    fill = sum([min(max((bound - f) / p, a), b) for f, p, a, b in limits])
    off = 1e-9 * total
    if fill < total - off or (fill > total + off and bound > max([f + p * a for f, p, a, _ in limits])):
        return None
    shares: list[int] = []
    offers: list[float] = []
    for f, p, a, b in zip(fixed, slope, low, high, strict=True):
        v = (level - f) / p
        x = a if v <= a else b if v >= b else int(v) // q * q
        if x > a and f + p * x > level:
            x -= q
        elif x < b and f + p * (x + q) <= level:
            x += q
        offer = f + p * (x + q)
        if (x > a and f + p * x > level) or (x < b and offer <= level):
            return None
        shares.append(x)
        offers.append(offer if x < b else math.inf)
    left = (total - sum(shares)) // q
    if not 0 <= left <= 4 * len(shares):
        return None
    for _ in range(left):
        i = offers.index(min(offers))  # the first of equals: ties to the lowest index
        x = shares[i] = shares[i] + q
        offers[i] = fixed[i] + slope[i] * (x + q) if x < high[i] else math.inf
    makespan_s = float(max([f + p * x for f, p, x in zip(fixed, slope, shares, strict=True)]))
    return Allocation(shares=tuple(shares), makespan_s=makespan_s, lower_bound_s=min(bound, makespan_s))


def _water_level(
    fixed: Sequence[float], slope: Sequence[float], total: float, lower: Ints, upper: Ints
) -> tuple[float, float]:
    """Returns the deadline at which fractional shares sum to ``total`` [s], and their makespan [s].

    Pegging as in `apportion`: the free ranks finish together; while that breaks bounds, fix the ranks on the
    side (too little, too much) that is off by more. The makespan is later only through lower bounds.
    """
    free = list(zip(fixed, [1.0 / p for p in slope], lower, upper, strict=True))
    level = pegged_s = 0.0
    while free:
        rates = [r for _, r, _, _ in free]
        level = (total + math.fsum([f * r for f, r, _, _ in free])) / math.fsum(rates)
        lack = excess = 0.0
        below: list[_Rank] = []
        above: list[_Rank] = []
        for rank in free:
            f, r, a, b = rank
            v = (level - f) * r
            if v < a:
                lack += a - v
                below.append(rank)
            elif v > b:
                excess += v - b
                above.append(rank)
        if not below and not above:
            return level, max(level, pegged_s)
        pegged, bound = (below, 2) if lack >= excess else (above, 3)
        total -= sum([rank[bound] for rank in pegged])
        pegged_s = max(pegged_s, *[rank[0] + rank[bound] / rank[1] for rank in pegged])
        free = [rank for rank in free if rank not in pegged]  # equal ranks are pegged together
    return level, pegged_s


class _Ranks:
    """What the search asks about all ranks at once; ``low`` and ``high`` are multiples of ``quantum``."""

    def __init__(self, costs: Sequence[Cost], lower: Ints, upper: Ints, low: Ints, high: Ints, q: int):
        self.costs, self.low, self.high, self.quantum = costs, low, high, q
        self._lower, self._upper = lower, upper
        due = self.times(lower)
        if not all([t >= 0.0 for t in due]):  # NaN is refused too
            raise ValueError(f"costs take {due} s for lower={lower}: times must be numbers >= 0")
        self.due_s = max(due)  # no split is faster than the lower bounds alone

    def times(self, shares: Ints) -> list[float]:
        """Returns T_i(x_i) for each rank [s]."""
        return [c.seconds(x) for c, x in zip(self.costs, shares, strict=True)]

    def fill(self, deadline_s: float) -> float:
        """Returns the fractional samples done by the deadline, within the given bounds (a hint)."""
        limits = zip(self.costs, self._lower, self._upper, strict=True)
        return math.fsum([min(max(c.most_samples(deadline_s), a), b) for c, a, b in limits])

    def within(self, deadline_s: float) -> list[int]:
        """Returns the largest shares with T_i <= deadline, at least ``low``: exact."""
        bounds = zip(self.costs, self.low, self.high, strict=True)
        return [_most(c, deadline_s, a, b, self.quantum) for c, a, b in bounds]


def _most(cost: Cost, deadline_s: float, low: int, high: int, q: int) -> int:
    """Returns the largest share in time, at least ``low``: gallops from where the inverse hints, then bisects."""
    good, late = low, high + q  # invariant: good is in time (or due anyway), late is not (or not allowed)
    probe = int(min(max(cost.most_samples(deadline_s), low), high)) // q * q
    step = q
    while late - good > q:
        if not good < probe < late:
            probe = good + (late - good) // (2 * q) * q if step > q else good + q
        if cost.seconds(probe) <= deadline_s:
            good, probe = probe, probe + step
        else:
            late, probe = probe, probe - step
        step *= 2
    return good


class _AffineRanks(_Ranks):
    """The same for affine costs in NumPy: multiply and add are separate, so the floats equal Python's."""

    def __init__(self, costs: Sequence[AffineCost], lower: Ints, upper: Ints, low: Ints, high: Ints, q: int):
        self._f = np.array([c.fixed_s for c in costs], dtype=np.float64)
        self._p = np.array([c.per_sample_s for c in costs], dtype=np.float64)
        self._flat = self._p == 0.0
        self._low, self._high = np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)
        self._a, self._b = np.array(lower, dtype=np.float64), np.array(upper, dtype=np.float64)
        super().__init__(costs, lower, upper, low, high, q)

    def times(self, shares: Ints) -> list[float]:
        return self._times(np.array(shares, dtype=np.int64)).tolist()

    def fill(self, deadline_s: float) -> float:
        return float(np.minimum(np.maximum(self._most(deadline_s), self._a), self._b).sum())

    def within(self, deadline_s: float) -> list[int]:
        q, low, high = self.quantum, self._low, self._high
        x = np.minimum(np.maximum(self._most(deadline_s), low), high).astype(np.int64)
        x = x // q * q if q > 1 else x
        for _ in range(2):  # rounding is off by one at most, as a rule
            late = (x > low) & (self._times(x) > deadline_s)
            early = (x < high) & (self._times(x + q) <= deadline_s)
            if not np.any(late | early):
                return x.tolist()
            x = x + q * early - q * late
        good, most = low // q, high // q
        while np.any(good < most):
            middle = (good + most + 1) // 2
            fits = (self._times(middle * q) <= deadline_s) | (middle == good)
            good, most = np.where(fits, middle, good), np.where(fits, most, middle - 1)
        return (good * q).tolist()

    def _times(self, x: NDArray[np.int64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            return self._f + self._p * x

    def _most(self, deadline_s: float) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            most = (deadline_s - self._f) / self._p
        return np.where(self._flat, np.where(self._f <= deadline_s, np.inf, -np.inf), most)


def _search(ranks: _Ranks, total: int) -> Allocation:
    """Any split gives a deadline that suffices; the fractional optimum one that is nearly too short."""
    enough_s = max(ranks.times(_some_split(ranks, total)))
    level_s = _fractional(ranks, total, enough_s)
    shares = _greedy(ranks, total, level_s, enough_s)
    makespan_s = float(max(ranks.times(shares)))
    return Allocation(shares=tuple(shares), makespan_s=makespan_s, lower_bound_s=min(level_s, makespan_s))


def _some_split(ranks: _Ranks, total: int) -> list[int]:
    """Returns a split within the bounds: about equal, the rest where there is room."""
    q, low, high = ranks.quantum, ranks.low, ranks.high
    equal = total // len(low) // q * q
    shares = [a if equal < a else b if equal > b else equal for a, b in zip(low, high, strict=True)]
    left = total - sum(shares)
    if left < 0:
        return _fill_up(low, shares, total - sum(low))
    return _fill_up(shares, high, left)


def _fractional(ranks: _Ranks, total: int, enough_s: float) -> float:
    """Returns the makespan of the best fractional split [s]: the least deadline that ``fill`` meets."""
    early_s, late_s = ranks.due_s, enough_s
    early, late = ranks.fill(early_s), ranks.fill(late_s)
    off, turn = 1e-12 * total, 0
    if early >= total - off:
        return early_s
    while late > total + off or ranks.fill(late_s * (1.0 - 1e-12)) >= late:  # too late, or on a plateau
        secant_s = early_s + (total - early) * ((late_s - early_s) / max(late - early, off))
        deadline_s = _between(early_s, late_s, secant_s, turn)
        if deadline_s is None:
            break
        fill = ranks.fill(deadline_s)
        if fill < total - off:
            early_s, early = deadline_s, fill
        else:
            late_s, late = deadline_s, fill
        turn += 1
    return late_s


def _greedy(ranks: _Ranks, total: int, level_s: float, enough_s: float) -> list[int]:
    """Returns greedy's shares: narrows ``early_s < D* <= late_s`` until few quanta are left or none between.

    Between neighbouring floats all that is left are offers of the same time D*: these go by rank.
    """
    q, few = ranks.quantum, ranks.quantum * (8 + 2 * math.isqrt(len(ranks.low)))
    early_s, early, left = -1.0, ranks.low, total - sum(ranks.low)  # no offer is in time
    late_s, late = enough_s, ranks.within(enough_s)
    if sum(late) < total:
        raise ValueError("a cost's seconds() decreases with samples: the search needs non-decreasing costs")
    deadline_s, turn = cast("float | None", level_s), 0
    while deadline_s is not None:
        shares = ranks.within(deadline_s)
        more = total - sum(shares)
        if more >= 0:
            early_s, early, left = deadline_s, shares, more
        else:
            late_s, late = deadline_s, shares
        if left <= few:
            return _hand_out(ranks, early, left // q)
        if turn == 0:  # one quantum more each: late enough, and near
            plus = [x + q if x < b else x for x, b in zip(early, ranks.high, strict=True)]
            aim_s = max(ranks.times(plus)) if early_s >= 0.0 else math.nextafter(late_s, -1.0)
        else:
            ratio = (left - few // 2) / (sum(late) - sum(early))
            aim_s = max(early_s, 0.0) + ratio * (late_s - max(early_s, 0.0))
        deadline_s = _between(early_s, late_s, aim_s, turn)
        turn += 1
    return _fill_up(early, late, left)


def _between(early_s: float, late_s: float, aim_s: float, turn: int) -> float | None:
    """Returns a deadline strictly between the two, in turn the aim, a mean, the aim, the middle float.

    None if there is no float between. The middle float bounds the number of turns by 4 * 64.
    """
    a, b = _position(early_s), _position(late_s)
    if b - a < 2:
        return None
    if turn % 4 == 1:
        aim_s = 0.5 * (early_s + late_s)
    if turn % 4 < 3 and early_s < aim_s < late_s and aim_s >= 0.0:
        return aim_s
    return struct.unpack("<d", struct.pack("<q", (a + b) // 2))[0]


def _position(value: float) -> int:
    """Returns the place of a float among all floats >= 0 (its bits as a whole number); -1 if negative."""
    return -1 if value < 0.0 else struct.unpack("<q", struct.pack("<d", abs(value)))[0]


def _hand_out(ranks: _Ranks, start: Ints, quanta: int) -> list[int]:
    """Takes the next offers in order of (time, rank), by a heap."""
    q, high = ranks.quantum, ranks.high
    shares = list(start)
    times = ranks.times([x + q if x < b else x for x, b in zip(shares, high, strict=True)])
    offers = [(t, i) for i, t in enumerate(times) if shares[i] < high[i]]
    heapq.heapify(offers)
    for _ in range(quanta):
        i = offers[0][1]
        shares[i] += q
        if shares[i] < high[i]:
            heapq.heapreplace(offers, (ranks.costs[i].seconds(shares[i] + q), i))
        else:
            heapq.heappop(offers)
    return shares


def _fill_up(early: Ints, late: Ints, left: int) -> list[int]:
    shares = list(early)
    for i, (x, most) in enumerate(zip(early, late, strict=True)):
        if left == 0:
            break
        shares[i] = most if most - x < left else x + left
        left -= shares[i] - x
    return shares
