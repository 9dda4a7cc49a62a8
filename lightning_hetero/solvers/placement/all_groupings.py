"""Which devices form a pipeline together, and which rest: exactly for a few, by search for many.

Up to a handful of devices all set partitions of all subsets are judged (877 for six devices), with pipelines planned
once per set of devices; the best ones are then refined jointly with the synchronisation between pipelines. That last
step is what brings it near to brute force. Beyond, see `search`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypeAlias

from lightning_hetero.solvers.placement.order import Planned, all_orders, key
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.refine import Pipes, exact_s, refine
from lightning_hetero.solvers.placement.shares import share
from lightning_hetero.solvers.placement.sync import least_sync_s, sync_s

__all__ = ["best_of_all", "groupings"]

Blocks: TypeAlias = tuple[int, ...]
"""Groups of devices, as bit masks."""

_STARTS = 8
_PAIRED = 96


def best_of_all(problem: Problem, most_groups: int, *, budget: int) -> tuple[float, Pipes]:
    """Returns the modelled time [s] and the pipelines of the best grouping found; ``inf`` and none if nothing fits.

    Args:
        problem: of few devices: the work grows like Bell's numbers.
        most_groups: more are not formed.
        budget: most candidates to judge in each of the joint refinements.
    """
    n = problem.n_devices
    plans = {mask: found for mask in range(1, 1 << n) if (found := _planned(problem, mask))}
    apart: list[tuple[float, Blocks]] = []
    bound: list[tuple[float, Blocks]] = []
    for blocks in groupings(n, most_groups):
        if all([mask in plans for mask in blocks]):
            pipes = [plans[mask][0].pipe for mask in blocks]
            _, slowest_s = share([problem.cost(pipe) for pipe in pipes], problem.samples)
            if slowest_s < math.inf:
                apart.append((key(slowest_s + sync_s(problem, pipes)), blocks))
                bound.append((key(slowest_s + least_sync_s(problem, pipes)), blocks))
    # As they are, as they could be if pipelines gave way to each other, and with the next best orders.
    chosen = dict.fromkeys(blocks for _, blocks in [*sorted(apart)[:_STARTS], *sorted(bound)[:_STARTS]])
    starts = dict.fromkeys(tuple(plans[mask][0].pipe for mask in blocks) for blocks in chosen)
    best_s = min(apart, default=(math.inf, ()))[0]
    paired = [
        _paired(problem, [plans[mask] for mask in blocks])
        for bound_s, blocks in sorted(bound)[:_PAIRED]
        if bound_s < best_s
    ]
    starts |= dict.fromkeys(pipes for _, pipes in sorted(paired)[:_STARTS])

    def others(pipe: Pipe) -> list[Pipe]:
        return [planned.pipe for planned in plans.get(sum([1 << rank for rank in pipe.ranks]), [])]

    best_s, best = math.inf, ()
    for start in starts:
        time_s, pipes = refine(problem, start, budget=budget, others=others)
        if key(time_s) < key(best_s):
            best_s, best = time_s, pipes
    return best_s, best


def _paired(problem: Problem, planned: Sequence[Sequence[Planned]]) -> tuple[float, Pipes]:
    """Returns the time [s] and the pipelines of the best combination of these orders."""
    best_s, best = math.inf, ()
    for some in product(*planned):
        pipes = tuple(one.pipe for one in some)
        time_s = key(exact_s(problem, pipes, best_s))
        if time_s < best_s or not best:
            best_s, best = time_s, pipes
    return best_s, best


def _planned(problem: Problem, mask: int) -> list[Planned]:
    """Returns pipelines of a set of devices for its part of the samples by speed; for one sample if it must be."""
    ranks = [rank for rank in range(problem.n_devices) if mask >> rank & 1]
    samples = problem.part(ranks)
    return all_orders(problem, ranks, samples) or all_orders(problem, ranks, 1)


def groupings(n: int, most: int) -> Iterator[Blocks]:
    """Yields all ways to put some of n devices into at most ``most`` groups, as bit masks; all in a fixed order.

    >>> [[bin(mask) for mask in blocks] for blocks in groupings(2, 2)]
    [['0b10'], ['0b1'], ['0b11'], ['0b1', '0b10']]
    """

    def deal(rank: int, blocks: Blocks) -> Iterator[Blocks]:
        if rank == n:
            if blocks:
                yield blocks
            return
        yield from deal(rank + 1, blocks)
        for i, mask in enumerate(blocks):
            yield from deal(rank + 1, (*blocks[:i], mask | 1 << rank, *blocks[i + 1 :]))
        if len(blocks) < most:
            yield from deal(rank + 1, (*blocks, 1 << rank))

    yield from deal(0, ())
