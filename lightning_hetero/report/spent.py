"""The stages of a step, and the ranks that are slow in them (layer P). Waiting and exchange: `record.ledger`.

The stages are own work, exchange, waiting, and *between*: from the end of the step before, less all these; the median,
since validation may be in there once in a while. Forward and backward are not separated, nor is loading timed
separately. On a GPU what is between steps is given for all ranks together, because it would be blamed on the wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median, median_low

from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun, RunStep, following

HOT = 1.15  # times what it is compared with, from which on a rank is slow
_LITTLE = 0.05  # of a step; less than that is no finding
_MATTERS = 0.03  # of a step; shorter stages do not decide whether a rank is slow in everything
_SHOWN = 0.01  # of a step; a stage that is shorter on every rank is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStage:
    """What each rank spends in one stage of a step.

    Attributes:
        kind: ``work``, ``exchange``, ``waiting`` or ``between``.
        own: whether the time is the rank's own doing, so that ranks compare; the rank that waits is not the slow one.
        seconds: by rank, mean of a step [s]; NaN: the rank has not worked, or it is not known.
        expected: by rank, what ranks should take relative to each other; empty: all the same.
    """

    kind: str
    own: bool
    seconds: tuple[float, ...]
    expected: tuple[float, ...] = ()

    @property
    def ratios(self) -> list[float]:
        """Each rank over the ranks' median (of two ranks, the faster), both over what was expected; NaN: not known."""
        expected = self.expected or (1.0,) * len(self.seconds)
        relative = [s / e if e > 0.0 else math.nan for s, e in zip(self.seconds, expected, strict=True)]
        middle = of_known(median_low, relative)
        return [over(value, middle) for value in relative]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStages:
    """The ranks' times in a step, means over so many ``steps``; ``parts``: of the ledger, by kind of stage."""

    stages: tuple[StepStage, ...]
    steps: int
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def step_s(self) -> float:
        """A step of the median rank [s]."""
        rows = zip(*(stage.seconds for stage in self.stages), strict=True)
        return of_known(median, [math.fsum(_known(row)) if _known(row) else math.nan for row in rows])

    def part(self, stage: StepStage) -> float:
        """Returns a stage's part of all ranks' time in steps; *between* steps, of that and what is between."""
        every = math.fsum(_known(value for one in self.stages for value in one.seconds))
        return self.parts.get(stage.kind, math.fsum(_known(stage.seconds)) / every if every > 0.0 else 0.0)


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


def step_stages_of(run: RecordedRun, ledger: RunLedger, planned_s: Sequence[float] = ()) -> StepStages | None:
    """Returns the times of a run in its steady state; None for one rank, or where they are not known.

    Args:
        run: the run.
        ledger: its ledger.
        planned_s: of a pipeline, whose ranks hold different layers: what each rank's work was planned to take.
    """
    if run.ranks < 2 or not ledger.figures:
        return None
    worked = [f for f in ledger.figures if f.samples_per_step > 0.0 and f.compute_s > 0.0]
    told = {f.rank: (f.compute_s, f.exchange_s, f.wait_s) for f in worked}
    work, exchange, waiting = zip(*(told.get(rank, (math.nan,) * 3) for rank in range(run.ranks)), strict=True)
    between = _between(run, ledger.steady, {f.rank for f in worked})
    stages = (
        StepStage(kind="work", own=True, seconds=work, expected=tuple(planned_s)),
        StepStage(kind="exchange", own=False, seconds=exchange),
        StepStage(kind="waiting", own=False, seconds=waiting),
        StepStage(kind="between", own=run.sees_waiting, seconds=between),
    )
    all_s = StepStages(stages=stages, steps=len(ledger.steady)).step_s
    shown = [s for s in stages if s.kind == "work" or max(_known(s.seconds), default=0.0) > _SHOWN * all_s]
    parts = {"work": 1.0 - ledger.idle, "exchange": ledger.exchange, "waiting": ledger.waited}
    return StepStages(stages=tuple(shown), steps=len(ledger.steady), parts=parts)


def _between(run: RecordedRun, steps: Sequence[RunStep], ranks: Set[int]) -> tuple[float, ...]:
    """Returns by rank the median time between two steps [s]; NaN where no two steps follow one another."""
    gaps: list[list[float]] = [[] for _ in range(run.ranks)]
    for before, step in following(steps):
        for rank in ranks & before.turns.keys() & step.turns.keys():
            turn = step.turns[rank]
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
            found.append(Outlier(rank=rank, stages=tuple(slow), everything=all_of_them, only=others > 0, ratio=ratio))
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
