"""How many micro-batches a stage has in flight, by the rules that `lightning_hetero.solvers.chain.model` states.

Legend: S stages, numbered from 0; T bottleneck, the busiest device's or link's time per micro-batch [s].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SLACK = 1e-9
"""A quotient this little above a whole number, relatively, is rounding: 3 * 0.1 / 0.1 is not above 3."""


def per_link_depth(bottleneck_s: float, link_s: Sequence[float], loop_s: float, micro_batches: int) -> tuple[int, ...]:
    """Counts every link's round trip in bottlenecks, rounded up.

    ``keep[S-1] = 2 + ceil(2 loop / T)``, ``keep[i] = keep[i+1] + 1 + ceil(2 link_i / T)``, at most ``micro_batches``.

    >>> per_link_depth(1.0, [0.2, 0.6], 0.5, micro_batches=16)
    (8, 6, 3)
    """
    if not link_s:
        return (1,)
    keep = [2 + _turns(2.0 * loop_s, bottleneck_s, micro_batches)]
    for one_way_s in reversed(link_s):
        keep.append(keep[-1] + 1 + _turns(2.0 * one_way_s, bottleneck_s, micro_batches))
    return tuple(min(k, micro_batches) for k in reversed(keep))


def cumulative_depth(
    bottleneck_s: float,
    stage_s: Sequence[float],
    link_s: Sequence[float],
    loop_s: float,
    head_s: float,
    micro_batches: int,
    *,
    extra: int = 0,
) -> tuple[int, ...]:
    """Counts the whole way from a stage to the head and back in bottlenecks, rounded up once.

    ``keep[i] = max(ceil(way_i / T), keep[i+1] + 1) + extra``, at most ``micro_batches``.

    >>> cumulative_depth(1.0, [1.0, 1.0, 1.0], [0.2, 0.6], 0.5, 0.1, micro_batches=16)
    (6, 5, 3)
    """
    if not link_s:
        return (1,)
    keep: list[int] = []
    way_s = head_s
    for seconds, behind_s in zip(reversed(stage_s), [loop_s, *reversed(link_s)], strict=True):
        way_s += seconds + 2.0 * behind_s
        keep.append(max(1, _turns(way_s, bottleneck_s, micro_batches), keep[-1] + 1 if keep else 1))
    return tuple(min(k + extra, micro_batches) for k in reversed(keep))


def _turns(seconds: float, bottleneck_s: float, most: int) -> int:
    turns = seconds / bottleneck_s * (1.0 - _SLACK) if seconds > 0.0 else 0.0
    return math.ceil(turns) if turns < most else most
