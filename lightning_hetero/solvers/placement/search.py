"""The one search for a better structure: drafts of neighbours first, the best of them solved (layer P).

Round by round: borders moved, then resting, waking, moving, swapping, splitting, merging; ranks that changed and the
busiest ones come first. What a structure is worth is for the objective to say: planning asks for the time of a batch
(`place`), the controller for time, budget and migration. Nothing is drawn at random, so that all ranks which search
come to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from lightning_hetero.solvers.placement.neighbours import (
    Drafts,
    Pipes,
    all_structures,
    borders,
    count_structures,
    neighbours,
)
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
    if count_structures(problem.n_layers, problem.n_devices, _EXACT) <= _EXACT:
        return _best(objective, now, all_structures(problem.n_layers, problem.n_devices, most_groups), barred)
    best, seen = _best(objective, now, remembered, barred), set[Pipes]()
    for _ in range(rounds):
        drafts = Drafts(problem, problem.cost(best.pipes[0]).size(best.shares[0]))
        busiest = [max(range(len(p.ranks)), key=_stage_times(problem, p).__getitem__) for p in best.pipes]
        slowest = sorted(range(len(busiest)), key=lambda p: -problem.cost(best.pipes[p]).seconds(best.shares[p]))
        ranks = list(dict.fromkeys([*first, *(best.pipes[p].ranks[busiest[p]] for p in slowest)]))
        near = islice(borders(best.pipes, busiest, problem.n_layers), candidates // 3)
        far = neighbours(best.pipes, drafts, ranks, most_groups)
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
