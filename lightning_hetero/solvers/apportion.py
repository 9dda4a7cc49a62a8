"""Whole-number shares in proportion to weights: largest remainder (Hamilton), with bounds.

Method: the largest-remainder rule is Hamilton's (Balinski and Young, *Fair Representation*, 1982).
Proportional shares inside bounds come from pegging (Bitran and Hax, *Management Science* 27(4), 1981).
Ours: pegging in exact integers, so that every machine that is given the same floats finds the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.types import Allocation, Status


def apportion(
    weights: Sequence[float], total: int, *, lower: int | Sequence[int] = 0,
    upper: int | Sequence[int] | None = None,
) -> Allocation:  # fmt: skip
    """Splits ``total`` samples over n ranks in proportion to ``weights``, inside bounds.

    The *bounded quota* of rank i is ``q_i = min(max(z * w_i, lower_i), upper_i)``, with the one z for which
    the quotas sum to ``total``. Without active bounds it is ``total * w_i / sum(w)``. Where every rank with
    a weight is at its upper bound, what is left is divided equally over the ranks of weight zero; so
    all-zero weights mean equal shares. Guaranteed, without rounding error:

    - the shares sum to ``total`` and ``lower_i <= share_i <= upper_i``;
    - ``floor(q_i) <= share_i <= ceil(q_i)``: each share is less than 1 from its bounded quota;
    - the ranks rounded up have the largest fractional parts of q_i; of equal ones, the lowest indices.

    Like every Hamilton rule it is not monotone: one sample more in total may cost a rank one (the Alabama
    paradox). Nothing is timed here: ``makespan_s`` keeps its default ``inf``, ``lower_bound_s`` its 0.

    Args:
        weights: one per rank, finite, >= 0 [any unit], e.g. speeds [samples/s].
        total: samples to split, 0 to 2**53.
        lower: least share, one for all ranks or one per rank [samples].
        upper: largest share, in the same form; None for no bound [samples].

    Returns:
        An allocation of n shares, or one with status INFEASIBLE and the reason.

    >>> apportion([3.0, 1.0], 10).shares
    (8, 2)
    >>> apportion([1.0, 1.0, 1.0], 8).shares
    (3, 3, 2)
    >>> apportion([9.0, 1.0, 0.0], 10, lower=1, upper=6).shares
    (6, 3, 1)
    >>> apportion([1.0, 1.0], 8, upper=3).reason
    'upper bounds sum to 6, below total=8: raise upper or lower total'
    """
    low, high = read_bounds(len(weights), total, lower, upper)
    if reason := clash(low, high, total):
        return infeasible(reason)
    return Allocation(shares=tuple(_shares(_as_integers(weights), total, low, high)))


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


def _as_integers(weights: Sequence[float]) -> list[int]:
    """Returns whole numbers in exactly the proportion of ``weights`` (floats are dyadic fractions)."""
    ratios = [w.as_integer_ratio() for w in weights]
    common = math.lcm(*(d for _, d in ratios))
    return [numerator * (common // d) for numerator, d in ratios]


def _shares(weights: list[int], total: int, low: list[int], high: list[int]) -> list[int]:
    """Pegs ranks whose quota leaves the bounds until none does, then rounds by largest remainder.

    One round compares, over the free ranks, what the quotas lack below ``low`` with what they exceed above
    ``high``. If the lack is not smaller, z can only fall, so the ranks below ``low`` stay there: peg them;
    otherwise peg those above ``high``. At most n rounds. Everything is multiplied by the weight sum.
    """
    shares = [0] * len(weights)
    free: list[int] = list(range(len(weights)))
    while free:
        scale = sum(weights[i] for i in free)
        if scale == 0:  # only ranks of weight zero are left to take the rest: equally
            weights, scale = [1] * len(weights), len(free)
        lack: dict[int, int] = {i: d for i in free if (d := low[i] * scale - total * weights[i]) > 0}
        excess: dict[int, int] = {i: d for i in free if (d := total * weights[i] - high[i] * scale) > 0}
        if not lack and not excess:
            _round(shares, free, weights, total, scale)
            break
        pegged, bound = (lack, low) if sum(lack.values()) >= sum(excess.values()) else (excess, high)
        for i in pegged:
            shares[i] = bound[i]
            total -= bound[i]
        free = [i for i in free if i not in pegged]
    return shares


def _round(shares: list[int], free: list[int], weights: list[int], total: int, scale: int) -> None:
    """Writes floor(quota), then one more to the largest remainders (stable sort: lowest index first)."""
    remainder: dict[int, int] = {}
    for i in free:
        shares[i], remainder[i] = divmod(total * weights[i], scale)
    left = total - sum(shares[i] for i in free)
    for i in sorted(free, key=lambda i: -remainder[i])[:left]:
        shares[i] += 1
