"""Joint refinement of all pipelines, with the synchronisation between them.

Planned on their own, pipelines have borders wherever it suits them. Each border that others do not have makes one more
tuple of owners, to be synchronised in rounds of its own; and who has many parameters has much to synchronise. Where
that is dear, pipelines should give way to each other. So here borders move one by one, onto the others' borders, and
together; devices change places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.shares import done, level, share
from lightning_hetero.solvers.placement.sync import sync_s

__all__ = ["Pipes", "estimate_s", "exact_s", "refine"]

Pipes: TypeAlias = tuple[Pipe, ...]

_GAIN = 1e-8  # relative; less is rounding
_SHORT = 6  # up to so many stages all pairs change places, beyond only neighbours
_EXCHANGED = 8  # up to so many devices are exchanged between pipelines
_FEW = 8  # foreign borders, or patterns of borders, that are tried at most
_MINOR = 1e-3  # part of the time below which the synchronisation is not worth a look of its own


def estimate_s(problem: Problem, pipes: Sequence[Pipe], limit_s: float = math.inf) -> float:
    """Returns the modelled time of the global batch with fractional shares: without caps a bound of `exact_s` [s].

    ``inf`` if it is not below ``limit_s``.
    """
    time_s = level([problem.cost(pipe) for pipe in pipes], problem.samples)
    if time_s < limit_s:
        time_s += sync_s(problem, pipes)
    return time_s if time_s < limit_s else math.inf


def exact_s(problem: Problem, pipes: Sequence[Pipe], limit_s: float = math.inf) -> float:
    """Returns the modelled time of the global batch with whole samples [s], ``inf`` if it is not below ``limit_s``."""
    costs = [problem.cost(pipe) for pipe in pipes]
    if not problem.capped and level(costs, problem.samples) >= limit_s:
        return math.inf
    wire_s = sync_s(problem, pipes)
    if wire_s >= limit_s:
        return math.inf
    time_s = share(costs, problem.samples)[1] + wire_s
    return time_s if time_s < limit_s else math.inf


class Judge:
    """Judges pipelines against the best ones so far.

    With fractional shares a variant of one pipeline is dismissed early: if it does not do more until the others' level,
    the level rises, and only less synchronisation could make up for that.
    """

    def __init__(self, problem: Problem, pipes: Pipes, *, exact: bool) -> None:
        self._problem, self._exact = problem, exact
        self._time = exact_s if exact else estimate_s
        self.pipes, self.time_s = pipes, self._time(problem, pipes)
        self._look()

    def _look(self) -> None:
        self._level_s = 0.0
        self._wire = True
        if not self._exact and self.time_s < math.inf:
            wire_s = sync_s(self._problem, self.pipes)
            self._level_s, self._wire = self.time_s - wire_s, wire_s > _MINOR * self.time_s

    def better(self, gone: Sequence[Pipe], new: Sequence[Pipe], pipes: Callable[[], Pipes]) -> bool:
        """Takes ``pipes`` over if they are better; they differ from the best ones by ``gone`` and ``new``."""
        problem = self._problem
        if not self._exact and not self._wire:
            before, after = ([problem.cost(pipe) for pipe in some] for some in (gone, new))
            if done(after, self._level_s) <= done(before, self._level_s) * (1.0 + 1e-12):
                return False
        candidate = pipes()
        time_s = self._time(problem, candidate, self.time_s * (1.0 - _GAIN))
        if time_s == math.inf:
            return False
        self.pipes, self.time_s = candidate, time_s
        self._look()
        return True


def refine(
    problem: Problem,
    pipes: Pipes,
    *,
    budget: int,
    exact: bool = True,
    others: Callable[[Pipe], Sequence[Pipe]] = lambda pipe: (),
) -> tuple[float, Pipes]:
    """Returns a local optimum near ``pipes``, and its modelled time [s].

    Args:
        problem: what is planned.
        pipes: where to start.
        budget: most candidates to judge.
        exact: judge by whole samples; else by fractional shares, which is faster.
        others: more pipelines of the same devices that are worth a try.
    """
    judge = Judge(problem, pipes, exact=exact)
    i, idle = 0, 0
    while idle <= len(pipes) and budget > 0:
        if i < len(pipes):
            pipe, rest = judge.pipes[i], (*judge.pipes[:i], *judge.pipes[i + 1 :])
            found = _variants(problem, pipe, rest)
            trials = [
                ((pipe,), (variant,)) for variant in dict.fromkeys([*found, *others(pipe)]) if variant != pipe
            ]
        else:
            trials = [*_together(problem, judge.pipes), *_across(problem, judge.pipes)]
        idle += 1
        for gone, new in trials:
            budget -= 1
            if budget < 0:
                break
            if judge.better(gone, new, lambda old=gone, new=new: _exchanged(judge.pipes, old, new)):
                idle = 0
                break
        if idle:
            i = (i + 1) % (len(pipes) + 1)
    return judge.time_s, judge.pipes


def _exchanged(pipes: Pipes, gone: Sequence[Pipe], new: Sequence[Pipe]) -> Pipes:
    instead = dict(zip(gone, new, strict=True))
    return tuple(instead.get(pipe, pipe) for pipe in pipes)


def _variants(problem: Problem, pipe: Pipe, rest: Sequence[Pipe]) -> Iterator[Pipe]:
    ranks, cuts = pipe
    n = len(ranks)
    if n == 1:
        return
    foreign = sorted({cut for other in rest for cut in other.cuts[1:-1]})
    for i in range(1, n):
        for cut in dict.fromkeys(
            [*(cuts[i] + step for step in _steps(problem, n)), *_near(foreign, cuts[i])]
        ):
            if cuts[i - 1] < cut < cuts[i + 1]:
                yield Pipe(ranks, (*cuts[:i], cut, *cuts[i + 1 :]))
    for pattern in list(dict.fromkeys(other.cuts for other in rest if len(other.ranks) == n))[:_FEW]:
        yield Pipe(ranks, pattern)
    yield Pipe(ranks[::-1], tuple(problem.n_layers - cut for cut in reversed(cuts)))
    yield Pipe(ranks[::-1], cuts)
    for i in range(n):
        for j in range(i + 1, n if n <= _SHORT else min(i + 2, n)):
            yield Pipe((*ranks[:i], ranks[j], *ranks[i + 1 : j], ranks[i], *ranks[j + 1 :]), cuts)


def _across(problem: Problem, pipes: Pipes) -> Iterator[tuple[tuple[Pipe, Pipe], tuple[Pipe, Pipe]]]:
    """Exchanges devices between pipelines, where there are few: most pairs of pipelines fit better in another order."""
    if problem.n_devices > _EXCHANGED:
        return
    for a, b in combinations(pipes, 2):
        for i, one in enumerate(a.ranks):
            for j, two in enumerate(b.ranks):
                new = (
                    Pipe((*a.ranks[:i], two, *a.ranks[i + 1 :]), a.cuts),
                    Pipe((*b.ranks[:j], one, *b.ranks[j + 1 :]), b.cuts),
                )
                yield (a, b), new


def _steps(problem: Problem, stages: int) -> list[int]:
    """Returns 1, -1, 2, -2, 4, ... up to half a stage of average length, 2 at least."""
    most = max(2, problem.n_layers // (2 * stages))
    return [sign << k for k in range(most.bit_length()) for sign in (1, -1)]


def _near(foreign: list[int], cut: int) -> list[int]:
    return sorted(foreign, key=lambda c: (abs(c - cut), c))[:_FEW]


def _together(problem: Problem, pipes: Pipes) -> Iterator[tuple[tuple[Pipe, ...], tuple[Pipe, ...]]]:
    """Moves borders that several pipelines share, so that they stay shared."""
    counts: dict[int, int] = {}
    for pipe in pipes:
        for cut in pipe.cuts[1:-1]:
            counts[cut] = counts.get(cut, 0) + 1
    for cut in sorted(c for c, n in counts.items() if n > 1):
        gone = tuple(pipe for pipe in pipes if cut in pipe.cuts[1:-1])
        for step in _steps(problem, max(len(pipe.ranks) for pipe in gone)):
            to = cut + step
            new = tuple(Pipe(p.ranks, tuple(to if c == cut else c for c in p.cuts)) for p in gone)
            if all(a < b for pipe in new for a, b in zip(pipe.cuts, pipe.cuts[1:], strict=False)):
                yield gone, new
