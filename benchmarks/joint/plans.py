"""Plans that know nothing, plans that know everything; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.joint.scenarios import SAMPLES
from lightning_hetero.pipeline.decide.simulate.machine import Machine
from lightning_hetero.pipeline.decide.simulate.traces import Phase, Trace
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of, place
from lightning_hetero.types import GroupPlan, PipelinePlan

__all__ = ["even_plans", "lengths", "mean_s", "oracle_plans"]


def even_plans(machine: Machine, groups: int) -> list[PipelinePlan]:
    """Equal layers, equal samples, devices dealt round: for several sizes of micro-batches; those that fit."""
    ranks, layers = len(machine.cluster.devices), len(machine.model.layers)
    stages = ranks // groups
    cuts = tuple(round(layers * s / stages) for s in range(stages + 1))
    found: list[PipelinePlan] = []
    for size in (1, 2, 4, 8, 16):
        micro = micro_batches_of(SAMPLES // groups, size)
        plans = [
            GroupPlan(
                ranks=tuple(range(g, ranks, groups)), cuts=cuts, samples=sum(micro), micro_batches=micro, depths=()
            )
            for g in range(groups)
        ]
        plan = evaluate_plan(machine.model, machine.cluster, plans, depth="low_memory")
        if plan.ok:
            found.append(plan)
    return found


def lengths(trace: Trace, batches: int) -> list[tuple[Phase, int]]:
    """Returns how many batches each phase holds."""
    counts: dict[int, tuple[Phase, int]] = {}
    for t in range(batches):
        phase = trace.at(t, 0.0)
        counts[id(phase)] = phase, counts.get(id(phase), (phase, 0))[1] + 1
    return list(counts.values())


def mean_s(machine: Machine, plan: PipelinePlan, phases: Sequence[tuple[Phase, int]]) -> float:
    """Returns the mean time of a batch if the plan stays [s]."""
    return sum(machine.batch(plan, phase).seconds * n for phase, n in phases) / sum(n for _, n in phases)


def oracle_plans(machine: Machine, phases: Sequence[tuple[Phase, int]]) -> list[PipelinePlan]:
    """Returns the best plan found for each phase, from all that were found for any."""
    capped = any(device.mem_bytes < float("inf") for device in machine.cluster.devices)
    found = [
        place(machine.model, machine.cluster_in(phase), SAMPLES, depth="low_memory" if capped else "per_link",
              groupings="search", budget=60)
        for phase, _ in phases
    ]  # fmt: skip
    known = [plan for plan in found if plan.ok]
    return [min(known, key=lambda plan: machine.batch(plan, phase).seconds) for phase, _ in phases]
