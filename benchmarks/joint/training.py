"""One rank of one scenario: trains under Lightning, by each contender in turn, on devices that change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.joint.courses import BALANCED, DDP, ORACLE, OURS, REACTING, SHARES, TICK_S, Course, courses
from benchmarks.kit.training import Clock, fit, gathered, gloo
from benchmarks.pipeline.devices import LinkedDevices
from benchmarks.pipeline.exchange import ddp_exposed_s
from benchmarks.pipeline.models import costs_of, dataset, make, parameters_of
from benchmarks.pipeline.plans import described
from benchmarks.ranks import as_rank
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy, LyapunovController, Scenario
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.solvers.plans import plan_from_plain
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan

TURNS, STEPS = 2, 5  # of those that do not answer changes: turns, and measured batches of each state in a turn
SKIPPED = 1  # batches of a state that do not count before them; of a run, besides, as many as of a state


class Watch(Clock):
    """A clock that keeps the plans, too, each with its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[tuple[int, PipelinePlan]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not None and (not self.plans or plan is not self.plans[-1][1]):
            self.plans.append((batch_idx, plan))


def train(
    name: str,
    course: Course,
    scenario: Scenario,
    *,
    batches: int,
    cluster: Cluster | None = None,
    plan: PipelinePlan | None = None,
) -> dict[str, Any]:
    """Trains for some batches. Collective.

    Args:
        name: of the contender.
        course: what is compared.
        scenario: of the devices, now.
        batches: to train.
        cluster: as the strategy is told; None: as it is at first.
        plan: that stays; None: the contender's own.

    Returns:
        ``steps_s``: from the end of the batch before, on all ranks, to its own [s]. ``taken``: emulated work over what
        was asked for, the greatest of all ranks. ``plans``: those in force, with their first batch. ``moved``: layers
        that a rank did not hold before, by change of plan. ``replans``: as the strategy tells.
    """
    case, world = course.case, dist.get_world_size()
    model = costs_of(case.model, case.sample_s)  # what a micro-batch costs besides is the scenario's
    exchange_s = _exchange_s(name, course, costs_of(case.model, case.sample_s, case.fixed_s))
    by_clock = TICK_S if course.unit == "second" and name in REACTING else None
    watch, devices = Watch(), LinkedDevices(scenario, exchange_s, step_every_s=by_clock)
    data = DataLoader(dataset(case.model, case.global_batch * (batches + 1)), batch_size=case.global_batch // world)
    strategy = _strategy(name, model, cluster or case.cluster, plan)
    fit(strategy, make(case.model), data, steps=batches, callbacks=[watch, devices])
    everyone = gathered({"began_s": watch.began_s, "ends_s": watch.ends_s, "taken": devices.taken()})
    ends_s = [max(ends) for ends in zip(*(one["ends_s"] for one in everyone), strict=True)]
    starts_s = [max(one["began_s"] for one in everyone), *ends_s]
    plans = [held for _, held in watch.plans]
    return {
        "steps_s": [b - a for a, b in pairwise(starts_s)],
        "taken": max(one["taken"] for one in everyone),
        "plans": [[batch, described(held.groups)] for batch, held in watch.plans],
        "moved": [_moved(old, new) for old, new in pairwise(plans)],
        "replans": [asdict(replan) for replan in getattr(strategy, "replans", [])],
    }


def _strategy(name: str, model: ModelCost, cluster: Cluster, plan: PipelinePlan | None) -> Any:
    if name == DDP:
        return gloo(DDPStrategy)
    if name == BALANCED:
        return gloo(LoadBalancedStrategy, min_samples=1)
    controllers: dict[str, Any] = {OURS: "lyapunov", SHARES: LyapunovController(structure=False)}
    return gloo(
        HeteroPipelineStrategy, backbone="layers", cluster=cluster, profile=model, plan=plan,
        controller=controllers.get(name), emulate_links=True,
    )  # fmt: skip


def _exchange_s(name: str, course: Course, model: ModelCost) -> dict[tuple[float, ...], float]:
    """Returns what an engine waits for on the emulated links behind its backward passes, by the devices' speeds [s].

    See `benchmarks.pipeline.exchange`; of the balanced engine with the shares that it settles on.
    """
    if name not in (DDP, BALANCED):
        return {}
    case, parameters = course.case, parameters_of(course.case.model)
    equal: Sequence[int] = (case.global_batch // case.world_size,) * case.world_size

    def shares(speeds: tuple[float, ...]) -> Sequence[int]:
        return equal if name == DDP else apportion(speeds, case.global_batch, lower=1)

    return {s: ddp_exposed_s(course.case_in(s), model, parameters, shares(s)) for s in course.states}


def _moved(old: PipelinePlan, new: PipelinePlan) -> int:
    """Returns how many layers ranks hold under a plan that they did not hold before, ranks added up."""

    def held(plan: PipelinePlan) -> set[tuple[int, int]]:
        stages = [stage for g in plan.groups for stage in zip(g.ranks, pairwise(g.cuts), strict=True)]
        return {(rank, layer) for rank, (first, end) in stages for layer in range(first, end)}

    return len(held(new) - held(old))


# ---- all contenders in turns, within one group of processes, so that a busy machine slows all of them alike -----


def steady(name: str, course: Course, prepared: dict[str, Any], steps: int) -> dict[str, Any]:
    """Runs a contender that does not answer changes; returns its step times by state."""
    if name == ORACLE:
        found = [
            _run(name, course, [speeds], steps, plan=plan)
            for speeds, plan in zip(course.states, prepared["oracle"], strict=True)
        ]
        return {"by_state_s": [one["by_state_s"][0] for one in found], "taken": max(one["taken"] for one in found)}
    return _run(name, course, course.states, steps, plan=prepared["plans"].get(name))


def _run(name: str, course: Course, states: list[tuple[float, ...]], steps: int, *, plan: Any) -> dict[str, Any]:
    each = steps + SKIPPED
    scenario = course.steady([states[0], *states], each)  # the first one again, for the warm-up
    found = train(
        name,
        course,
        scenario,
        batches=each * (len(states) + 1),
        cluster=course.case_in(states[0]).cluster,
        plan=None if plan is None else plan_from_plain(plan),
    )
    times = found["steps_s"][each:]
    by_state = [times[i * each + SKIPPED : (i + 1) * each] for i in range(len(states))]
    return {"by_state_s": by_state, "taken": found["taken"]}


def compare(course: Course, prepared: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Runs all contenders; returns what was measured, by contender."""
    found: dict[str, Any] = {}
    for turn in range(1 if quick else TURNS):
        if turn == 1 or quick:
            for name in (name for name in course.contenders if name in REACTING):
                        found[name] = train(name, course, course.scenario, batches=course.batches)
        for name in (name for name in course.contenders if name not in REACTING):
            more = steady(name, course, prepared, STEPS)
            before = found.setdefault(name, {"by_state_s": [[] for _ in course.states], "taken": 0.0})
            before["by_state_s"] = [a + b for a, b in zip(before["by_state_s"], more["by_state_s"], strict=True)]
            before["taken"] = max(before["taken"], more["taken"])
    return {name: found[name] for name in course.contenders}


if __name__ == "__main__":
    _path, _stem, _extent, _prepared = sys.argv[1:]
    _course = courses(_extent == "quick")[_stem]
    as_rank(Path(_path), lambda rank: compare(_course, json.loads(_prepared), _extent == "quick"))
