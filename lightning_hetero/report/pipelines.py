"""Pipelines: the schedule, its bubbles, and stages compared with what was planned for them (layer P).

All of it is the pipeline engine's own model: its plan's times, its generator of schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.pipeline.decide.costs import model_from_plain, times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, Timeline, modelled
from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun
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
