"""Figures of a run, from its events (layer P).

How it went over time: what it logged, and its throughput. Ranks that are slow per item of work, compared with the
others and with themselves.

Pipelines: the schedule, its bubbles, and stages compared with what was planned for them. All of it is the pipeline
engine's own model: its plan's times, its generator of schedules.

The time of a batch with other engines, by the planner. The exchange and what a rank's samples cost it in each step stay
as they were recorded, and all ranks can hold what they get. For a pipeline the model answers that it was planned from;
its times are multiplied by what batches took over what it says of the plan.

A run as a trace in Chrome's JSON format, which Perfetto reads.

One process per rank with a thread of its work, waiting and exchange; behind them one of the whole run, with changes of
shares or plan as instants, shares and queues as counters. Numbers of processes and threads begin with 1: Perfetto takes
0 for the idle process of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low
from typing import Any

from lightning_hetero.cluster.spec import cluster_from_plain, override_cluster
from lightning_hetero.pipeline.decide.costs import model_from_plain, times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, Timeline, modelled
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup, setup_from_run
from lightning_hetero.record.ledger import RunLedger, spent_in
from lightning_hetero.record.run import RecordedRun, RunStep, following
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import plan_from_plain
from lightning_hetero.types import Cluster, GroupPlan, ModelCost, PipelinePlan

_WINDOWS = 60  # of the throughput

Curve = list[tuple[float, float]]
"""Time since the first step began [s], and a value."""


def losses_of(run: RecordedRun) -> dict[str, Curve]:
    """Returns the logged losses by name, at the end of the step that they were logged in; of one that was logged per
    step and per epoch that of the steps."""
    found: dict[str, Curve] = {}
    for number, values in run.metrics:
        for name, value in values.items():
            if "loss" in name.lower():
                found.setdefault(name, []).append((run.steps[number].end_s, value))
    return {name: curve for name, curve in found.items() if f"{name.removesuffix('_epoch')}_step" not in found}


def last_metrics(run: RecordedRun) -> Mapping[str, float]:
    """Returns what was logged last, by name; not Lightning's second and third name for the same."""
    found = {name: value for _, values in run.metrics for name, value in values.items()}
    double = [f"{name}_{by}" for name in found for by in ("step", "epoch")]
    return {name: value for name, value in found.items() if name not in double}


def throughput_of(run: RecordedRun) -> Curve:
    """Returns samples per second over windows of steps, pauses between epochs left out."""
    pairs = [(step.samples, step.end_s - before.end_s, step.end_s) for before, step in following(run.steps)]
    size = -(-len(pairs) // _WINDOWS) or 1
    windows = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    taken = [(math.fsum(s for s, _, _ in w), math.fsum(s for _, s, _ in w), w[-1][2]) for w in windows]
    return [(end_s, samples / seconds) for samples, seconds, end_s in taken if seconds > 0.0]


HOT = 1.15  # times what it is compared with, from which on a rank is slow
_LITTLE = 0.05  # of a step; less than that is no finding
_SPELL = 1.5  # times its own fastest windows, from which on a rank is slow for a while
_MOST_WINDOWS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Seconds per item by rank and window, as ratios: 1 is what it is compared with, 1.5 takes half as long again.

    Attributes:
        first: number of each window's first step.
        others: a rank over the ranks' median (of two ranks, the faster) of the same window; NaN: not measured.
        itself: a rank over its own fastest fifth of windows.
    """

    first: tuple[int, ...]
    others: tuple[tuple[float, ...], ...]
    itself: tuple[tuple[float, ...], ...]

    @property
    def typical(self) -> list[float]:
        """Each rank's median compared with the others."""
        return [_of_known(median, row) for row in self.others]

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that are slow compared with the others in most windows."""
        return [rank for rank, ratio in enumerate(self.typical) if ratio > HOT]

    @property
    def slow_windows(self) -> list[int]:
        """Windows in which most ranks are slower than usual: something that all share."""
        columns = zip(*self.itself, strict=True)
        return [i for i, column in enumerate(columns) if _of_known(median, column) > HOT]

    @property
    def spells(self) -> list[int]:
        """Ranks that are slower than usual for a while, but as a rule not slower than the others."""
        slow, shared = set(self.slow_ranks), set(self.slow_windows)
        alone = [(rank, row) for rank, row in enumerate(self.itself) if rank not in slow]
        return [rank for rank, row in alone if any(v > _SPELL and i not in shared for i, v in enumerate(row))]


def scores_of(run: RecordedRun) -> Scores | None:
    """Returns the scores of a run; None for one rank, without measured steps, or where ranks do not compare."""
    if run.ranks < 2 or run.staged or not run.steps:
        return None
    steps, count = run.steps, min(_MOST_WINDOWS, len(run.steps))
    firsts = [i * len(steps) // count for i in range(count)]
    windows = [steps[a:b] for a, b in pairwise([*firsts, len(steps)])]
    per_item = [[_per_item(window, rank) for window in windows] for rank in range(run.ranks)]
    middles = [_of_known(median_low, column) for column in zip(*per_item, strict=True)]
    fastest = [_of_known(lambda known: sorted(known)[len(known) // 5], row) for row in per_item]
    return Scores(
        first=tuple(firsts),
        others=tuple(tuple(_over(v, m) for v, m in zip(row, middles, strict=True)) for row in per_item),
        itself=tuple(tuple(_over(v, own) for v in row) for row, own in zip(per_item, fastest, strict=True)),
    )


def _per_item(steps: Sequence[RunStep], rank: int) -> float:
    turns = [t for s in steps if (t := s.turns.get(rank)) is not None and t.items > 0 and t.compute_s > 0]
    items = math.fsum(t.items for t in turns)
    return math.fsum(t.compute_s for t in turns) / items if items > 0 else math.nan


def late_between(run: RecordedRun, ledger: RunLedger) -> tuple[int, float, float] | None:
    """Returns the rank that takes longest between two steps, e.g. for its loader: its median [s], and that over the
    ranks'; None: they take about as long, or, as on a GPU, the host does not tell."""
    gaps: list[list[float]] = [[] for _ in range(run.ranks)]
    for before, step in following(ledger.steady if run.sees_waiting else ()):
        for rank in before.turns.keys() & step.turns.keys():
            turn = step.turns[rank]
            gaps[rank].append(turn.end_s - before.turns[rank].end_s - turn.compute_s - turn.wait_s)
    if run.ranks < 2 or not all(gaps):
        return None
    taken_s = [max(0.0, median(own)) for own in gaps]
    usual_s, most_s = median_low(taken_s), max(taken_s)
    if most_s - usual_s < _LITTLE * ledger.step_s or most_s < HOT * usual_s:
        return None
    return taken_s.index(most_s), most_s, _over(most_s, usual_s)


def _of_known(average: Callable[[list[float]], float], values: Iterable[float]) -> float:
    """Returns an average of what is no NaN; NaN where nothing is known."""
    known = [value for value in values if not math.isnan(value)]
    return average(known) if known else math.nan


def _over(value: float, base: float) -> float:
    """Returns a ratio; NaN where either is not known."""
    if math.isnan(value) or math.isnan(base):
        return math.nan
    return value / base if base > 0.0 else math.inf if value > 0.0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """A rank's part of a group.

    Attributes:
        rank: of the device.
        layers: first and last.
        planned_s, measured_s: own work for a batch [s]; NaN: not known.
        idle: measured part of its time that was no work.
    """

    rank: int
    layers: tuple[int, int]
    planned_s: float
    measured_s: float
    idle: float

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured_s / self.planned_s if self.planned_s > 0 else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFacts:
    """The plan in force at the end, and how it went.

    Attributes:
        plan, cluster, model: what it was planned from; no model where layers were not measured.
        stages: of each group.
        measured_s: a batch [s].
    """

    plan: PipelinePlan
    cluster: Cluster
    model: ModelCost | None
    stages: tuple[tuple[PlannedStage, ...], ...]
    measured_s: float

    def schedule(self, group: int) -> Timeline | None:
        """Returns a group's schedule as planned; None where layers were not measured."""
        if self.model is None:
            return None
        planned = self.plan.groups[group]
        times = times_of(self.model, self.cluster, planned)
        return modelled(times, SchedulePolicy(depths=planned.depths))


def bubble(schedule: Timeline) -> float:
    """Returns the part of the devices' time in which the schedule has nothing for them."""
    return 1.0 - math.fsum(schedule.busy_s()) / (len(schedule.devices) * schedule.makespan_s)


def pipeline_of(run: RecordedRun, ledger: RunLedger) -> PipelineFacts | None:
    """Returns the last plan and how it went; None for runs of other engines."""
    if not run.plan:
        return None
    plan, cluster = plan_from_plain(run.plans[-1]), cluster_from_plain(run.plan["cluster"])
    profile = run.plan.get("profile")
    model = None if profile is None else model_from_plain(profile)
    planned_s = work_s(plan, model, cluster, ranks=run.ranks)
    work_of = {figures.rank: figures.compute_s for figures in ledger.figures}

    def stage(group: GroupPlan, at: int) -> PlannedStage:
        rank = group.ranks[at]
        return PlannedStage(
            rank=rank, layers=(group.cuts[at], group.cuts[at + 1] - 1), planned_s=planned_s[rank],
            measured_s=work_of.get(rank, math.nan), idle=1.0 - work_of.get(rank, math.nan) / ledger.step_s,
        )  # fmt: skip

    return PipelineFacts(
        plan=plan, cluster=cluster, model=model,
        stages=tuple(tuple(stage(group, at) for at in range(len(group.ranks))) for group in plan.groups),
        measured_s=ledger.step_s,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternatives:
    """What a global batch takes, and would take [s].

    Attributes:
        engine: of the run.
        samples: a full global batch.
        measured_s: as measured, the mean of the last steps.
        engines: by engine; NaN: it cannot train in this way.
        chosen: the engine that the planner takes of these.
    """

    engine: str
    samples: int
    measured_s: float
    engines: dict[str, float]
    chosen: str

    @property
    def best(self) -> tuple[str, float]:
        """The engine to take, and what it takes [s]; the one in use where that does not take 2 % less."""
        mine_s, chosen_s = self.engines.get(self.engine, self.measured_s), self.engines.get(self.chosen, math.nan)
        return (self.chosen, chosen_s) if chosen_s < 0.98 * mine_s else (self.engine, mine_s)


def alternatives_of(run: RecordedRun, ledger: RunLedger, pipeline: PipelineFacts | None = None) -> Alternatives | None:
    """Returns what others would take; None where ranks' times do not compare, or too little was measured."""
    if pipeline is not None:
        return _of_pipeline(run, pipeline)
    if run.ranks < 2 or run.staged or ledger.too_few:
        return None
    try:
        setup = setup_from_run(run, ledger=ledger)
    except ValueError:  # files are missing, no full batch, or a rank has never worked
        return None
    sharded = run.engine == "sharded"  # others may not hold the model; stock DDP stands for equal parts
    answer = plan(setup, ("ddp",) if sharded else ("ddp", "balanced", "stale"))
    engines: dict[str, float] = {one.engine: one.step_s if one.ok else math.nan for one in answer.estimates}
    measured_s = ledger.step_s
    if run.engine in engines:
        engines[run.engine] = measured_s
    return Alternatives(
        engine=run.engine, samples=setup.global_batch, measured_s=measured_s, engines=engines,
        chosen=run.engine if sharded else "ddp" if answer.chosen is None else answer.chosen.engine,
    )  # fmt: skip


def _of_pipeline(run: RecordedRun, found: PipelineFacts) -> Alternatives | None:
    groups, cluster, model = found.plan.groups, found.cluster, found.model
    if model is None or not run.steps:
        return None
    modelled_s = evaluate_plan(model, cluster, groups).total_s
    off = found.measured_s / modelled_s if 0.0 < modelled_s < math.inf else math.nan
    samples, speeds = sum(group.samples for group in groups), [device.speed for device in cluster.devices]
    roomy = override_cluster(cluster, mem_bytes=[None] * len(speeds))
    others: dict[str, float] = {}
    if samples >= len(speeds):
        answer = plan(Setup(cluster=roomy, model=model, global_batch=samples), ("ddp", "balanced"))
        others = {one.engine: one.step_s * off for one in answer.estimates}
    return Alternatives(
        engine="pipeline", samples=samples, measured_s=found.measured_s,
        engines={**others, "pipeline": found.measured_s},
        chosen=min(others, key=lambda name: others[name], default="pipeline"),
    )  # fmt: skip


_MOST_TURNS = 20_000  # the last ones of a long run: the viewer reads it into memory
_US = 1e6


def perfetto_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the JSON object; times in microseconds."""
    steps = run.steps[-max(1, _MOST_TURNS // run.ranks) :]
    events: list[dict[str, Any]] = []

    def note(kind: str, name: str, process: int, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": process + 1, "tid": 1, **more})

    whole = run.ranks  # the process behind those of the ranks
    for process in range(run.ranks + 1):
        name, thread = f"rank {process} {run.devices.get(process, '')}".strip(), "steps"
        if process == whole:
            name, thread = "whole run", "changes"
        note("M", "process_name", process, args={"name": name})
        note("M", "thread_name", process, args={"name": thread})
    begins_us: dict[int, float] = {}
    over_s = dict.fromkeys(range(run.ranks), 0.0)  # when a rank's last slice ended: slices may not overlap
    for number, (step, spent) in enumerate(zip(steps, spent_in(run, steps), strict=True), len(run.steps) - len(steps)):
        for rank, turn in step.turns.items():
            own = spent[rank]
            idle_s = min(own.idle_s, turn.wait_s)  # what the host saw: not what is idle on a GPU's stream
            waits_s = {"waiting": idle_s, "idle as planned": own.rest_s, "exchange": turn.wait_s - idle_s - own.rest_s}
            for part, name, from_s, to_s in turn.slices(waits_s):
                counted = {} if math.isnan(part.work) else {"work": part.work}
                told = {"epoch": step.epoch, "step": step.index, "samples": part.samples, **counted}
                from_s = max(from_s, over_s[rank])
                if to_s > from_s:
                    more = {"args": told} if name == "work" else {}
                    note("X", name, rank, ts=from_s * _US, dur=(to_s - from_s) * _US, **more)
                    over_s[rank] = to_s
        begins_us[number] = _US * min(turn.begin_s for turn in step.turns.values())
        shares = {f"rank {rank}": turn.samples for rank, turn in step.turns.items()}
        note("C", "samples", whole, ts=begins_us[number], args=shares)
    for number, values in run.queues:
        if number in begins_us:
            note("C", "batches' budget overspent", whole, ts=begins_us[number], args=dict(values))
    for change in run.changes:
        if change.step in begins_us:
            name = change.reason or change.kind or "change"
            note("i", name, whole, s="g", ts=begins_us[change.step], args={"shares": list(change.shares)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
