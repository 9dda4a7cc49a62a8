"""From the events of a trace to one run: steps of all ranks on one clock, the ledger of every figure (layer P).

Ranks open their traces at different moments, perhaps on different hosts. Where all ranks meet in a step's exchange of
gradients, its end is the same moment for all, and clocks are set by it (the median over the steps). Else, in the stale
and the federated engine, the hosts' clocks are believed. The time between two fits of a resumed run is not shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, cast

from lightning_hetero.types import Event, SpeedSample

_APART = ("stale", "federated")  # engines whose ranks do not end a step together
_COMPARED = 3  # batches before and after a change


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one rank did in one step.

    Attributes:
        samples: that it computed on; several contributions to one step are added up.
        compute_s, wait_s: own work, and waiting for peers, their exchange included.
        end_s: when it was over, on the run's clock.
        work: of the samples, as the user counts it; NaN: not counted.
    """

    samples: float
    compute_s: float
    wait_s: float
    end_s: float
    work: float = math.nan

    @property
    def items(self) -> float:
        """Work where it is counted, else samples."""
        return self.samples if math.isnan(self.work) else self.work


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One step of the run; ``turns`` by rank, of those that took part."""

    epoch: int
    index: int
    turns: Mapping[int, Turn]

    @property
    def samples(self) -> float:
        """Of all ranks."""
        return math.fsum(turn.samples for turn in self.turns.values())

    @property
    def step_s(self) -> float:
        """From its start to the end of its exchange, by the rank that took longest [s]."""
        return max(turn.compute_s + turn.wait_s for turn in self.turns.values())

    @property
    def slowest(self) -> int:
        """The rank with the most work."""
        return max(self.turns, key=lambda rank: self.turns[rank].compute_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChange:
    """A decision that changed shares or plan.

    Attributes:
        step: number of the step, from 0, whose batch it was decided in.
        reason: in words.
        shares: samples per rank from then on; empty where the decision is a plan.
        kind: of a controller's decision; else empty.
        generation: of a controller's plan; -1: there is none.
        predicted_gain: part of a batch's time that was to be saved; NaN: not said.
        realised_gain: the same, measured; NaN: not known.
        pause_s: how long training stood still for it [s].
        cancelled: why it never came into force; empty: it did.
        plan: of pipelines, plain; empty where shares are.
    """

    step: int
    reason: str
    shares: tuple[int, ...] = ()
    kind: str = ""
    generation: int = -1
    predicted_gain: float = math.nan
    realised_gain: float = math.nan
    pause_s: float = 0.0
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
        step_s: wall time of the batches, where that is all that was measured [s].
        changes: in order.
        queues: by step number: batches' budget overspent, by constraint.
        counts: of the stale engine's server, in order, each with its step number.
        plan: what a pipeline run began with: plan, cluster, profile; empty elsewhere.
        about: what else the trace's first line said, e.g. policy and bound.
        faults: what happened, in words.
    """

    name: str
    engine: str
    ranks: int
    devices: Mapping[int, str] = field(default_factory=dict[int, str])
    steps: tuple[RunStep, ...] = ()
    step_s: tuple[float, ...] = ()
    changes: tuple[RunChange, ...] = ()
    queues: tuple[tuple[int, Mapping[str, float]], ...] = ()
    counts: tuple[tuple[int, Mapping[str, Any]], ...] = ()
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
        ends = [(s.epoch, s.index, max(turn.end_s for turn in s.turns.values())) for s in chosen]
        taken = [b[2] - a[2] for a, b in pairwise(ends) if (a[0], a[1] + 1) == b[:2] and b[2] > a[2]]
        return taken or [step.step_s for step in chosen]

    @property
    def full(self) -> list[int]:
        """Numbers of the steps on a full global batch; of engines whose ranks do not end a step together, all."""
        if not self.meets:
            return list(range(len(self.steps)))
        counts = Counter(round(step.samples) for step in self.complete).most_common(1)
        return [n for n, s in enumerate(self.steps) if counts and round(s.samples) == counts[0][0]]

    @property
    def sees_waiting(self) -> bool:
        """Whether hosts wait where their devices do; on a GPU they do not."""
        return all(self.devices.get(rank, "").rpartition(" ")[2].startswith("cpu") for rank in range(self.ranks))

    def samples_of(self, step: RunStep) -> tuple[int, ...]:
        """Returns what each rank computed in a step; 0: it took no part."""
        return tuple(round(step.turns[rank].samples) if rank in step.turns else 0 for rank in range(self.ranks))

    def records_of(self, step: RunStep) -> tuple[SpeedSample, ...]:
        """Returns a step as the engines' decide code takes it, of all ranks."""
        none = Turn(samples=0.0, compute_s=0.0, wait_s=0.0, end_s=0.0)
        turns = [step.turns.get(rank, none) for rank in range(self.ranks)]
        return tuple(
            SpeedSample(
                rank=r, step=step.index, samples=round(t.samples), compute_s=t.compute_s, wait_s=t.wait_s, work=t.work
            )
            for r, t in enumerate(turns)
        )

    def outcomes(self) -> list[RunChange]:
        """Returns the changes with what they gave, as far as it is known.

        A controller measures that while it runs. Else it is measured here in the same way: the first batches under the
        new shares against the last ones before. Batches that are not full take less, whatever was decided.
        """
        full = [self.steps[number] for number in self.full]
        ran, taken_s = [self.samples_of(step) for step in full], [step.step_s for step in full]
        found: list[RunChange] = []
        for change in self.changes:
            known = not change.shares or not math.isnan(change.realised_gain)
            begins = (
                at
                for at in range(1, len(full))
                if ran[at] == change.shares != ran[at - 1] and self.full[at] >= change.step
            )
            at = None if known else next(begins, None)
            after_s = [] if at is None else taken_s[at : at + _COMPARED]
            if at is not None and len(after_s) == _COMPARED:
                before_s = median(taken_s[max(0, at - _COMPARED) : at])
                change = replace(change, realised_gain=1.0 - median(after_s) / before_s)
            found.append(change)
        return found

    @property
    def staged(self) -> bool:
        """Whether ranks hold different parts of the model, so that their times do not compare."""
        return any(len(group["ranks"]) > 1 for plan in self.plans for group in plan["groups"])

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
    about: dict[str, Any] = {}
    opened: dict[int, float] = {}
    devices: dict[int, str] = {}
    ranks = 0
    for event in events:
        if event.kind == "run":
            about = {**about, **event.data} if event.rank == 0 or not about else about
            ranks = max(ranks, int(event.data.get("world_size") or 1))
            opened.setdefault(event.rank, float(event.data.get("unix_s") or math.nan))
            devices[event.rank] = ", ".join(map(str, event.data.get("names") or ()))
        by_rank.setdefault(event.rank, []).append(event)
    if not ranks:
        raise ValueError("the trace has no 'run' line: give the events of read_events")
    engine = _engine(about)
    turns: dict[tuple[int, int], dict[int, Turn]] = {}
    walls: dict[tuple[int, int], list[float]] = {}
    for rank, own in by_rank.items():
        for tag, turn in _turns(own).items():
            turns.setdefault(tag, {})[rank] = turn
        for event in own:
            if event.kind == "step" and "step_s" in event.data:
                walls.setdefault((event.epoch, event.step), []).append(float(event.data["step_s"]))
    steps = [RunStep(epoch=e, index=i, turns=found) for (e, i), found in sorted(turns.items())]
    number = {(step.epoch, step.index): n for n, step in enumerate(steps)}
    return RecordedRun(
        name=name,
        engine=engine,
        ranks=ranks,
        devices=dict(sorted(devices.items())),
        steps=tuple(_on_one_clock(steps, opened, meets=engine not in _APART)),
        step_s=tuple(max(seconds) for _, seconds in sorted(walls.items())),
        changes=tuple(_changes(by_rank, number)),
        queues=tuple(_queues(by_rank, number)),
        counts=tuple((_number(e, number), e.data) for e in _of_kind(by_rank, "server")),
        plan=next((e.data for e in reversed(_of_kind(by_rank, "plan"))), named(None)),
        about=about,
        faults=tuple(f"rank {e.rank}: {e.data.get('error')}" for e in _of_kind(by_rank, "fault")),
    )


def _engine(about: Mapping[str, Any]) -> str:
    strategy = str(about.get("strategy") or "")
    return str(about.get("engine") or ("ddp" if strategy in ("DDPStrategy", "") else strategy))


def _of_kind(by_rank: Mapping[int, Sequence[Event]], *kinds: str) -> list[Event]:
    """Returns events of these kinds in order; what all ranks have noted alike is the lowest rank's."""
    found: dict[tuple[str, int, int, int], Event] = {}
    for rank in sorted(by_rank):
        nth = Counter[tuple[str, int, int]]()
        for event in by_rank[rank]:
            if event.kind in kinds:
                tag = (event.kind, event.epoch, event.step)
                nth[tag] += 1
                found.setdefault((*tag, nth[tag]) if event.kind != "fault" else (*tag, -rank - 1), event)
    return sorted(found.values(), key=lambda e: (e.epoch, e.step))


def _turns(events: Sequence[Event]) -> dict[tuple[int, int], Turn]:
    """Returns one rank's turns by (epoch, step). Of a step made twice, before and after a resume, the second counts;
    but several contributions to one, which the stale engine marks, add up."""
    found: dict[tuple[int, int], Turn] = {}
    shift_s = last_s = 0.0
    for event in events:
        data = event.data
        if event.kind != "step" or data.get("samples") is None or data.get("compute_s") is None:
            continue
        if event.t_s + shift_s < last_s:  # another fit, whose clock begins again
            shift_s = last_s - event.t_s + float(data["compute_s"])
        last_s = event.t_s + shift_s
        turn = Turn(
            samples=float(data["samples"]),
            compute_s=float(data["compute_s"]),
            wait_s=float(data.get("wait_s") or 0.0),
            end_s=last_s,
            work=float(data.get("work") or math.nan),
        )
        tag = (event.epoch, event.step)
        before = found.get(tag)
        found[tag] = turn if before is None or not data.get("fill_in") else _added(before, turn)
    return found


def _added(a: Turn, b: Turn) -> Turn:
    return Turn(
        samples=a.samples + b.samples,
        compute_s=a.compute_s + b.compute_s,
        wait_s=a.wait_s + b.wait_s,
        end_s=b.end_s,
        work=a.work + b.work,
    )


def _on_one_clock(steps: Sequence[RunStep], opened: Mapping[int, float], *, meets: bool) -> Iterable[RunStep]:
    ranks = sorted({rank for step in steps for rank in step.turns})
    if not ranks:
        return []
    first = ranks[0]
    ahead: dict[int, float] = {}
    for rank in ranks:
        known = opened.get(first, math.nan) - opened.get(rank, math.nan)
        both = [s.turns[rank].end_s - s.turns[first].end_s for s in steps if rank in s.turns and first in s.turns]
        ahead[rank] = median(both) if both and (meets or math.isnan(known)) else 0.0 if math.isnan(known) else known
    begin_s = min(t.end_s - t.compute_s - t.wait_s - ahead[rank] for s in steps for rank, t in s.turns.items())
    return [
        replace(
            step,
            turns={r: replace(t, end_s=t.end_s - ahead[r] - begin_s) for r, t in sorted(step.turns.items())},
        )
        for step in steps
    ]


def _number(event: Event, number: Mapping[tuple[int, int], int]) -> int:
    """Returns the number of the event's step, or of the last one before it."""
    tag = (event.epoch, event.step)
    if tag in number:
        return number[tag]
    return max((n for other, n in number.items() if other < tag), default=0)


def _changes(by_rank: Mapping[int, Sequence[Event]], number: Mapping[tuple[int, int], int]) -> Iterable[RunChange]:
    realised: dict[int, float] = {}
    for event in _of_kind(by_rank, "outcome"):
        if event.data.get("realised_gain") is not None:
            realised[int(event.data["generation"])] = float(event.data["realised_gain"])
    for event in _of_kind(by_rank, "decision"):
        data = event.data
        generation = int(data.get("generation", -1))
        gain = data.get("predicted_gain")
        yield RunChange(
            step=_number(event, number),
            reason=str(data.get("reason") or ""),
            shares=tuple(int(n) for n in data.get("shares") or ()),
            kind=str(data.get("kind") or ""),
            generation=generation,
            predicted_gain=math.nan if gain is None else float(gain),
            realised_gain=realised.get(generation, math.nan),
            pause_s=float(data.get("pause_s") or 0.0),
            cancelled=str(data.get("cancelled") or ""),
            plan=named(data.get("plan")),
        )


def _queues(
    by_rank: Mapping[int, Sequence[Event]], number: Mapping[tuple[int, int], int]
) -> Iterable[tuple[int, Mapping[str, float]]]:
    for event in _of_kind(by_rank, "queue", "decision"):
        if queues := named(event.data.get("queues")):
            yield _number(event, number), {str(name): float(value) for name, value in queues.items()}
