"""Whole-number shares in proportion to weights: largest remainder (Hamilton), with a least share.

Method: the largest-remainder rule is Hamilton's (Balinski and Young, *Fair Representation*, 1982).
Proportional shares inside bounds come from pegging (Bitran and Hax, *Management Science* 27(4), 1981).
Ours: pegging in exact integers, so that every machine that is given the same floats finds the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def apportion(weights: Sequence[float], total: int, *, lower: int = 0) -> tuple[int, ...]:
    """Splits ``total`` samples over n ranks in proportion to ``weights``.

    The *bounded quota* of rank i is ``q_i = max(z * w_i, lower)``, with the one z for which the quotas sum to
    ``total``. If no rank is at the lower bound, it is ``total * w_i / sum(w)``; all-zero weights mean equal shares.
    Guaranteed, without rounding error:

    - the shares sum to ``total`` and are at least ``lower``;
    - ``floor(q_i) <= share_i <= ceil(q_i)``: each share is less than 1 from its bounded quota;
    - the ranks rounded up have the largest fractional parts of q_i; of equal ones, the lowest indices.

    Like every Hamilton rule it is not monotone: one sample more in total may cost a rank one (the Alabama paradox).

    Args:
        weights: one per rank, finite, >= 0 [any unit], e.g. speeds [samples/s].
        total: samples to split, ``lower`` for each rank to 2**53.
        lower: least share [samples].

    >>> apportion([3.0, 1.0], 10)
    (8, 2)
    >>> apportion([1.0, 1.0, 1.0], 8)
    (3, 3, 2)
    >>> apportion([9.0, 1.0, 0.0], 10, lower=2)
    (6, 2, 2)
    """
    assert lower * len(weights) <= total, (weights, total, lower)
    ratios = [w.as_integer_ratio() for w in weights]  # floats are dyadic fractions
    common = math.lcm(*(d for _, d in ratios))
    exact = [numerator * (common // d) for numerator, d in ratios]
    shares, free = [lower] * len(exact), list(range(len(exact)))
    while True:
        scale = sum(exact[i] for i in free)
        if scale == 0:  # of ranks without weight all get the same
            exact, scale = [1] * len(exact), len(free)
        above = [i for i in free if total * exact[i] >= lower * scale]
        if len(above) == len(free):
            break
        total -= lower * (len(free) - len(above))  # z can only fall: who is below the bound stays there
        free = above
    remainder: dict[int, int] = {}
    for i in free:
        shares[i], remainder[i] = divmod(total * exact[i], scale)
    left = total - sum(shares[i] for i in free)
    for i in sorted(free, key=lambda i: -remainder[i])[:left]:  # stable: the lowest index first
        shares[i] += 1
    return tuple(shares)
