"""Which rank keeps the optimizer's state of which rows of which parameter; arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def divide(
    tensors: Sequence[tuple[int, float]], capacities: Sequence[float], held: list[float], *, by_rows: bool = True
) -> list[list[int]]:
    """Returns for each tensor where the ranks' rows begin, and where the last one's end: ``[0, 3, 3, 8]`` for 8 rows.

    What must stay whole goes to the rank that is least filled then, the largest first. All others stand in one line,
    which is cut where a rank has its part: a cut is off by half a row at most.

    Args:
        tensors: rows and bytes of a row.
        capacities: in proportion to which bytes are divided, one number >= 0 per rank; some > 0.
        held: bytes that each rank has already, of other tensors; brought up to date.
        by_rows: tensors may be on several ranks.
    """
    numbers = range(len(tensors))
    in_line = [i for i in numbers if by_rows and tensors[i][0] > 1 and tensors[i][1]]
    line = sum(rows * size for rows, size in (tensors[i] for i in in_line))
    in_all = sum(held) + sum(rows * size for rows, size in tensors)
    quotas = [in_all * capacity / sum(capacities) for capacity in capacities]
    cuts: dict[int, list[int]] = {}
    for rows, size, i in sorted(((*tensors[i], i) for i in numbers if i not in in_line), key=lambda t: -t[0] * t[1]):
        some = [rank for rank, capacity in enumerate(capacities) if capacity]
        owner = min(some, key=lambda rank: (held[rank] + rows * size) / capacities[rank])
        held[owner] += rows * size
        cuts[i] = [rows * (rank > owner) for rank in range(len(capacities) + 1)]
    wanted = [max(0.0, quota - has) for quota, has in zip(quotas, held, strict=True)]
    ends, at = [end * line / (sum(wanted) or 1.0) for end in accumulate(wanted)], 0.0
    for i in in_line:
        rows, size = tensors[i]
        cuts[i] = [0, *(min(rows, max(0, round((end - at) / size))) for end in ends[:-1]), rows]
        held[:] = [has + (stop - start) * size for has, (start, stop) in zip(held, pairwise(cuts[i]), strict=True)]
        at += rows * size
    return [cuts[i] for i in numbers]
