"""What each rank spends in each stage of a step, and whether it is one rank, one stage, or all (layer P).

Of a step a trace holds a rank's own work, its waiting, exchange included, and when it was over. So the stages are

    work       forward and backward; also loading and the optimizer's step where an engine counts them as own work
    exchange   what the rank that comes last sees of it: the least waiting of a step. In the stale engine each rank asks
               the server by itself: the least that this rank sees of it. In a federated run: of the meetings
    waiting    the rest of the waiting: for slower ranks, in a pipeline's bubbles, for an assignment
    between    from the end of the step before, less all these: the median, since validation may be in there once
               in a while

Forward and backward are not told apart, nor is loading timed by itself. On a GPU the host does not wait where its
device does: what is between steps is then told for all ranks together, because it would be blamed on the wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

from lightning_hetero.cluster.what_if import exchange_alone
from lightning_hetero.report.run import Run, Step, Turn
from lightning_hetero.report.stages import stages_of
from lightning_hetero.report.verdict import percent, ranks_text
from lightning_hetero.report.waiting import spent_in

__all__ = ["Outlier", "StageTimes", "StepStage", "outliers_of", "stage_answer", "stage_names", "stage_times_of"]

HOT = 1.15  # times the median, as in `scores`
_LITTLE = 0.05  # of a step; less than that is no finding
_MATTERS = 0.03  # of a step; shorter stages do not decide whether a rank is slow in everything
_SHOWN = 0.01  # of a step; a stage that is shorter on every rank is left out
_MUCH = 0.2  # of a step; a stage that all ranks share is named from here on
_TELLING = 100.0  # times the median; beyond, the median is next to nothing
_MOST_NAMED = 6  # ranks in a sentence
_EARLY = 10  # the first of so many steps are left out: a run begins slowly

@dataclass(frozen=True, kw_only=True, slots=True)
class StepStage:
    """A column.

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
        known = _known(self.seconds)
        return median(known) if known else math.nan

    @property
    def ratios(self) -> list[float]:
        """Each rank over the ranks' median (of two ranks, the faster), both over what was expected; NaN: not known."""
        expected = self.expected or (1.0,) * len(self.seconds)
        relative = [s / e if e > 0.0 else math.nan for s, e in zip(self.seconds, expected, strict=True)]
        known = _known(relative)
        middle = median_low(known) if known else math.nan
        return [_over(value, middle) for value in relative]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _over(value: float, base: float) -> float:
    if math.isnan(value) or math.isnan(base):
        return math.nan
    return value / base if base > 0.0 else math.inf if value > 0.0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """The ranks' times in a step.

    Attributes:
        stages: columns.
        steps: how many steps they are means of.
    """

    stages: tuple[StepStage, ...]
    steps: int

    @property
    def step_s(self) -> float:
        """A step of the median rank [s]."""
        rows = zip(*(stage.seconds for stage in self.stages), strict=True)
        known = [math.fsum(_known(row)) for row in rows if _known(row)]
        return median(known) if known else math.nan

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


def outliers_of(times: StageTimes) -> list[Outlier]:
    """Returns the slow ranks, the slowest first."""
    step_s = times.step_s
    own = [(stage, stage.ratios, times.part(stage) >= _MATTERS) for stage in times.stages if stage.own]
    found: list[Outlier] = []
    for rank in range(len(times.stages[0].seconds) if times.stages else 0):
        slow, others, taken_s, usual_s = list[str](), 0, 0.0, 0.0
        for stage, ratios, matters in own:
            seconds, ratio = stage.seconds[rank], ratios[rank]
            if math.isnan(ratio):
                continue
            base_s = seconds / ratio if ratio > 0.0 else seconds
            if ratio > HOT and seconds - base_s > _LITTLE * step_s:
                slow.append(stage.kind)
                taken_s, usual_s = taken_s + seconds, usual_s + base_s
            elif matters:
                others += 1
        if slow:
            found.append(
                Outlier(
                    rank=rank,
                    stages=tuple(slow),
                    everything=not others and len(slow) > 1,
                    only=others > 0,
                    ratio=_over(taken_s, usual_s),
                )
            )
    return sorted(found, key=lambda one: (-one.ratio, one.rank))


# ---- in words -------------------------------------------------------------------------------------------------


def stage_names(run: Run) -> Mapping[str, str]:
    """Returns what the stages are called, by kind."""
    names = {"work": "own work", "exchange": "exchange", "waiting": "waiting", "between": "between steps"}
    if run.engine == "stale":
        names["exchange"] = "server"
    elif run.engine == "federated":
        names |= {"work": "local steps", "exchange": "averaging"}
    elif run.staged:
        names["waiting"] = "bubbles"
    return names


def stage_answer(times: StageTimes, names: Mapping[str, str]) -> str:
    """Returns in a sentence whether it is one rank, one stage, or all; ``names``: of the stages, see `stage_names`."""
    work = times.stages[0]
    common = _common(times, names)
    if not _known(work.ratios):
        return "Ranks hold different layers, which were not measured before the run, so they do not compare."
    if found := outliers_of(times):
        kinds = list(dict.fromkeys((one.stages, one.everything, one.only) for one in found))
        words: list[str] = []
        for kind in kinds[:2]:
            alike = [one for one in found if (one.stages, one.everything, one.only) == kind]
            words.append(_slow(alike, len(work.seconds), names))
        if common is not None and common[0].kind == "exchange":
            words.append(common[1])
        sentence = "; ".join(words) + "."
        return sentence[:1].upper() + sentence[1:]
    if common is not None:
        return f"No rank stands out: {common[1]}."
    told = f"{names['work']} is {percent(times.part(work))} of a step"
    return f"Nothing stands out: ranks take about as long as one another, and {told}."


def _slow(found: Sequence[Outlier], ranks: int, names: Mapping[str, str]) -> str:
    first, many = found[0], len(found) > 1
    who = f"{len(found)} of {ranks} ranks"
    if len(found) <= _MOST_NAMED:
        who = ranks_text(sorted(one.rank for one in found))
    stages = " and ".join(_in(names[kind]) for kind in first.stages)
    where = "in everything" if first.everything else stages + (" only" if first.only else "")
    by = "" if first.ratio > _TELLING else f" ({'up to ' if many else ''}{first.ratio:.1f} times the median)"
    return f"{who} {'are' if many else 'is'} slow {where}{by}"


def _common(times: StageTimes, names: Mapping[str, str]) -> tuple[StepStage, str] | None:
    """Returns the longest stage beside own work, and what to say of it, if it is much of every rank's step."""
    others = [stage for stage in times.stages if stage.kind != "work" and times.part(stage) >= _MUCH]
    if not others:
        return None
    stage = max(others, key=times.part)
    part = f"{percent(times.part(stage))} of a step"
    if stage.kind == "waiting":
        by_turns = names["waiting"] == "waiting" and names["exchange"] == "exchange"
        return stage, f"ranks spend {part} {_in(names['waiting'])}" + (", by turns" if by_turns else "")
    return stage, f"all ranks spend {part} {_in(names[stage.kind])}"


def _in(name: str) -> str:
    special = {"between steps": name, "waiting": name, "server": "at the server", "exchange": "in the exchange"}
    return special.get(name, f"in {name}")


# ---- from a run -----------------------------------------------------------------------------------------------


def stage_times_of(run: Run) -> StageTimes | None:
    """Returns the times of a run; None for one rank or without measured steps."""
    if run.ranks < 2 or not run.steps:
        return None
    planned, steps = list[float](), list(run.steps)
    pipeline = stages_of(run) if run.staged else None
    if pipeline is not None:  # ranks hold different layers: each is compared with its plan, under the last one
        planned = [math.nan] * run.ranks
        for stage in (stage for group in pipeline.groups for stage in group.stages):
            planned[stage.rank] = stage.planned_s
        steps = steps[pipeline.since :] or steps
    steps = steps[len(steps) // _EARLY :]
    spent = _spent(run, steps)
    count = [len(own) for own in spent]
    sums = [tuple(map(math.fsum, zip(*own, strict=True))) or (0.0,) * 3 for own in spent]
    columns = [tuple(s[i] / n if n else math.nan for s, n in zip(sums, count, strict=True)) for i in range(3)]
    stages = (
        StepStage(kind="work", own=True, seconds=columns[0], expected=tuple(planned)),
        StepStage(kind="exchange", own=not run.meets, seconds=columns[1]),
        StepStage(kind="waiting", own=False, seconds=columns[2]),
        StepStage(kind="between", own=_sees_waiting(run), seconds=_between(run, steps)),
    )
    all_s = StageTimes(stages=stages, steps=len(steps)).step_s
    shown = tuple(s for s in stages if s.kind == "work" or max(_known(s.seconds), default=0.0) > _SHOWN * all_s)
    return StageTimes(stages=shown, steps=len(steps))


def _sees_waiting(run: Run) -> bool:
    """Whether the hosts wait where their devices do: only then is a rank's time between steps its own."""
    return all(run.devices.get(rank, "").rpartition(" ")[2].startswith("cpu") for rank in range(run.ranks))


def _works(run: Run, turn: Turn) -> bool:
    """Whether a rank has worked in a step; of a pipeline only the first stage has samples."""
    return turn.samples > 0 or (run.staged and turn.compute_s > 0.0)


def _spent(run: Run, steps: Sequence[Step]) -> list[list[tuple[float, float, float]]]:
    """Returns by rank work, exchange and waiting of each step in which it worked [s]."""
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(run.ranks)]
    least_s = _least_s(run, steps)
    for step in steps:
        working = {rank: turn for rank, turn in step.turns.items() if _works(run, turn)}
        if least_s:
            exchange_s = {r: min(t.wait_s, least_s.get(r, 0.0)) for r, t in working.items()}
            waiting_s = {r: t.wait_s - exchange_s[r] for r, t in working.items()}
        elif _sees_waiting(run):
            common_s = min((t.wait_s for t in step.turns.values()), default=0.0)
            if run.staged:
                common_s = min(common_s, float(run.plans[-1].get("sync_s") or 0.0))
            exchange_s = dict.fromkeys(working, common_s)
            waiting_s = {r: t.wait_s - common_s for r, t in working.items()}
        else:
            told = spent_in(run, step)
            exchange_s = {r: told[r].exchange_s for r in working}
            waiting_s = {r: told[r].idle_s for r in working}
        for rank, turn in working.items():
            found[rank].append((turn.compute_s, exchange_s[rank], waiting_s[rank]))
    return found


def _least_s(run: Run, steps: Sequence[Step]) -> Mapping[int, float]:
    """Returns by rank the least that it sees of a server or of a meeting [s]; empty where steps end together."""
    if run.meets and run.engine != "federated":
        return {}
    waits: dict[int, list[float]] = {rank: [] for rank in range(run.ranks)}
    for step in steps:
        for rank, turn in step.turns.items():
            if turn.wait_s > 0.0:  # between two meetings nobody is waited for
                waits[rank].append(turn.wait_s)
    least_s = {rank: exchange_alone(own, run.ranks) for rank, own in waits.items()}
    if run.meets:
        least_s = dict.fromkeys(least_s, min((least_s[rank] for rank, own in waits.items() if own), default=0.0))
    return least_s


def _between(run: Run, steps: Sequence[Step]) -> tuple[float, ...]:
    """Returns by rank the median time between two steps [s]; NaN where no two steps follow one another."""
    gaps: list[list[float]] = [[] for _ in range(run.ranks)]
    alone = _sees_waiting(run)
    for before, step in pairwise(steps):
        if (before.epoch, before.index + 1) != (step.epoch, step.index):
            continue
        for rank, turn in step.turns.items():
            if rank not in before.turns or not _works(run, turn):
                continue
            own_s = turn.compute_s + turn.wait_s if alone or not run.meets else step.step_s
            gaps[rank].append(turn.end_s - before.turns[rank].end_s - own_s)
    return tuple(max(0.0, median(own)) if own else math.nan for own in gaps)
