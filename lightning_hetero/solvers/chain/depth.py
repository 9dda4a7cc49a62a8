"""How many micro-batches a stage may have in flight: its depth.

A micro-batch is in flight on a stage from the start of its forward to the end of its backward: so long are its
activations kept. Too few in flight and the pipeline waits for round trips; too many only cost memory.

Textbook 1F1B counts stages only (PipeDream; Narayanan et al., SOSP 2019). Ours are the other two rules, for a
pipeline that loops back to its leader, where the head stands: they also count the links.

Legend: S stages, numbered from 0; T bottleneck, the busiest device's or link's time per micro-batch [s].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["cumulative_depth", "per_link_depth", "textbook_depth"]

_SLACK = 1e-9
"""A quotient this little above a whole number, relatively, is rounding: 3 * 0.1 / 0.1 is not above 3."""


def per_link_depth(
    bottleneck_s: float, link_s: Sequence[float], loop_s: float, micro_batches: int
) -> tuple[int, ...]:
    """Counts every link's round trip in bottlenecks, rounded up: never short of work, at most x2.3 of the textbook's.

    ``keep[S-1] = 2 + ceil(2 loop / T)``, ``keep[i] = keep[i+1] + 1 + ceil(2 link_i / T)``, at most ``micro_batches``.
    A single stage has nothing to overlap with and keeps one.

    Args:
        bottleneck_s: T, per micro-batch [s].
        link_s: one way between stage i and i + 1, per micro-batch [s]; S - 1 of them, so none for a single stage.
        loop_s: one way between the last stage and the head [s].
        micro_batches: of one group in one batch.

    Returns:
        Depth per stage, never increasing along the pipeline.

    Raises:
        TypeError: ``micro_batches`` is not a whole number.
        ValueError: a time is negative or not finite, or there is no micro-batch.

    >>> per_link_depth(1.0, [0.0, 0.0], 0.0, micro_batches=16)
    (4, 3, 2)
    >>> per_link_depth(1.0, [0.2, 0.6], 0.5, micro_batches=16)
    (8, 6, 3)
    """
    most = _count("micro_batches", micro_batches, least=1)
    _check_times(bottleneck_s, link_s=link_s, loop_s=[loop_s])
    if not link_s:
        return (1,)
    keep = [2 + _turns(2.0 * loop_s, bottleneck_s, most)]
    for one_way_s in reversed(link_s):
        keep.append(keep[-1] + 1 + _turns(2.0 * one_way_s, bottleneck_s, most))
    return tuple(min(k, most) for k in reversed(keep))


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
    """Counts the whole way from a stage to the head and back in bottlenecks, rounded up once: the thrifty rule.

    ``keep[i] = max(ceil(way_i / T), keep[i+1] + 1) + extra``, at most ``micro_batches``; ``way_i`` is what a
    micro-batch needs from the start of its forward on stage i to the end of its backward there if it never waits.

    Args:
        bottleneck_s: T, per micro-batch [s].
        stage_s: forward and backward together, per micro-batch [s]; S of them.
        link_s: one way between stage i and i + 1 [s]; S - 1 of them.
        loop_s: one way between the last stage and the head [s].
        head_s: the head, loss included, forward and backward [s].
        micro_batches: of one group in one batch.
        extra: in flight on every stage beyond the rule; 1 absorbs most of the waiting in queues.

    Returns:
        Depth per stage, never increasing along the pipeline. A single stage keeps one.

    Raises:
        TypeError: ``micro_batches`` or ``extra`` is not a whole number.
        ValueError: a time is negative or not finite, the lengths do not fit, or there is no micro-batch.

    >>> cumulative_depth(1.0, [1.0, 1.0, 1.0], [0.0, 0.0], 0.0, 0.1, micro_batches=16)
    (4, 3, 2)
    >>> cumulative_depth(1.0, [1.0, 1.0, 1.0], [0.2, 0.6], 0.5, 0.1, micro_batches=16)
    (6, 5, 3)
    """
    most, extra = _count("micro_batches", micro_batches, least=1), _count("extra", extra, least=0)
    _check_times(bottleneck_s, stage_s=stage_s, link_s=link_s, loop_s=[loop_s], head_s=[head_s])
    if len(stage_s) != len(link_s) + 1:
        raise ValueError(
            f"stage_s has {len(stage_s)} stages and link_s {len(link_s)} links: S stages need S - 1 links"
        )
    if not link_s:
        return (1,)
    keep: list[int] = []
    way_s = head_s
    for seconds, behind_s in zip(reversed(stage_s), [loop_s, *reversed(link_s)], strict=True):
        way_s += seconds + 2.0 * behind_s
        keep.append(max(1, _turns(way_s, bottleneck_s, most), keep[-1] + 1 if keep else 1))
    return tuple(min(k + extra, most) for k in reversed(keep))


def textbook_depth(stages: int, micro_batches: int) -> tuple[int, ...]:
    """1F1B's depth ``S - i``: enough where links are free and the head stands behind the last stage, only there.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is below 1.

    >>> textbook_depth(4, micro_batches=3)
    (3, 3, 2, 1)
    """
    stages, most = _count("stages", stages, least=1), _count("micro_batches", micro_batches, least=1)
    return tuple(min(stages - i, most) for i in range(stages))


def _turns(seconds: float, bottleneck_s: float, most: int) -> int:
    turns = seconds / bottleneck_s * (1.0 - _SLACK) if seconds > 0.0 else 0.0
    return math.ceil(turns) if turns < most else most


def _count(name: str, value: int, *, least: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be a whole number (int), got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return value


def _check_times(bottleneck_s: float, **times: Sequence[float]) -> None:
    for name, values in (("bottleneck_s", [bottleneck_s]), *times.items()):
        for value in values:
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a finite number >= 0 (seconds)")
    if bottleneck_s == 0.0 and any(value > 0.0 for values in times.values() for value in values):
        raise ValueError("bottleneck_s=0.0 although a stage or a link takes time: it is the largest of these times")
