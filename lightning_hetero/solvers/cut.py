"""Cuts a sequence into consecutive parts that cost in proportion to given shares, not that have as many samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def cut_by_cost(
    costs: Sequence[float], shares: Sequence[int], *, lower: Sequence[int], upper: Sequence[int], quantum: int = 1
) -> tuple[int, ...]:
    """Returns samples per part; the content stays in its order, so that every rank makes the same cuts.

    Each boundary is, from the first on, the one next to where the parts up to it have cost what they should, as far as
    the bounds of the parts before and behind it leave room. A part then costs what it should up to half its most costly
    sample at each end. With equal costs the parts are the shares. A share of 0 stays 0.

    Args:
        costs: of each sample, > 0.
        shares: samples per part if all cost the same; they sum up to the number of samples.
        lower, upper: least and most samples per part; those that ``shares`` oversteps give way.
        quantum: parts are multiples of this, if the shares are.

    >>> cut_by_cost([1, 1, 1, 1, 4, 4], [3, 3], lower=[1, 1], upper=[6, 6])
    (5, 1)
    >>> cut_by_cost([1, 1, 1, 1, 4, 4], [3, 3], lower=[1, 2], upper=[6, 6])
    (4, 2)
    """
    n = len(costs)
    assert sum(shares) == n
    step = quantum if not any(share % quantum for share in shares) else 1
    low = [min(a // step * step, share) for a, share in zip(lower, shares, strict=True)]
    high = [max(b // step * step, share) if share else 0 for b, share in zip(upper, shares, strict=True)]
    cost_up_to = [0.0, *accumulate(costs)]
    parts: list[int] = []
    begin = behind = 0  # samples cut off, and what would be of equal cost
    for rank, share in enumerate(shares[:-1]):
        behind += share
        first = max(begin + low[rank], n - sum(high[rank + 1 :]))
        last = min(begin + high[rank], n - sum(low[rank + 1 :]))
        target = cost_up_to[n] * behind / n
        end = min(bisect_left(cost_up_to, target), n)  # rounding may put the target above the sum
        if end and target - cost_up_to[end - 1] < cost_up_to[end] - target:
            end -= 1
        end = min(max(end, first), last)
        end = begin + (end - begin + step // 2) // step * step
        while end < first:
            end += step
        while end > last:
            end -= step
        parts.append(end - begin)
        begin = end
    return (*parts, n - begin)
