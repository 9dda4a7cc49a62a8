"""Plans that know nothing, plans that know everything; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.joint.scenarios import SAMPLES
from benchmarks.joint.simulated.machine import Machine
from benchmarks.joint.simulated.traces import Phase, Trace
from lightning_hetero.pipeline.decide.costs import work_s
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of, place
from lightning_hetero.types import GroupPlan, PipelinePlan

Phases = Sequence[tuple[Phase, int]]
"""Phases with the number of batches that each holds."""

_MOVES = 60  # that the search for a plan judges
_BLENDS: tuple[Callable[[Floats, Floats], Floats], ...] = (
    lambda factors, weights: weights @ factors,
    lambda factors, weights: np.exp(weights @ np.log(factors)),
    lambda factors, weights: factors.max(axis=0),
)


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


def mean_s(machine: Machine, plan: PipelinePlan, phases: Phases) -> float:
    """Returns the mean time of a batch if the plan stays [s]."""
    return sum(machine.batch(plan, phase).seconds * n for phase, n in phases) / sum(n for _, n in phases)


def fastest(machine: Machine, plans: Sequence[PipelinePlan], phases: Phases) -> tuple[PipelinePlan | None, float]:
    """Returns the plan with the least mean time of a batch, and that [s]; none and NaN without plans.

    Exact: a plan is given up once what was simulated, and its devices' own work in the other phases, take too long.
    """
    batches = np.array([n for _, n in phases], dtype=np.float64)
    floors_s = _floors_s(machine, plans, phases) * (batches / batches.sum())
    best, best_s = None, math.inf
    for i in np.argsort(floors_s.sum(axis=1), kind="stable").tolist():
        total_s = float(floors_s[i].sum())
        for j in np.argsort(-floors_s[i], kind="stable").tolist():
            if total_s >= best_s:
                break
            part_s = machine.batch(plans[i], phases[j][0]).seconds * float(batches[j] / batches.sum())
            total_s += part_s - float(floors_s[i, j])
        if total_s < best_s:
            best, best_s = plans[i], total_s
    return best, best_s if best is not None else math.nan


def _floors_s(machine: Machine, plans: Sequence[PipelinePlan], phases: Phases) -> Floats:
    """Returns the own work of the busiest device [plans, phases]: no batch takes less."""
    ranks = len(machine.cluster.devices)
    own = np.array([work_s(plan, machine.model, machine.cluster, ranks=ranks) for plan in plans]).reshape(-1, 1, ranks)
    slowness = np.array([phase.slowness for phase, _ in phases])
    return (own * slowness).max(axis=2)


def oracle_plans(machine: Machine, phases: Phases) -> list[PipelinePlan]:
    """Returns the best plan found for each phase, from all that were found for any."""
    found = [_placed(machine, phase) for phase, _ in phases]
    known = list(dict.fromkeys(plan for plan in found if plan.ok))
    best = [fastest(machine, known, [(phase, 1)])[0] for phase, _ in phases]
    return [plan for plan in best if plan is not None]


def blended_plans(machine: Machine, phases: Phases) -> Iterator[PipelinePlan]:
    """Yields plans for the whole trace as one state: each device and link as slow as on average, or at its worst."""
    ranks = range(len(machine.cluster.devices))
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    factors = np.array(
        [[*phase.slowness, *(phase.links.get(pair, 1.0) for pair in pairs)] for phase, _ in phases]
    )
    batches = np.array([n for _, n in phases], dtype=np.float64)
    for blend in _BLENDS:
        slowness = blend(factors, batches / batches.sum())
        links = dict(zip(pairs, slowness[len(ranks) :].tolist(), strict=True))
        plan = _placed(machine, Phase(start=0, slowness=tuple(slowness[: len(ranks)].tolist()), links=links))
        if plan.ok:
            yield plan


def _placed(machine: Machine, phase: Phase) -> PipelinePlan:
    capped = any(device.mem_bytes < math.inf for device in machine.cluster.devices)
    return place(
        machine.model,
        machine.cluster_in(phase),
        SAMPLES,
        depth="low_memory" if capped else "per_link",
        budget=_MOVES,
    )
