"""Tentative search for a structure that is better now: drafts first, the best of them solved (layer P).

Round by round: structures remembered from before, the best split of the orders in force, borders moved by a layer or
two, then resting, waking, moving, swapping, splitting, merging; the changed and the busiest ranks come first. All are
judged by J with the migration that they would take. Where there are few devices, all structures are judged: exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from lightning_hetero.controller.structure.neighbours import (
    Drafts,
    Pipes,
    all_structures,
    borders,
    count_structures,
    neighbours,
)
from lightning_hetero.controller.structure.objective import Judged, Objective
from lightning_hetero.solvers.placement.pipes import Pipe, Problem

__all__ = ["better_structure"]

_EXACT = 500  # structures that are judged one by one
_JUDGED, _SOLVED = 6, 3  # drafts of a round that are judged with whole samples; that are split exactly
_NEARLY = 1.1
_TOLERANCE = 1e-2  # of these splits


def better_structure(
    objective: Objective,
    now: Judged,
    *,
    rounds: int,
    candidates: int,
    most_groups: int,
    first: Sequence[int] = (),
    remembered: Iterable[Pipes] = (),
    barred: Callable[[Pipes], bool] = lambda pipes: False,
) -> Judged:
    """Returns the best structure found, at least as good as ``now``.

    Args:
        objective: J.
        now: the structure in force, with the shares that are best for it.
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
        ranks = list(dict.fromkeys([*first, *_busiest_ranks(problem, best)]))
        near = islice(borders(best.pipes, _busiest(problem, best)), candidates // 3)
        far = neighbours(best.pipes, drafts, ranks, most_groups)
        drawn = [pipes for pipes in islice(_new(chain(near, far), seen), candidates) if not barred(pipes)]
        found = _best(objective, best, _promising(objective, drawn, best), barred)
        if found.value >= best.value:
            break
        best = found
    return best


def _promising(objective: Objective, drawn: Sequence[Pipes], best: Judged) -> Iterator[Pipes]:
    """Returns the drafts that seem best, the first few solved."""
    limit = best.value * _NEARLY  # a draft may be worth more than it seems
    guesses = sorted((objective.estimate(pipes, limit), i) for i, pipes in enumerate(drawn))
    for place, (value, i) in enumerate(guesses[:_JUDGED]):
        if value < math.inf:
            if place < _SOLVED:
                yield _solved(objective.problem, drawn[i], best.pipes)
            yield drawn[i]


def _new(drawn: Iterable[Pipes], seen: set[Pipes]) -> Iterator[Pipes]:
    for pipes in drawn:
        if pipes not in seen:
            seen.add(pipes)
            yield pipes


def _best(
    objective: Objective, now: Judged, structures: Iterable[Pipes], barred: Callable[[Pipes], bool]
) -> Judged:
    """Returns the best of structures and ``now``."""
    best = now
    for pipes in structures:
        if barred(pipes) or pipes == best.pipes:
            continue
        if not objective.problem.capped and objective.estimate(pipes, best.value) == math.inf:
            continue
        judged = objective.judge(pipes, best.value)
        if judged is not None and objective.accepts(judged, now):
            best = judged
    return best


def _solved(problem: Problem, pipes: Pipes, gone: Pipes) -> Pipes:
    """Returns the draft with those pipelines split exactly which are new."""
    solved: list[Pipe] = []
    for pipe in pipes:
        found = None
        if len(pipe.ranks) > 1 and pipe not in gone:
            samples = problem.part(pipe.ranks)
            found = problem.split(pipe.ranks, problem.cost(pipe).size(samples), samples, _TOLERANCE)
        solved.append(found or pipe)
    return tuple(solved)


def _busiest(problem: Problem, judged: Judged) -> list[int]:
    """Returns the busiest stage of each pipeline."""
    return [max(range(len(p.ranks)), key=_stage_times(problem, p).__getitem__) for p in judged.pipes]


def _busiest_ranks(problem: Problem, judged: Judged) -> list[int]:
    stages = _busiest(problem, judged)
    slowest = sorted(range(len(stages)), key=lambda p: -problem.cost(judged.pipes[p]).seconds(judged.shares[p]))
    return [judged.pipes[p].ranks[stages[p]] for p in slowest]


def _stage_times(problem: Problem, pipe: Pipe) -> list[float]:
    work = problem.work_s[1]
    stages = [float(work[b] - work[a]) for a, b in zip(pipe.cuts, pipe.cuts[1:], strict=False)]
    stages[0] += float(problem.leader_s[1])
    return [seconds / float(problem.speeds[rank]) for seconds, rank in zip(stages, pipe.ranks, strict=True)]
