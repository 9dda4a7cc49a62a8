"""The pipeline engine: its own planner, then its schedules operation by operation (layer P)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from lightning_hetero.cluster.engine_times import LOOPS, slowest_s
from lightning_hetero.pipeline.decide.costs import batch_s, work_s
from lightning_hetero.pipeline.decide.plans import best_plan, describe_plan, held_bytes, in_one_piece, resting
from lightning_hetero.plan.estimate import Estimate, impossible
from lightning_hetero.plan.setup import Setup
from lightning_hetero.solvers.placement import micro_batches_of
from lightning_hetero.types import PipelinePlan

# More devices than these: the search keeps to one rule of depths, and to micro-batches of powers of two
# up to a few times a device's equal share.
_MANY = 32
_TIMES = 4


def pipeline(setup: Setup) -> Estimate:
    """Returns what `HeteroPipelineStrategy` would take: groups, stages, micro-batches and samples of its best plan."""
    model, cluster = setup.model, setup.cluster
    if model is None:
        return impossible(
            "pipeline", "what layers cost is not known: give a module, a size formula, or a pipeline's run"
        )
    short: dict[str, Any] = {}
    if setup.ranks > _MANY:
        most = max(1, _TIMES * setup.global_batch // setup.ranks)
        short = {"depth": "per_link", "micro_samples": [1 << k for k in range(most.bit_length())]}
    plan = best_plan(model, cluster, setup.global_batch, spans=setup.spans, **short)
    if not plan.ok:
        return impossible("pipeline", plan.reason)
    if len(model.layers) == 1:
        plan = in_one_piece(plan, model, cluster)
    step_s, seconds = batch_s(plan, model, cluster), work_s(plan, model, cluster, ranks=setup.ranks)
    samples = [0.0] * setup.ranks
    for group in plan.groups:
        # A pipeline's samples pass all of its devices: each counts for its part of the group's work.
        total_s = math.fsum(seconds[rank] for rank in group.ranks)
        for rank in group.ranks:
            samples[rank] = group.samples * (seconds[rank] / total_s if total_s > 0.0 else 1.0 / len(group.ranks))
    # A stage has its own layers' part of reading and stepping, and all of the bookkeeping.
    besides_s = setup.own_s / min(len(group.ranks) for group in plan.groups) + LOOPS["pipeline"] * setup.loop_s
    return Estimate(
        engine="pipeline", step_s=step_s * slowest_s((1.0,) * setup.ranks, setup.slowness) + besides_s,
        bound_s=min(plan.lower_bound_s, step_s), work_s=seconds, shares=tuple(samples),
        memory_bytes=tuple(held_bytes(plan, model, setup.ranks)), exchange_s=plan.sync_s,
        reasons=tuple(_reasons(setup, plan)),
        arguments={"global_batch_size": setup.global_batch, "plan": _plan_setting(plan)},
        plan=plan,
    )  # fmt: skip


def _plan_setting(plan: PipelinePlan) -> dict[str, Any]:
    """Returns a plan as plain values without its times; equal micro-batches by their size."""
    groups: list[dict[str, Any]] = []
    for group in plan.groups:
        size = max(group.micro_batches)
        sizes: dict[str, Any] = {"micro_batches": list(group.micro_batches)}
        if micro_batches_of(group.samples, size) == group.micro_batches:
            sizes = {"samples": group.samples, "micro_samples": size}
        groups.append({"ranks": list(group.ranks), "cuts": list(group.cuts), **sizes, "depths": list(group.depths)})
    return {"groups": groups}


def _reasons(setup: Setup, plan: PipelinePlan) -> list[str]:
    reasons: list[str] = []
    lengths = Counter(len(group.ranks) for group in plan.groups)
    if set(lengths) == {1}:
        reasons.append("no chain of devices pays: each takes the whole model, as in data parallelism")
    else:
        kinds = ", ".join(f"{count} of {length}" for length, count in sorted(lengths.items()))
        reasons.append(f"groups by number of devices: {kinds}")
    if idle := resting(plan, setup.ranks):
        names = ", ".join(setup.name(rank) for rank in idle[:4]) + (", ..." if len(idle) > 4 else "")
        reasons.append(f"{names} rest: with them a step would take longer")
    if plan.judged and plan.total_s > 0.0:
        gap = 100.0 * (1.0 - plan.lower_bound_s / plan.total_s)
        reasons.append(
            f"{plan.judged} groupings of the devices were compared, not all: with such micro-batches no plan is below"
            f" {plan.lower_bound_s * 1e3:.1f} ms by the formula, so one may be left that takes up to {gap:.1f} % less"
        )
    if setup.ranks <= 16:
        reasons += describe_plan(replace(plan, total_s=math.nan), setup.cluster).splitlines()
    return reasons
