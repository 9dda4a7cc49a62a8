"""The one search for a better structure: drafts of neighbours first, the best of them solved (layer P).

Round by round: borders moved, then resting, waking, moving, swapping, splitting, merging; ranks that changed and the
busiest ones come first. What a structure is worth is for the objective to say: planning asks for the time of a batch
(`place`), the controller for time, budget and migration. Nothing is drawn at random, so that all ranks which search
come to the same end.

Structures to start the search from, and the fastest plan that it finds from them.

Of few devices all groupings are drafted. Of many: a chain of nearest neighbours cut into n pieces of equal speed (fast
links inside groups), devices dealt out by speed (equal groups), each device alone, and all of it again with the
fastest part of the devices only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, permutations
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_hetero.solvers.chain.chain import Floats
from lightning_hetero.solvers.placement import neighbours as moves
from lightning_hetero.solvers.placement.neighbours import Drafts, Pipes
from lightning_hetero.solvers.placement.pipes import Pipe, Problem, share
from lightning_hetero.solvers.placement.sync import sync_s

_EXACT = 500  # structures that are judged one by one
_SOLVED = 3  # drafts of a round that are split
_NEARLY = 1.1


class Judged(NamedTuple):
    """A structure with its best shares.

    Attributes:
        value: what is minimised.
        time_s: of a batch, without the pause.
        pause_s: of the way there.
        money: per batch, pause left out; 0 where nothing counts it.
    """

    value: float
    pipes: Pipes
    shares: tuple[int, ...]
    time_s: float
    pause_s: float = 0.0
    money: float = 0.0


class BatchTime:
    """What structures are worth, the less, the better: to planning, the modelled time of a global batch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.judged = 0

    def judge(self, pipes: Pipes, limit: float = math.inf) -> Judged | None:
        """Returns the structure with its best shares; None if it does not fit, or is not faster than ``limit`` [s]."""
        self.judged += 1
        shares, time_s = share([self.problem.cost(pipe) for pipe in pipes], self.problem.samples)
        time_s += sync_s(self.problem, pipes) if shares else 0.0
        rounded = float(f"{time_s:.8e}")  # the last bits of a machine decide nothing
        return Judged(rounded, pipes, tuple(shares), time_s) if rounded < limit else None

    def accepts(self, new: Judged, old: Judged) -> bool:
        """Returns True: the time is all that counts."""
        return True


def better_structure(
    objective: BatchTime, now: Judged, *, rounds: int, candidates: int, most_groups: int, first: Sequence[int] = (),
    remembered: Iterable[Pipes] = (), barred: Callable[[Pipes], bool] = lambda pipes: False,
) -> Judged:  # fmt: skip
    """Returns the best structure found, at least as good as ``now``.

    Args:
        objective: what is minimised.
        now: where to start.
        rounds: how often to go on from the best so far.
        candidates: to judge per round.
        most_groups: more are not formed.
        first: ranks to look at first, those that changed.
        remembered: structures that were good before.
        barred: structures that are out of the question.
    """
    problem = objective.problem
    if moves.count_structures(problem.n_layers, problem.n_devices, _EXACT) <= _EXACT:
        return _best(objective, now, moves.all_structures(problem.n_layers, problem.n_devices, most_groups), barred)
    best, seen = _best(objective, now, remembered, barred), set[Pipes]()
    for _ in range(rounds):
        drafts = Drafts(problem, problem.cost(best.pipes[0]).size(best.shares[0]))
        busiest = [max(range(len(p.ranks)), key=_stage_times(problem, p).__getitem__) for p in best.pipes]
        slowest = sorted(range(len(busiest)), key=lambda p: -problem.cost(best.pipes[p]).seconds(best.shares[p]))
        ranks = list(dict.fromkeys([*first, *(best.pipes[p].ranks[busiest[p]] for p in slowest)]))
        near = islice(moves.borders(best.pipes, busiest, problem.n_layers), candidates // 3)
        far = moves.neighbours(best.pipes, drafts, ranks, most_groups)
        drawn = [pipes for pipes in islice(_new(chain(near, far), seen), candidates) if not barred(pipes)]
        found = _best(objective, best, _promising(objective, drawn, best), barred)
        if found.value >= best.value:
            break
        best = found
    return best


def _promising(objective: BatchTime, drawn: Sequence[Pipes], best: Judged) -> list[Pipes]:
    """Returns the best drafts, and these solved."""
    limit = best.value * _NEARLY  # a draft may be worth more than it seems
    judged = [objective.judge(pipes, limit) for pipes in drawn]
    near = sorted([(one.value, i) for i, one in enumerate(judged) if one is not None])[:_SOLVED]
    return [pipes for _, i in near for pipes in (solved(objective.problem, drawn[i], best.pipes), drawn[i])]


def _new(drawn: Iterable[Pipes], seen: set[Pipes]) -> Iterator[Pipes]:
    for pipes in drawn:
        if pipes not in seen:
            seen.add(pipes)
            yield pipes


def _best(objective: BatchTime, now: Judged, structures: Iterable[Pipes], barred: Callable[[Pipes], bool]) -> Judged:
    """Returns the best of structures and ``now``."""
    best = now
    for pipes in structures:
        if barred(pipes) or pipes == best.pipes:
            continue
        judged = objective.judge(pipes, best.value)
        if judged is not None and objective.accepts(judged, now):
            best = judged
    return best


def solved(problem: Problem, pipes: Pipes, but: Pipes = ()) -> Pipes:
    """Returns the structure with its pipelines split for the samples that their speed is worth, ``but`` some."""
    found: list[Pipe] = []
    for pipe in pipes:
        better = None
        if len(pipe.ranks) > 1 and pipe not in but:
            samples = problem.part(pipe.ranks)
            better = problem.split(pipe.ranks, problem.cost(pipe).size(samples), samples)
        found.append(better or pipe)
    return tuple(found)


def _stage_times(problem: Problem, pipe: Pipe) -> list[float]:
    work = problem.work_s[1]
    stages = [float(work[b] - work[a]) for a, b in zip(pipe.cuts, pipe.cuts[1:], strict=False)]
    stages[0] += float(problem.outside_s[1])
    return [seconds / float(problem.speeds[rank]) for seconds, rank in zip(stages, pipe.ranks, strict=True)]


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
