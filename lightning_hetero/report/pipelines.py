"""Pipelines: the schedule, its bubbles, and stages compared with what was planned for them (layer P).

All of it is the pipeline engine's own model: its plan's times, its generator of schedules.

The time of a batch with other engines, by the planner.

The exchange and what a rank's samples cost it in each step stay as they were recorded, and all ranks can hold what they
get. For a pipeline the model answers that it was planned from; its times are multiplied by what batches took over what
it says of the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.cluster.spec import cluster_from_plain, override_cluster
from lightning_hetero.pipeline.decide.costs import model_from_plain, times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, Timeline, modelled
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup, setup_from_run
from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import plan_from_plain
from lightning_hetero.types import Cluster, GroupPlan, ModelCost, PipelinePlan


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
