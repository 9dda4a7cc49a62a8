"""Structures to start the search from, and the fastest plan that it finds from them (layer P).

Of few devices all groupings are drafted. Of many: a chain of nearest neighbours cut into n pieces of equal speed (fast
links inside groups), devices dealt out by speed (equal groups), each device alone, and all of it again with the
fastest part of the devices only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import TypeAlias

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.neighbours import Drafts, Pipes
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.search import BatchTime, Judged, better_structure, solved

Groups: TypeAlias = tuple[tuple[int, ...], ...]

_FEW = 5  # devices of which all groupings are drafted
_MICRO_PER_STAGE = 4
_ALIKE = 20.0  # links within 1/20, relatively, count as equally near: faster devices first, not noise
_FOLLOWED, _ROUNDS, _CANDIDATES = 12, 40, 400  # of few devices
_EFFORT, _LEAST, _MOST = 24_000, 60, 1200  # candidates for many devices: fewer, the more devices there are
_PER_ROUND = 60
_ORDERED, _LONG = 16, 64  # devices in a pipeline: up to so many in several orders; more rest where memory allows


def best_found(problem: Problem, most_groups: int, *, budget: int | None = None) -> tuple[Pipes, int]:
    """Returns the fastest structure found, none if nothing fits, and how many were compared; 0: all groupings.

    Args:
        problem: of any size.
        most_groups: more are not formed.
        budget: most structures to compare after the first ones; None: by the number of devices.
    """
    objective, n = BatchTime(problem), problem.n_devices
    most_groups = min(most_groups, problem.samples)
    few = n <= _FEW
    size = first_size(problem, min(n, 4))
    drafts = Drafts(problem, size)
    one_way_s: Floats = problem.latency_s + size * float(problem.one.cut_sizes.mean()) * problem.per_byte_s
    far_s: Floats = one_way_s + np.transpose(one_way_s)  # the round trip of a typical message between any two [s]
    starts: dict[Pipes, Judged | None] = {}
    for groups in _all_groupings(n, most_groups) if few else _some_groupings(problem, far_s, most_groups):
        pipes = _pipes(problem, drafts, groups, far_s)
        if pipes and pipes not in starts:
            starts[pipes] = objective.judge(pipes)
    ranked = sorted([(judged.value, pipes) for pipes, judged in starts.items() if judged is not None])
    most = budget if budget is not None else min(_MOST, max(_LEAST, _EFFORT // n))
    candidates, rounds = (_CANDIDATES, _ROUNDS) if few else (_PER_ROUND, max(1, most // _PER_ROUND))
    best: Judged | None = None
    followed = _FOLLOWED if few else 4 if n <= 16 else 1
    for _, pipes in ranked[:followed]:
        now = objective.judge(solved(problem, pipes)) or objective.judge(pipes)
        if now is None:
            continue
        found = better_structure(
            objective, now, rounds=rounds if budget != 0 else 0, candidates=candidates, most_groups=most_groups
        )
        if best is None or found.value < best.value:
            best = found
    return (best.pipes if best else ()), 0 if few else objective.judged


def first_size(problem: Problem, stages: int) -> int:
    """Returns the size of micro-batches to start from: a few of them per stage."""
    wanted = max(1, problem.samples // (_MICRO_PER_STAGE * stages)) if stages > 1 else problem.samples
    return max([size for size in problem.sizes if size <= wanted], default=problem.sizes[0])


def _pipes(problem: Problem, drafts: Drafts, groups: Groups, far_s: Floats) -> Pipes | None:
    found: list[Pipe] = []
    replica_bytes = float(problem.one.state_to[-1]) + problem.outside.state_bytes
    caps = float(problem.caps.mean())
    longest = max(_LONG, math.ceil(2.0 * replica_bytes / caps)) if caps > 0.0 else _LONG
    for group in groups:
        ranks = _fastest(problem, group, min(longest, problem.n_layers))  # a pipeline needs a layer per device
        if float(problem.caps[ranks].sum()) * (1.0 + 1e-9) < replica_bytes:
            return None
        pipe = _pipe(problem, drafts, ranks, far_s)
        if pipe is None:
            return None
        found.append(pipe)
    return tuple(sorted(found, key=lambda pipe: min(pipe.ranks)))


def _pipe(problem: Problem, drafts: Drafts, ranks: list[int], far_s: Floats) -> Pipe | None:
    """Returns a pipeline of these ranks; where memory is short the one of a few orders that is fastest."""
    near, part = _nearest_chain(problem, ranks, far_s), problem.part(ranks)
    if not problem.capped or len(ranks) == 1:
        return drafts.pipe(near)
    # The first stages keep most micro-batches in flight: memory in front, where it differs.
    orders = dict.fromkeys([near, tuple(sorted(ranks, key=lambda r: (-problem.caps[r], r))), near[::-1]])

    def fastest(found: Iterable[Pipe | None]) -> Pipe | None:
        times = [(problem.cost(pipe).seconds(part), pipe) for pipe in found if pipe and problem.cost(pipe).most]
        return min(times)[1] if times else None

    size = problem.sizes[0] if problem.n_devices <= _ORDERED else first_size(problem, problem.n_devices)
    return fastest(map(drafts.pipe, orders)) or fastest(
        problem.split(order, size, part)
        for order in (permutations(ranks) if problem.n_devices <= _FEW else [near])
    )


def _all_groupings(n: int, most: int) -> Iterator[Groups]:
    """Yields all ways to put some of n devices into at most ``most`` groups."""
    found: list[Groups] = [()]
    for rank in range(n):
        more: list[Groups] = []
        for groups in found:
            more += [groups, (*groups, (rank,))]
            more += [(*groups[:i], (*group, rank), *groups[i + 1 :]) for i, group in enumerate(groups)]
        found = more
    return (groups for groups in found if 0 < len(groups) <= most)


def _some_groupings(problem: Problem, far_s: Floats, most: int) -> Iterator[Groups]:
    n = problem.n_devices
    everyone = range(n)
    numbers = sorted({k for p in range(n.bit_length()) for k in (1 << p, 3 << p) if k <= n} | {n})
    for quarters in (4, 3, 2, 1) if n <= _ORDERED else (4, 2):
        some = _fastest(problem, everyone, max(1, n * quarters // 4))
        chain = _nearest_chain(problem, some, far_s)
        for count in [k for k in numbers if k <= min(most, len(some))]:
            yield _pieces(chain, problem.speeds, count)
            if problem.capped:
                yield _pieces(chain, problem.caps, count)
            if quarters == 4:
                yield tuple(tuple(some[i::count]) for i in range(count))
    roomiest = sorted(everyone, key=lambda r: (-problem.caps[r], r))
    for count in numbers if problem.capped else ():
        yield (tuple(roomiest[:count]),)


def _pieces(chain: Sequence[int], by: Floats, n: int) -> Groups:
    """Cuts a chain of neighbours into n pieces of about equal speed, or of what ``by`` says of each device."""
    weights = np.minimum(by[list(chain)], 1e300)
    middles = np.cumsum(weights) - 0.5 * weights
    parts = (middles / float(weights.sum()) * n * (1.0 + 1e-12)).astype(np.int64)
    places: list[int] = np.minimum(parts, n - 1).tolist()
    pieces: list[list[int]] = [list[int]() for _ in range(n)]
    for rank, place in zip(chain, places, strict=True):
        pieces[place].append(rank)
    return tuple(tuple(piece) for piece in pieces if piece)


def _fastest(problem: Problem, ranks: Sequence[int], n: int) -> list[int]:
    """Returns the n fastest, of equal ones those with most memory, then of lowest rank."""
    return sorted(ranks, key=lambda r: (-problem.speeds[r], -problem.caps[r], r))[:n]


def _nearest_chain(problem: Problem, ranks: Sequence[int], far_s: Floats) -> tuple[int, ...]:
    """Returns ``ranks`` from the fastest on, each followed by the nearest left; of equal ones the fastest."""
    left = sorted(ranks, key=lambda r: (-problem.speeds[r], r))
    with np.errstate(divide="ignore"):
        alike = np.round(np.log(far_s[np.ix_(left, left)]) * _ALIKE)
    at, order, waiting = 0, [left[0]], np.arange(1, len(left))
    while waiting.size:
        i = int(alike[at, waiting].argmin())
        at = int(waiting[i])
        order.append(left[at])
        waiting = np.delete(waiting, i)
    return tuple(order)
