"""The ledger of a run: each quantity that people read has one name, one definition and one place, here (layer P).

The monitor's lines, the tables of the commands, the progress bar, the report, the planner and ``result.json`` ask it.
A step in which all ranks meet has, with c_r own work and w_r from its end to the end of the exchange:

    exchange   min_r w_r          what the rank that comes last sees of it; max_r (c_r + w_r) - max_r c_r of hosts that
                                  do not wait where their devices do (GPUs)
    waiting    the rest of w_r    for slower ranks; in a pipeline its bubbles
    idle       what is not own work: exchange, waiting and rest

A pipeline's exchange is the one that was planned, and all else that is no work is waiting. The stale and the federated
engine have no common end of a step: the least that a rank sees of the server, or of a meeting, is the exchange, and
what is beyond is waiting. A rank without samples rests because that was decided: it waits for nobody.

Device-seconds, waiting and exchange are sums over all steps that all ranks have recorded, start-up included. Times of a
step, shares and speeds are means over the *steady state*: full global batches among the last half of these steps, at
most the last `STEADY` of them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from lightning_hetero.record.run import RecordedRun, RunStep, named
from lightning_hetero.types import SpeedSample

STEADY = 160  # steps
FEW = 10  # steps; fewer are too few to compare
_WARM_UP = 2  # first steps at least that are no measure of the others
_CUT_SHORT = 0.9  # of the others' steps


class Spent(NamedTuple):
    """Where one rank's time went [s]; ``idle_s`` is waiting."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    idle_s: float = 0.0
    rest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return math.fsum(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """One rank in the steady state, means of a step.

    Attributes:
        rank: global rank.
        steps: steps that the figures are of, those made without this rank included.
        samples_per_step: samples that the rank worked on; of a pipeline's stage those of its group.
        share: part of the global batch, in [0, 1]; of a pipeline's stage its group's.
        samples_per_s: samples over own work; None if none was measured.
        compute_s: own work per step [s].
        exchange_s: exchange of gradients per step [s].
        wait_s: waiting per step [s].
    """

    rank: int
    steps: int
    samples_per_step: float
    share: float
    samples_per_s: float | None
    compute_s: float
    exchange_s: float
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLedger:
    """What a run came to. What is not known is NaN, and `problem` says why.

    Attributes:
        ranks: by rank, what its time went into, over all counted steps.
        caused_s: by rank: how long the others waited in steps in which it was the slowest.
        steps: how many were counted.
        early: part of the waiting that was in the first tenth of the steps, of ten steps or more; else 0.
        steady: the steps of the steady state, see above.
        steady_s: the time of each [s]: from its start to the end of the exchange, or, where ranks do not end a step
            together, from the end of one update to that of the next.
        spent: by step of `steady`, what each rank's time of it went into.
        recent: the full batches among the last `STEADY` steps, without the run's first tenth.
        meets: whether all ranks end a step together.
        problem: in words, why there are no figures, e.g. "not known: 3 of 4 ranks' files are missing"; empty: there
            are.
        note: in words, what the figures leave out, e.g. steps that not all ranks have recorded; empty: nothing.
    """

    ranks: Mapping[int, Spent]
    caused_s: Mapping[int, float]
    steps: int
    early: float = 0.0
    steady: tuple[RunStep, ...] = ()
    steady_s: tuple[float, ...] = ()
    spent: tuple[Mapping[int, Spent], ...] = field(default=(), repr=False)
    recent: tuple[RunStep, ...] = ()
    meets: bool = True
    problem: str = ""
    note: str = ""

    @property
    def total(self) -> Spent:
        """Device-seconds in steps, of all ranks together."""
        return Spent(*[math.nan] * 4) if self.problem else total_of(self.ranks.values())

    @property
    def waited(self) -> float:
        """Part of all ranks' time in steps that is waiting."""
        return _part(self.total.idle_s, self.total)

    @property
    def exchange(self) -> float:
        """Part of all ranks' time in steps that is the exchange."""
        return _part(self.total.exchange_s, self.total)

    @property
    def caused(self) -> tuple[int, float]:
        """The rank for which most was waited, and its part of all waiting; (-1, 0): nobody waited."""
        total_s = math.fsum(self.caused_s.values())
        if self.problem or not total_s > 0:
            return -1, 0.0
        rank = max(self.caused_s, key=lambda r: self.caused_s[r])
        return rank, self.caused_s[rank] / total_s

    @property
    def step_s(self) -> float:
        """Time of a step in the steady state [s]."""
        return fmean(self.steady_s) if self.steady_s and not self.problem else math.nan

    @property
    def batch(self) -> int:
        """Samples of a full global batch, the median in the steady state; 0: not known."""
        return round(median(step.samples for step in self.steady)) if self.steady and not self.problem else 0

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second, in the steady state."""
        return self.batch / self.step_s if self.step_s > 0.0 else math.nan

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples that each rank worked on in the last full global batch; empty: none is known."""
        return self.steady[-1].samples_of(len(self.ranks)) if self.steady and not self.problem else ()

    @property
    def too_few(self) -> str:
        """In words, that the run is too short to compare; empty: it is not."""
        return too_few(self.steps)

    @property
    def figures(self) -> list[RankFigures]:
        """Each rank in the steady state; empty where nothing is known."""
        return [] if self.problem or not self.steady else [self._figures(rank) for rank in range(len(self.ranks))]

    def _figures(self, rank: int) -> RankFigures:
        count, batch = len(self.steady), math.fsum(step.samples for step in self.steady)
        samples = [step.samples_of(len(self.ranks))[rank] for step in self.steady]
        spent = total_of(own[rank] for own in self.spent if rank in own)
        # A step without samples says nothing about the speed: its time is all fixed cost.
        worked_s = math.fsum(own[rank].compute_s for own, n in zip(self.spent, samples, strict=True) if n > 0)
        return RankFigures(
            rank=rank, steps=count, samples_per_step=sum(samples) / count,
            share=sum(samples) / batch if batch > 0 else 0.0,
            samples_per_s=sum(samples) / worked_s if worked_s > 0.0 else None, compute_s=spent.compute_s / count,
            exchange_s=spent.exchange_s / count, wait_s=spent.idle_s / count,
        )  # fmt: skip


def too_few(steps: int) -> str:
    """Returns in words that these steps are too few to compare anything; empty: they are not."""
    many = f"{steps} step{'' if steps == 1 else 's'}"
    return f"{many}: too few to compare, at least {FEW} are needed" if steps < FEW else ""


def total_of(parts: Iterable[Spent]) -> Spent:
    """Returns a sum, by what the time went into."""
    return Spent(*map(math.fsum, zip(Spent(), *parts, strict=True)))


def _part(seconds: float, total: Spent) -> float:
    return seconds / total.total_s if total.total_s > 0 else math.nan if math.isnan(total.total_s) else 0.0


def exchange_alone(waits_s: Sequence[float], ranks: int) -> float:
    """Returns what a rank sees of an exchange when it comes last itself [s]; 0 without steps.

    If all are equal, each comes last in one of R steps: those have its shortest waits, and half of them are shorter
    than the quantile 1 / 2R. A rank that comes last more often has it, too; of the others the least is to be taken.

    Args:
        waits_s: from the end of its own work to the end of the exchange, of each step.
        ranks: R.
    """
    return sorted(waits_s)[len(waits_s) // (2 * ranks)] if waits_s else 0.0


def spent_together(
    turns: Mapping[int, SpeedSample], *, sees_waiting: bool = True, planned: Mapping[str, Any] | None = None
) -> dict[int, Spent]:
    """Returns where each rank's time went in one step in which all meet.

    Args:
        turns: by rank.
        sees_waiting: whether hosts wait where their devices do; on a GPU they do not.
        planned: of a pipeline whose ranks hold different layers, its plan.
    """
    step_s = max(turn.compute_s + turn.wait_s for turn in turns.values())
    exchange_s = step_s - max(turn.compute_s for turn in turns.values())
    if sees_waiting:
        exchange_s = min(turn.wait_s for turn in turns.values())
    if planned:
        exchange_s = min(exchange_s, float(planned.get("sync_s") or 0.0))
    in_groups = {rank for group in (planned or {}).get("groups", ()) for rank in group["ranks"]}
    found: dict[int, Spent] = {}
    for rank, turn in turns.items():
        left_s = (turn.wait_s if sees_waiting else step_s - turn.compute_s) - exchange_s
        works = rank in in_groups if planned else turn.samples > 0
        found[rank] = Spent(turn.compute_s, exchange_s, left_s if works else 0.0, 0.0 if works else left_s)
    return found


def waited_in(spent: Iterable[Mapping[int, Spent]]) -> float:
    """Returns the part of the time of ranks in steps that is waiting, see `RunLedger.waited`; NaN: not measured."""
    total = total_of(own for step in spent for own in step.values())
    return total.idle_s / total.total_s if total.compute_s > 0.0 else math.nan


def idle_in(records: Sequence[SpeedSample]) -> float:
    """Returns the part of the ranks' time that is not their own work, of ranks that do not end a step
    together, or have bubbles; NaN if nothing was measured."""
    work_s, wait_s = math.fsum(r.compute_s for r in records), math.fsum(r.wait_s for r in records)
    return wait_s / (work_s + wait_s) if work_s > 0.0 else math.nan


def spent_in(run: RecordedRun, steps: Iterable[RunStep]) -> Iterator[dict[int, Spent]]:
    """Yields where the ranks' time of each of these steps went."""
    waits: dict[int, list[float]] = {}
    for step in () if run.meets else run.steps:
        for rank, turn in step.turns.items():
            if turn.wait_s > 0.0:  # between two meetings nobody is waited for
                waits.setdefault(rank, []).append(turn.wait_s)
    # The least that a rank sees of a server or of a meeting.
    least_s = min((exchange_alone(own, run.ranks) for own in waits.values()), default=0.0)
    planned = run.plans[-1] if run.staged else None
    for step in steps:
        if run.meets:
            yield spent_together(step.turns, sees_waiting=run.sees_waiting, planned=planned)
        else:
            own_s = {rank: min(turn.wait_s, least_s) for rank, turn in step.turns.items()}
            yield {r: Spent(t.compute_s, own_s[r], t.wait_s - own_s[r]) for r, t in step.turns.items()}


class Tally:
    """Adds up steps as they come, for a `RunLedger`.

    Args:
        ranks: number of them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = {rank: Spent() for rank in range(ranks)}
        self._caused_s = dict.fromkeys(range(ranks), 0.0)
        self._steps = 0
        self._batches = Counter[int]()
        self._last: deque[tuple[RunStep, Mapping[int, Spent]]] = deque(maxlen=STEADY)

    def add(self, step: RunStep, spent: Mapping[int, Spent]) -> float:
        """Counts a step and returns the device-seconds that were waited in it."""
        for rank, own in spent.items():
            self._ranks[rank] = Spent(*[a + b for a, b in zip(self._ranks[rank], own, strict=True)])
        waited_s = math.fsum(own.idle_s for own in spent.values())
        self._caused_s[step.slowest] += waited_s
        self._steps += 1
        self._batches[round(step.samples)] += 1
        self._last.append((step, spent))
        return waited_s

    def ledger(self, run: RecordedRun | None = None, **more: Any) -> RunLedger:
        """Returns what was added up; ``run``: that it is of, where its ranks do not end a step together."""
        usual, meets = {number for number, _ in self._batches.most_common(1)}, run is None or run.meets
        last = list(enumerate(self._last, self._steps - len(self._last)))
        chosen = {n for n, (step, _) in last if round(step.samples) in usual} if run is None or meets else {*run.full}
        full = [(n, *one) for n, one in last if n in chosen]
        full = [one for one in full if one[1].groups == full[-1][1].groups]  # under the last plan
        half = [one for one in full if 2 * one[0] >= self._steps - 1] or full[-1:]
        recent = [one for one in full if one[0] >= max(_WARM_UP, self._steps // 10)] or half
        steps = [step for _, step, _ in half]
        return RunLedger(
            ranks=dict(self._ranks), caused_s=dict(self._caused_s), steps=self._steps, meets=meets,
            steady=tuple(steps), spent=tuple(spent for _, _, spent in half),
            recent=tuple(step for _, step, _ in recent),
            steady_s=tuple([s.step_s for s in steps] if run is None or meets else run.taken_s(steps)), **more,
        )  # fmt: skip


def samples_in(run: RecordedRun, batches: int) -> tuple[int, int]:
    """Returns the samples that a fit of so many global batches has trained on, and those that were wasted.

    A trace need not hold every step, so it is the mean global batch times the batches. 0: not known.
    """
    if run.missing or not run.steps:
        return 0, 0
    wasted = round(math.fsum(named(run.counts.get("discarded")).values()))
    return round(fmean(step.samples for step in run.steps) * batches) - wasted, wasted


def ledger_of(run: RecordedRun) -> RunLedger:
    """Returns a recorded run's ledger."""
    steps = run.complete if run.meets else list(run.steps)
    tally = Tally(run.ranks)
    waited_s = [tally.add(step, spent) for step, spent in zip(steps, spent_in(run, steps), strict=True)]
    total_s = math.fsum(waited_s)
    early = math.fsum(waited_s[: len(waited_s) // 10]) / total_s if total_s > 0.0 else 0.0
    return tally.ledger(run, early=early, problem=_problem(run), note=_note(run, len(steps)))


def _problem(run: RecordedRun) -> str:
    if run.missing:
        gone = len(run.missing)
        return f"not known: {gone} of {run.ranks} ranks' files {'is' if gone == 1 else 'are'} missing"
    if not run.steps:
        return "not known: no rank's own work was measured"
    if run.meets and not run.complete:
        return f"not known: no step was recorded by all {run.ranks} ranks"
    return ""


def _note(run: RecordedRun, counted: int) -> str:
    if counted < len(run.steps):
        return f"{counted} of {len(run.steps)} steps were recorded by all ranks; the others are left out"
    ends = {rank: n + 1 for n, step in enumerate(run.steps) for rank in step.turns}
    if early := [rank for rank in range(run.ranks) if ends.get(rank, 0) < _CUT_SHORT * len(run.steps)]:
        said = ", ".join(f"rank {rank}'s end at step {ends.get(rank, 0)}" for rank in early)
        return f"not all ranks' records are of the whole run of {len(run.steps)} steps: {said}"
    return ""
