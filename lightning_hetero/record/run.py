"""From the events of a trace to one run: steps of all ranks on one clock, the ledger of every figure (layer P).

Ranks open their traces at different moments, perhaps on different hosts. Where all ranks meet in a step's exchange of
gradients, its end is the same moment for all, and clocks are set by it (the median over the steps). Else, in the stale
and the federated engine, the hosts' clocks are believed. The time between two fits of a resumed run is not shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, cast

from lightning_hetero.record import speed_sample
from lightning_hetero.types import Event, SpeedSample

_APART = ("stale", "federated")  # engines whose ranks do not end a step together
_COMPARED = 3  # batches before and after a change
_SHORT = 0.9  # of the usual batch; an epoch's last one that is smaller is not full
_ADDED = ("samples", "compute_s", "wait_s", "work")  # of several contributions to one step


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn(SpeedSample):
    """What one rank did in one step; several contributions to one step are added up.

    Attributes:
        end_s: when it was over, on the run's clock.
        parts: the contributions, where there were several; their clock is that of the rank's trace.
    """

    end_s: float
    parts: tuple[Turn, ...] = ()

    @property
    def begin_s(self) -> float:
        """When its work began, on the run's clock."""
        if self.parts:
            return self.end_s - (self.parts[-1].end_s - self.parts[0].begin_s)
        return self.end_s - self.wait_s - self.compute_s

    def slices(self, waits_s: Mapping[str, float]) -> Iterator[tuple[Turn, str, float, float]]:
        """Yields what it did, in order: contribution, ``work`` or a kind of waiting, from, to [s].

        Args:
            waits_s: how long it waited in all, by kind; each contribution has its part of each.
        """
        parts = self.parts or (self,)
        for part in parts:
            at_s = part.begin_s + self.end_s - parts[-1].end_s
            scale = 1.0 if len(parts) == 1 else part.wait_s / self.wait_s if self.wait_s > 0.0 else 0.0
            for kind, seconds in {"work": part.compute_s, **{k: scale * s for k, s in waits_s.items()}}.items():
                if seconds > 0.0:
                    yield part, kind, at_s, at_s + seconds
                    at_s += seconds

    @property
    def items(self) -> float:
        """Work where it is counted, else samples."""
        return self.samples if math.isnan(self.work) else self.work


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One step of the run; ``turns`` by rank, of those that took part.

    Attributes:
        groups: of a pipeline, ranks that are stages of one group, so that they work on the same samples.
    """

    epoch: int
    index: int
    turns: Mapping[int, Turn]
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def samples(self) -> float:
        """The samples of all ranks."""
        return math.fsum(turn.samples for turn in self.turns.values())

    @property
    def step_s(self) -> float:
        """The time from its start to the end of its exchange, by the rank that took longest [s]."""
        return max(turn.compute_s + turn.wait_s for turn in self.turns.values())

    @property
    def end_s(self) -> float:
        """When the last rank was done, on the run's clock."""
        return max(turn.end_s for turn in self.turns.values())

    @property
    def slowest(self) -> int:
        """The rank with the most work."""
        return max(self.turns, key=lambda rank: self.turns[rank].compute_s)

    def samples_of(self, ranks: int) -> tuple[int, ...]:
        """Returns what each of so many ranks worked on; 0: it took no part."""
        own = [round(self.turns[rank].samples) if rank in self.turns else 0 for rank in range(ranks)]
        for group in self.groups:  # only a group's first stage is told its samples
            for rank in group:
                own[rank] = own[group[0]]
        return tuple(own)


def following(steps: Iterable[RunStep]) -> list[tuple[RunStep, RunStep]]:
    """Returns each step that comes right behind another one of its epoch, after that one."""
    return [(a, b) for a, b in pairwise(steps) if (a.epoch, a.index + 1) == (b.epoch, b.index)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChange:
    """A decision that changed shares or plan.

    Attributes:
        step: number of the step, from 0, whose batch it was decided in.
        reason: in words.
        shares: samples per rank from then on; empty where the decision is a plan.
        kind: of a controller's decision; else empty.
        predicted_gain: part of a batch's time that was to be saved; NaN: not said.
        realised_gain: the same, measured; NaN: not known.
        cancelled: why it never came into force; empty: it did.
        plan: of pipelines, plain; empty where shares are.
    """

    step: int
    reason: str
    shares: tuple[int, ...] = ()
    kind: str = ""
    predicted_gain: float = math.nan
    realised_gain: float = math.nan
    cancelled: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run, as its trace tells it.

    Attributes:
        name: for people.
        engine: ``ddp``, ``balanced``, ``stale``, ``pipeline``; another stock strategy by its class.
        ranks: number of them.
        devices: their names, by rank, as far as known.
        steps: with what was measured in them; empty if own work was not measured.
        batches: number of steps, those without such a measurement included.
        changes: in order.
        queues: by step number: batches' budget overspent, by constraint.
        metrics: by step number: what the run logged, e.g. its losses, by name.
        counts: what the stale engine's server had counted when it was last asked.
        plan: what a pipeline run began with: plan, cluster, profile; empty elsewhere.
        about: what else the trace's first line said, e.g. policy and bound.
        faults: what happened, in words.
    """

    name: str
    engine: str
    ranks: int
    devices: Mapping[int, str] = field(default_factory=dict[int, str])
    steps: tuple[RunStep, ...] = ()
    batches: int = 0
    changes: tuple[RunChange, ...] = ()
    queues: tuple[tuple[int, Mapping[str, float]], ...] = ()
    metrics: tuple[tuple[int, Mapping[str, float]], ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    faults: tuple[str, ...] = ()

    @property
    def meets(self) -> bool:
        """Whether all ranks end a step together."""
        return self.engine not in _APART

    @property
    def complete(self) -> list[RunStep]:
        """Steps in which all ranks took part."""
        return [step for step in self.steps if len(step.turns) == self.ranks]

    def taken_s(self, steps: Sequence[RunStep] | None = None) -> list[float]:
        """Returns what steps took from the end of the one before, within an epoch [s]: loading, the optimizer and all
        else are in it. Without two steps one behind the other, what was measured of each."""
        chosen = self.steps if steps is None else steps
        taken = [step.end_s - before.end_s for before, step in following(chosen) if step.end_s > before.end_s]
        return taken or [step.step_s for step in chosen]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of whom the trace has nothing: their files are missing."""
        found = {*self.devices, *(rank for step in self.steps for rank in step.turns)}
        return tuple(rank for rank in range(self.ranks) if rank not in found)

    @property
    def full(self) -> list[int]:
        """Numbers of the steps on a full global batch. Without a common end of a step ranks' samples do not add up to
        the same number in each; what is less than the others is then the end of an epoch."""
        if self.meets:
            counts = Counter(round(step.samples) for step in self.complete).most_common(1)
            return [n for n, s in enumerate(self.steps) if counts and round(s.samples) == counts[0][0]]
        usual = median([step.samples for step in self.steps]) if self.steps else 0.0
        last = {step.epoch: n for n, step in enumerate(self.steps)}
        short = {n for n in last.values() if self.steps[n].samples < _SHORT * usual}
        return [n for n in range(len(self.steps)) if n not in short]

    @property
    def sees_waiting(self) -> bool:
        """Whether hosts wait where their devices do; on a GPU they do not."""
        return all(self.devices.get(rank, "").rpartition(" ")[2].startswith("cpu") for rank in range(self.ranks))

    def outcomes(self) -> list[RunChange]:
        """Returns the changes with what they gave, as far as it is known.

        A controller measures that while it runs. Else it is measured here in the same way: the first batches under the
        new shares against the last ones before. Batches that are not full take less, whatever was decided.
        """
        numbers = self.full
        ran = [self.steps[number].samples_of(self.ranks) for number in numbers]
        taken_s = [self.steps[number].step_s for number in numbers]
        found: list[RunChange] = []
        for change in self.changes:
            places = range(1, len(numbers) - _COMPARED + 1)
            begins = (at for at in places if numbers[at] >= change.step and ran[at] == change.shares != ran[at - 1])
            if change.shares and math.isnan(change.realised_gain) and (at := next(begins, 0)):
                before_s, after_s = median(taken_s[max(0, at - _COMPARED) : at]), median(taken_s[at : at + _COMPARED])
                change = replace(change, realised_gain=1.0 - after_s / before_s)
            found.append(change)
        return found

    @property
    def staged(self) -> bool:
        """Whether ranks hold different parts of the model, so that their times do not compare."""
        return any(len(group["ranks"]) > 1 for plan in self.plans for group in plan.get("groups", ()))

    @property
    def plans(self) -> list[Mapping[str, Any]]:
        """Plans that came into force, the first one first; of pipelines only."""
        first = [self.plan["plan"]] if self.plan else []
        return [*first, *(change.plan for change in self.changes if change.plan and not change.cancelled)]


def named(value: Any) -> Mapping[str, Any]:
    """Returns what is a mapping in JSON, or an empty one for None."""
    return cast("Mapping[str, Any]", value or {})


def run_of(events: Iterable[Event], *, name: str = "") -> RecordedRun:
    """Returns the run of a trace, see `lightning_hetero.record.read_events`.

    Raises:
        ValueError: there is no ``run`` line among the events.
    """
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    by_rank = dict(sorted(by_rank.items()))
    lines = {rank: [event.data for event in own if event.kind == "run"] for rank, own in by_rank.items()}
    opened = {rank: found for rank, found in lines.items() if found}
    if not opened:
        raise ValueError("the trace has no 'run' line: give the events of read_events")
    about = {key: value for data in opened[min(opened)] for key, value in data.items()}
    strategy = str(about.get("strategy") or "")
    engine = str(about.get("engine") or ("ddp" if strategy in ("DDPStrategy", "") else strategy))
    turns: dict[tuple[int, int], dict[int, Turn]] = {}
    for rank, own in by_rank.items():
        for tag, turn in _turns(own).items():
            turns.setdefault(tag, {})[rank] = turn
    number = {tag: n for n, tag in enumerate(sorted(turns))}
    changes = tuple(_changes(by_rank, number))
    plans = [(_number(event, number) - 1, named(event.data.get("plan"))) for event in _of_kind(by_rank, "plan")]
    plans += [(change.step, change.plan) for change in changes if change.plan and not change.cancelled]
    plans.sort(key=lambda one: one[0])
    steps = [RunStep(epoch=e, index=i, turns=turns[e, i], groups=_groups(plans, n)) for (e, i), n in number.items()]

    def last(kind: str) -> Mapping[str, Any]:
        return next((event.data for event in reversed(_of_kind(by_rank, kind))), named(None))

    clocks = {rank: float(found[0].get("unix_s") or math.nan) for rank, found in opened.items()}
    return RecordedRun(
        name=name, engine=engine,
        ranks=max(int(data.get("world_size") or 1) for found in opened.values() for data in found),
        devices={rank: ", ".join(map(str, found[-1].get("names") or ())) for rank, found in opened.items()},
        steps=tuple(_on_one_clock(steps, clocks, meets=engine not in _APART)),
        batches=len({(e.epoch, e.step) for own in by_rank.values() for e in own if e.kind == "step"}),
        changes=changes,
        queues=tuple(
            (_number(event, number), {str(name): float(value) for name, value in queues.items()})
            for event in _of_kind(by_rank, "queue", "decision")
            if (queues := named(event.data.get("queues")))
        ),
        metrics=tuple((_number(e, number), _numbers(e.data)) for e in _of_kind(by_rank, "metrics")) if steps else (),
        counts=last("server"), plan=last("plan"), about=about,
        faults=tuple(f"rank {e.rank}: {e.data.get('error')}" for e in _of_kind(by_rank, "fault")),
    )  # fmt: skip


def _groups(plans: Sequence[tuple[int, Mapping[str, Any]]], number: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of the plan that a step is under; a plan is decided in the step before its first one."""
    in_force = [plan for step, plan in plans if step < number]
    return tuple(tuple(group["ranks"]) for group in in_force[-1].get("groups", ())) if in_force else ()


def _of_kind(by_rank: Mapping[int, Sequence[Event]], *kinds: str) -> list[Event]:
    """Returns events of these kinds in order; what all ranks have noted is the lowest rank's."""
    found: dict[tuple[str, int, int, int], Event] = {}
    for rank, events in by_rank.items():
        nth = Counter[tuple[str, int, int]]()
        for event in events:
            if event.kind in kinds:
                tag = (event.kind, event.epoch, event.step)
                nth[tag] += 1
                found.setdefault((*tag, nth[tag] if event.kind != "fault" else -rank - 1), event)
    return sorted(found.values(), key=lambda e: (e.epoch, e.step))


def _turns(events: Sequence[Event]) -> dict[tuple[int, int], Turn]:
    """Returns one rank's turns by (epoch, step). If a step was made twice, before and after a resume, the second one
    counts; but several contributions to one step, which the stale engine marks, add up."""
    found: dict[tuple[int, int], Turn] = {}
    shift_s = last_s = 0.0
    for event in events:
        sample = speed_sample(event)
        if sample is None:
            continue
        if event.t_s + shift_s < last_s:  # another fit, whose clock begins again
            shift_s = last_s - event.t_s + sample.compute_s
        last_s = event.t_s + shift_s
        turn, tag = Turn(**asdict(sample), end_s=last_s), (event.epoch, event.step)
        if (before := found.get(tag)) is not None and event.data.get("fill_in"):
            sums = {part: getattr(before, part) + getattr(turn, part) for part in _ADDED}
            turn = replace(turn, **sums, parts=(*(before.parts or (before,)), turn))
        found[tag] = turn
    return found


def _on_one_clock(steps: Sequence[RunStep], opened: Mapping[int, float], *, meets: bool) -> Iterable[RunStep]:
    ranks = sorted({rank for step in steps for rank in step.turns})
    ahead: dict[int, float] = {}
    for rank in ranks:
        first = ranks[0]
        known = opened.get(first, math.nan) - opened.get(rank, math.nan)
        both = [s.turns[rank].end_s - s.turns[first].end_s for s in steps if rank in s.turns and first in s.turns]
        ahead[rank] = median(both) if both and (meets or math.isnan(known)) else 0.0 if math.isnan(known) else known
    begin_s = min((t.begin_s - ahead[rank] for s in steps for rank, t in s.turns.items()), default=0.0)
    for step in steps:
        moved = {r: replace(turn, end_s=turn.end_s - ahead[r] - begin_s) for r, turn in step.turns.items()}
        yield replace(step, turns=moved)


def _numbers(values: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns what are numbers; null stands for NaN and infinity."""
    return {n: math.nan if v is None else float(v) for n, v in values.items() if isinstance(v, int | float | None)}


def _number(event: Event, number: Mapping[tuple[int, int], int]) -> int:
    """Returns the number of the event's step, or of the last one before it."""
    tag = (event.epoch, event.step)
    return number[tag] if tag in number else max((n for other, n in number.items() if other < tag), default=0)


def _changes(by_rank: Mapping[int, Sequence[Event]], number: Mapping[tuple[int, int], int]) -> Iterable[RunChange]:
    realised = {event.data.get("generation"): event.data.get("realised_gain") for event in _of_kind(by_rank, "outcome")}
    for event in _of_kind(by_rank, "decision"):
        data = event.data
        gains = data.get("predicted_gain"), realised.get(data.get("generation"))
        predicted, given = (math.nan if gain is None else float(gain) for gain in gains)
        words = {name: str(data.get(name) or "") for name in ("reason", "kind", "cancelled")}
        step, shares, plan = _number(event, number), tuple(map(int, data.get("shares") or ())), named(data.get("plan"))
        yield RunChange(step=step, shares=shares, plan=plan, predicted_gain=predicted, realised_gain=given, **words)
