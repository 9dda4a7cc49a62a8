"""Pipelines: the schedule, its bubbles, and stages beside what was planned for them (layer P).

All of it is the pipeline engine's own model: its plan's times, its generator of schedules, the replay of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.pipeline.decide.costs import model_from_plain, times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, Timeline, modelled
from lightning_hetero.report.run import Run
from lightning_hetero.report.what_if import Mended, WhatIf
from lightning_hetero.solvers import minimax
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import plan_from_plain, replicas
from lightning_hetero.types import AffineCost, Cluster, GroupPlan, ModelCost, PipelinePlan

__all__ = ["Group", "Stage", "Stages", "pipeline_what_if", "stages_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
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
class Group:
    """A pipeline: its stages, and its schedule as planned; None where layers were not measured."""

    samples: int
    stages: tuple[Stage, ...]
    schedule: Timeline | None

    @property
    def bubble(self) -> float:
        """Part of the devices' time in which the planned schedule has nothing for them; NaN: not known."""
        if self.schedule is None:
            return math.nan
        busy_s, devices = math.fsum(self.schedule.busy_s()), len(self.schedule.devices)
        return 1.0 - busy_s / (devices * self.schedule.makespan_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The plan in force at the end, and how it went.

    Attributes:
        groups: pipelines.
        resting: ranks that are in none.
        since: number of the first step under it.
        planned_s, measured_s: a batch [s].
    """

    groups: tuple[Group, ...]
    resting: tuple[int, ...]
    since: int
    planned_s: float
    measured_s: float


def _known(run: Run) -> tuple[PipelinePlan, Cluster, ModelCost | None]:
    profile = run.plan.get("profile")
    return (
        plan_from_plain(run.plans[-1]),
        cluster_from_plain(run.plan["cluster"]),
        None if profile is None else model_from_plain(profile),
    )


def stages_of(run: Run) -> Stages | None:
    """Returns the last plan and its schedule; None for runs of other engines."""
    if not run.plan:
        return None
    plan, cluster, model = _known(run)
    since = max((change.step for change in run.changes if change.plan and not change.cancelled), default=0)
    steps = run.steps[since:] or run.steps
    planned_s = work_s(plan, model, cluster, ranks=run.ranks)
    compute_s, total_s = [0.0] * run.ranks, 0.0
    for step in steps:
        total_s += step.step_s
        for rank, turn in step.turns.items():
            compute_s[rank] += turn.compute_s
    count = max(1, len(steps))

    def stage(group: GroupPlan, at: int) -> Stage:
        rank = group.ranks[at]
        return Stage(
            rank=rank,
            layers=(group.cuts[at], group.cuts[at + 1] - 1),
            planned_s=planned_s[rank],
            measured_s=compute_s[rank] / count if steps else math.nan,
            idle=1.0 - compute_s[rank] / total_s if total_s > 0 else math.nan,
        )

    groups = tuple(
        Group(
            samples=group.samples,
            stages=tuple(stage(group, at) for at in range(len(group.ranks))),
            schedule=None if model is None else _schedule(model, cluster, group),
        )
        for group in plan.groups
    )
    working = {rank for group in plan.groups for rank in group.ranks}
    return Stages(
        groups=groups,
        resting=tuple(rank for rank in range(run.ranks) if rank not in working),
        since=since,
        planned_s=plan.total_s,
        measured_s=total_s / count if steps else math.nan,
    )


def _schedule(model: ModelCost, cluster: Cluster, group: GroupPlan) -> Timeline:
    return modelled(times_of(model, cluster, group), SchedulePolicy(depths=group.depths))


def pipeline_what_if(run: Run) -> WhatIf | None:
    """Returns what the plan's model says of other engines and of faster devices; None where layers were not measured.

    The model is corrected as a whole: its times are multiplied by what batches took over what it says of this plan.
    """
    found = stages_of(run)
    if found is None or not run.steps:
        return None
    plan, cluster, model = _known(run)
    if model is None:
        return None
    modelled_s = evaluate_plan(model, cluster, plan.groups).total_s
    off = found.measured_s / modelled_s if 0.0 < modelled_s < math.inf else math.nan
    samples = sum(group.samples for group in plan.groups)
    fastest = max(device.speed for device in cluster.devices)
    ranks = range(len(cluster.devices))

    def of(shares: Sequence[int]) -> float:
        judged = evaluate_plan(model, cluster, replicas(len(model.layers), shares).groups)
        return judged.total_s * off if judged.ok else math.nan

    def mended(rank: int) -> float:
        devices = list(cluster.devices)
        devices[rank] = replace(devices[rank], speed=fastest)
        return evaluate_plan(model, replace(cluster, devices=tuple(devices)), plan.groups).total_s * off

    parts = [model.before, *model.layers, model.head]
    costs = [cost for part in parts for cost in (part.forward, part.backward)]
    fixed_s, per_sample_s = math.fsum(c.fixed_s for c in costs), math.fsum(c.per_sample_s for c in costs)
    whole = [
        AffineCost(fixed_s=fixed_s / device.speed, per_sample_s=per_sample_s / device.speed)
        for device in cluster.devices
    ]
    enough = samples >= len(ranks)
    equal = [samples // len(ranks) + (rank < samples % len(ranks)) for rank in ranks]
    return WhatIf(
        engine="pipeline",
        samples=samples,
        steps=len(run.steps) - found.since,
        measured_s=found.measured_s,
        engines={
            "ddp": of(equal) if enough else math.nan,
            "balanced": of(minimax(whole, samples, lower=1).shares) if enough else math.nan,
            "pipeline": found.measured_s,
        },
        few_s=found.measured_s,
        mended=tuple(
            Mended(rank=rank, step_s=mended(rank)) for group in plan.groups for rank in group.ranks
        ),
        dropped=(),
        beside="pipeline",
    )
