"""Exact min-max split where a rank gets no sample, or at least a given number: BatchNorm cannot do with one.

Legend as in `minimax`; m is the least that a rank with any samples gets. A rank of lower bound 0 is *free*: x_i = 0 or
m <= x_i <= upper_i. The others have x_i >= max(lower_i, m).

Let M_i(D) be the largest share of rank i with T_i <= D. Of the free ranks, k at most can have samples,
k = min(number of them with M_i(D) >= m, floor((N - sum of the others' lower bounds) / m)). Shares in use fill a whole
interval between the sums of their lower and upper ends, so **a split within D exists exactly if the others' M_i(D) and
the k largest M_i(D) of the free ranks sum to N or more**: fewer than k ranks, or other ranks, hold no more. This only
gets easier with D, so the least such D is found by bisection; within its k ranks the problem is `minimax`'s.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from lightning_hetero.solvers.minimax import infeasible, minimax, most_in_time, read_bounds
from lightning_hetero.types import Allocation, Cost

Ints: TypeAlias = Sequence[int]

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
