"""The ranks' time by what it went into, whom they waited for, and the stages of a step they are slow in (layer P).

A step in which all ranks meet has, with c_r own work and w_r waiting, exchange included:

    exchange   min_r w_r          what the rank that comes last sees of it; max_r (c_r + w_r) - max_r c_r of hosts that
                                  do not wait where their devices do (GPUs)
    idle       the rest of w_r    for slower ranks; in a pipeline its bubbles

A pipeline's exchange is the one that was planned, and all else that is no work is idle. The stale and the federated
engine have no common end of a step: the least that a rank sees of the server, or of a meeting, is the exchange, and
what is beyond is waiting. A rank without samples rests because that was decided: it waits for nobody.

The stages of a step are these and *between*: from the end of the step before, less all these; the median, since
validation may be in there once in a while. Forward and backward are not told apart, nor is loading timed by itself. On
a GPU what is between steps is told for all ranks together, because it would be blamed on the wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Any, NamedTuple

from lightning_hetero.cluster.score import exchange_alone
from lightning_hetero.record.run import RecordedRun, RunStep, Turn

HOT = 1.15  # times what it is compared with, from which on a rank is slow
_LITTLE = 0.05  # of a step; less than that is no finding
_MATTERS = 0.03  # of a step; shorter stages do not decide whether a rank is slow in everything
_SHOWN = 0.01  # of a step; a stage that is shorter on every rank is left out
_EARLY = 10  # the first of so many steps are left out: a run begins slowly


class Spent(NamedTuple):
    """Where one rank's time went [s]."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    idle_s: float = 0.0
    rest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return math.fsum(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Sums over the steps of a run.

    Attributes:
        ranks: what each rank's time went into.
        caused_s: by rank: how long the others idled in steps in which it was the slowest.
        steps: how many.
        early: part of the waiting that was in the first tenth of the steps, of ten steps or more; else 0.
    """

    ranks: Mapping[int, Spent]
    caused_s: Mapping[int, float]
    steps: int
    early: float = 0.0

    @property
    def total(self) -> Spent:
        return _sum(self.ranks.values())

    @property
    def waited(self) -> float:
        """Part of all ranks' time that is waiting."""
        return self._part(self.total.idle_s)

    @property
    def exchange(self) -> float:
        """Part of all ranks' time that is the exchange."""
        return self._part(self.total.exchange_s)

    def _part(self, seconds: float) -> float:
        return seconds / self.total.total_s if self.total.total_s > 0 else 0.0

    @property
    def caused(self) -> tuple[int, float]:
        """The rank for which most was waited, and its part of all waiting; (-1, 0): nobody waited."""
        total_s = math.fsum(self.caused_s.values())
        if not total_s > 0:
            return -1, 0.0
        rank = max(self.caused_s, key=lambda r: self.caused_s[r])
        return rank, self.caused_s[rank] / total_s


def _sum(parts: Iterable[Spent]) -> Spent:
    return Spent(*map(math.fsum, zip(*parts, strict=True)))


def spent_in(run: RecordedRun, steps: Iterable[RunStep]) -> Iterator[dict[int, Spent]]:
    """Yields where the ranks' time of each of these steps went."""
    waits: dict[int, list[float]] = {}
    for step in () if run.meets else run.steps:
        for rank, turn in step.turns.items():
            if turn.wait_s > 0.0:  # between two meetings nobody is waited for
                waits.setdefault(rank, []).append(turn.wait_s)
    # The least that a rank sees of a server or of a meeting.
    least_s = min((exchange_alone(own, run.ranks) for own in waits.values()), default=0.0)
    planned: Mapping[str, Any] = run.plans[-1] if run.staged else {}
    in_groups = {rank for group in planned.get("groups", ()) for rank in group["ranks"]}
    for step in steps:
        exchange_s = step.step_s - max(turn.compute_s for turn in step.turns.values())
        if run.sees_waiting:
            exchange_s = min(turn.wait_s for turn in step.turns.values())
        if planned:
            exchange_s = min(exchange_s, float(planned.get("sync_s") or 0.0))
        found: dict[int, Spent] = {}
        for rank, turn in step.turns.items():
            waited_s = turn.wait_s if run.sees_waiting or not run.meets else step.step_s - turn.compute_s
            own_s = exchange_s if run.meets else min(turn.wait_s, least_s)
            works = not run.meets or (rank in in_groups if planned else turn.samples > 0)
            left_s = waited_s - own_s
            found[rank] = Spent(turn.compute_s, own_s, left_s if works else 0.0, 0.0 if works else left_s)
        yield found


def waiting_of(run: RecordedRun) -> Waiting:
    """Returns the sums over all steps in which more than one rank took part."""
    chosen = [step for step in run.steps if len(step.turns) > 1 or run.ranks == 1]
    parts: dict[int, list[Spent]] = {rank: [] for rank in range(run.ranks)}
    caused_s = dict.fromkeys(range(run.ranks), 0.0)
    waited: list[float] = []
    for step, spent in zip(chosen, spent_in(run, chosen), strict=True):
        for rank, own in spent.items():
            parts[rank].append(own)
        waited.append(math.fsum(one.idle_s for one in spent.values()))
        caused_s[step.slowest] += waited[-1]
    total_s = math.fsum(waited)
    return Waiting(
        ranks={rank: _sum(own) for rank, own in parts.items()},
        caused_s=caused_s,
        steps=len(chosen),
        early=math.fsum(waited[: len(waited) // 10]) / total_s if total_s > 0.0 else 0.0,
    )


# ---- the stages of a step -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStage:
    """What each rank spends in one stage of a step.

    Attributes:
        kind: ``work``, ``exchange``, ``waiting`` or ``between``.
        own: whether the time is the rank's own doing, so that ranks compare; the rank that waits is not the slow one.
        seconds: by rank, mean of a step [s]; NaN: the rank has not worked, or it is not known.
        expected: by rank, what ranks should take beside one another; empty: all the same.
    """

    kind: str
    own: bool
    seconds: tuple[float, ...]
    expected: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        """Over the ranks [s]."""
        return of_known(median, self.seconds)

    @property
    def ratios(self) -> list[float]:
        """Each rank over the ranks' median (of two ranks, the faster), both over what was expected; NaN: not known."""
        expected = self.expected or (1.0,) * len(self.seconds)
        relative = [s / e if e > 0.0 else math.nan for s, e in zip(self.seconds, expected, strict=True)]
        middle = of_known(median_low, relative)
        return [over(value, middle) for value in relative]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStages:
    """The ranks' times in a step, means over so many ``steps``."""

    stages: tuple[StepStage, ...]
    steps: int

    @property
    def step_s(self) -> float:
        """A step of the median rank [s]."""
        rows = zip(*(stage.seconds for stage in self.stages), strict=True)
        return of_known(median, [math.fsum(_known(row)) if _known(row) else math.nan for row in rows])

    def part(self, stage: StepStage) -> float:
        """Returns a stage's part of a step, by the ranks' median."""
        return stage.median_s / self.step_s if self.step_s > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A slow rank.

    Attributes:
        rank: which.
        stages: kinds in which it is slow.
        everything: whether these are all own stages that matter, and more than one.
        only: whether it is not slow in another own stage that matters.
        ratio: of the time in these stages over the median ranks'.
    """

    rank: int
    stages: tuple[str, ...]
    everything: bool
    only: bool
    ratio: float


def step_stages_of(run: RecordedRun, planned_s: Sequence[float] = (), since: int = 0) -> StepStages | None:
    """Returns the times of a run; None for one rank or without measured steps.

    Args:
        run: the run.
        planned_s: of a pipeline, whose ranks hold different layers: what each rank's work was planned to take.
        since: number of the first step under that plan.
    """
    if run.ranks < 2 or not run.steps:
        return None
    steps = list(run.steps[since:] or run.steps)
    steps = steps[len(steps) // _EARLY :]
    rows = [list[Spent]() for _ in range(run.ranks)]
    for step, spent in zip(steps, spent_in(run, steps), strict=True):
        for rank, own in spent.items():
            if _works(run, step.turns[rank]):
                rows[rank].append(own)
    means = [[total / len(own) for total in _sum(own)] if own else [math.nan] * 4 for own in rows]
    work, exchange, idle, _ = zip(*means, strict=True)
    stages = (
        StepStage(kind="work", own=True, seconds=work, expected=tuple(planned_s)),
        StepStage(kind="exchange", own=False, seconds=exchange),
        StepStage(kind="waiting", own=False, seconds=idle),
        StepStage(kind="between", own=run.sees_waiting, seconds=_between(run, steps)),
    )
    all_s = StepStages(stages=stages, steps=len(steps)).step_s
    shown = [s for s in stages if s.kind == "work" or max(_known(s.seconds), default=0.0) > _SHOWN * all_s]
    return StepStages(stages=tuple(shown), steps=len(steps))


def _works(run: RecordedRun, turn: Turn) -> bool:
    """Whether a rank has worked in a step; of a pipeline only the first stage has samples."""
    return turn.samples > 0 or (run.staged and turn.compute_s > 0.0)


def _between(run: RecordedRun, steps: Sequence[RunStep]) -> tuple[float, ...]:
    """Returns by rank the median time between two steps [s]; NaN where no two steps follow one another."""
    gaps: list[list[float]] = [[] for _ in range(run.ranks)]
    for before, step in pairwise(steps):
        if (before.epoch, before.index + 1) == (step.epoch, step.index):
            for rank, turn in step.turns.items():
                if rank in before.turns and _works(run, turn):
                    own_s = turn.compute_s + turn.wait_s if run.sees_waiting or not run.meets else step.step_s
                    gaps[rank].append(turn.end_s - before.turns[rank].end_s - own_s)
    return tuple(max(0.0, median(own)) if own else math.nan for own in gaps)


def outliers_of(times: StepStages) -> list[Outlier]:
    """Returns the slow ranks, the slowest first."""
    step_s = times.step_s
    own = [(stage, stage.ratios, times.part(stage) >= _MATTERS) for stage in times.stages if stage.own]
    found: list[Outlier] = []
    for rank in range(len(times.stages[0].seconds)):
        slow, others, taken_s, usual_s = list[str](), 0, 0.0, 0.0
        for stage, ratios, matters in own:
            seconds, ratio = stage.seconds[rank], ratios[rank]
            base_s = seconds / ratio if ratio > 0.0 else seconds
            if ratio > HOT and seconds - base_s > _LITTLE * step_s:
                slow.append(stage.kind)
                taken_s, usual_s = taken_s + seconds, usual_s + base_s
            elif matters and not math.isnan(ratio):
                others += 1
        if slow:
            all_of_them, ratio = not others and len(slow) > 1, over(taken_s, usual_s)
            found.append(
                Outlier(rank=rank, stages=tuple(slow), everything=all_of_them, only=others > 0, ratio=ratio)
            )
    return sorted(found, key=lambda one: (-one.ratio, one.rank))


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def of_known(average: Callable[[list[float]], float], values: Iterable[float]) -> float:
    """Returns an average of what is no NaN; NaN where nothing is known."""
    known = _known(values)
    return average(known) if known else math.nan


def over(value: float, base: float) -> float:
    """Returns a ratio; NaN where either is not known."""
    if math.isnan(value) or math.isnan(base):
        return math.nan
    return value / base if base > 0.0 else math.inf if value > 0.0 else 1.0
