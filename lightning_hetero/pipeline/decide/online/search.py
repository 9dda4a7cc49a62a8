"""Tentative search for a structure that is better now: drafts first, the best of them solved (layer P).

Round by round: structures remembered from before, the best split of the orders in force, borders moved by a layer or
two, then resting, waking, moving, swapping, splitting, merging; the changed and the busiest ranks come first. All are
judged by J with the migration that they would take. Where there are few devices, all structures are judged: exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from lightning_hetero.pipeline.decide.online.neighbours import (
    Drafts,
    Pipes,
    all_structures,
    borders,
    count_structures,
    neighbours,
)
from lightning_hetero.pipeline.decide.online.objective import Judged, Objective
from lightning_hetero.solvers.placement.order import in_order
from lightning_hetero.solvers.placement.pipes import Pipe, Problem

__all__ = ["better_structure"]

_EXACT = 500  # structures that are judged one by one
_SOLVED = 3  # drafts of a round whose pipelines are split exactly


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
        return _best(objective, now, all_structures(problem.n_layers, problem.n_devices, most_groups), barred)[-1]
    best, seen = _best(objective, now, remembered, barred)[-1], set[Pipes]()
    for turn in range(rounds):
        size = problem.cost(best.pipes[0]).size(best.shares[0])
        drafts = Drafts(problem, size)
        ranks = list(dict.fromkeys([*first, *_busiest_ranks(problem, best)]))
        near = borders(best.pipes, _busiest(problem, best))
        far = neighbours(best.pipes, drafts, ranks, most_groups)
        drawn = chain(islice(near, candidates // 3), far)
        found = _best(objective, best, islice(_new(drawn, seen), candidates), barred, keep=_SOLVED, limit=_near(best))
        better = [found[-1]]
        for draft in found[-_SOLVED:]:
            for solved in _solved(problem, draft):
                if not barred(solved):
                    judged = objective.judge(solved, better[-1].value)
                    if judged is not None and objective.accepts(judged, now):
                        better.append(judged)
        if better[-1].value >= best.value:
            break
        best = better[-1]
    return best


def _near(best: Judged) -> float:
    return best.value * 1.1 if best.value > 0.0 else best.value


def _new(drawn: Iterator[Pipes], seen: set[Pipes]) -> Iterator[Pipes]:
    for pipes in drawn:
        if pipes not in seen:
            seen.add(pipes)
            yield pipes


def _best(
    objective: Objective,
    now: Judged,
    structures: Iterable[Pipes],
    barred: Callable[[Pipes], bool],
    *,
    keep: int = 1,
    limit: float = -math.inf,
) -> list[Judged]:
    """Returns the best structures, ``now`` among them, the best last.

    Args:
        keep: how many, where they are below ``limit``: drafts may be worth more than they seem.
        limit: of J.
    """
    kept = [now]
    for pipes in structures:
        if barred(pipes):
            continue
        # What is kept besides the best is the worst of `keep` good ones.
        bar = max(kept[0].value, limit) if len(kept) < keep else kept[0].value
        judged = objective.judge(pipes, bar)
        if judged is not None and objective.accepts(judged, now):
            kept = sorted([*kept, judged], key=lambda one: -one.value)[-keep:]
    return kept


def _solved(problem: Problem, draft: Judged) -> Iterator[Pipes]:
    """Returns the draft with pipelines split exactly, all at once."""
    solved: list[Pipe] = []
    for pipe, samples in zip(draft.pipes, draft.shares, strict=True):
        size = problem.cost(pipe).size(samples)
        found = in_order(problem, pipe.ranks, samples, size=size) if len(pipe.ranks) > 1 else None
        solved.append(pipe if found is None else found.pipe)
    if tuple(solved) != draft.pipes:
        yield tuple(solved)


def _busiest(problem: Problem, judged: Judged) -> list[int]:
    """Returns the busiest stage of each pipeline."""
    return [max(range(len(p.ranks)), key=_stage_times(problem, p).__getitem__) for p in judged.pipes]


def _busiest_ranks(problem: Problem, judged: Judged) -> list[int]:
    stages = _busiest(problem, judged)
    slowest = sorted(
        range(len(stages)), key=lambda p: -problem.cost(judged.pipes[p]).seconds(judged.shares[p])
    )
    return [judged.pipes[p].ranks[stages[p]] for p in slowest]


def _stage_times(problem: Problem, pipe: Pipe) -> list[float]:
    work = problem.work_s[1]
    stages = [float(work[b] - work[a]) for a, b in zip(pipe.cuts, pipe.cuts[1:], strict=False)]
    stages[0] += float(problem.leader_s[1])
    return [seconds / float(problem.speeds[rank]) for seconds, rank in zip(stages, pipe.ranks, strict=True)]
