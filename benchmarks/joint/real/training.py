"""Trains under Lightning, by whichever contender, on devices that change; what is emulated is one for all (layer L)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.emulated import Emulated
from benchmarks.joint.real.courses import BALANCED, DDP, OURS, REACTING, SHARES, TICK_S, Course
from benchmarks.pipeline.exchange import ddp_exposed_s
from benchmarks.pipeline.models import Net, costs_of, dataset, make, parameters_of
from benchmarks.pipeline.plans import described
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy, LyapunovController, Scenario
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan


class Watch(Callback):
    """When each batch ended on this rank, a change of plan before it included; and which plans it ran under."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.ends_s: list[float] = []
        self.plans: list[tuple[int, PipelinePlan]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began_s = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        if plan is not None and (not self.plans or plan is not self.plans[-1][1]):
            self.plans.append((batch_idx, plan))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())


class Devices(Emulated):
    """Emulated devices, and for engines that know of no emulated links what they wait for on these.

    The part of a synchronisation that nothing hides is taken behind the real one, as by our strategy.

    Args:
        scenario: of the devices.
        exchange_s: seconds by the devices' speeds; empty: the strategy emulates its links.
        step_every_s: of a scenario that passes with time.
    """

    def __init__(
        self, scenario: Scenario, exchange_s: Mapping[tuple[float, ...], float], step_every_s: float | None
    ) -> None:
        super().__init__(scenario, step_every_s=step_every_s)
        self._exchange_s = exchange_s

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._exchange_s:
            step = trainer.fit_loop.epoch_loop.total_batch_idx
            speeds = tuple(self.scenario.speed(rank, step) for rank in range(trainer.world_size))
            time.sleep(self._exchange_s[speeds])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, HeteroPipelineStrategy):  # which sleeps by itself
            run: Any = trainer.strategy._run
            self.pacer = getattr(run.place.busy, "pacer", None)


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
    watch = Watch()
    devices = Devices(
        scenario,
        _exchange_s(name, course, costs_of(case.model, case.sample_s, case.fixed_s)),
        TICK_S if course.unit == "second" and name in REACTING else None,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=_strategy(name, model, cluster or case.cluster, plan),
        max_steps=batches,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch, devices],
    )
    net: Net = make(case.model)
    data = dataset(case.model, case.global_batch * (batches + 1))
    trainer.fit(net, DataLoader(data, batch_size=case.global_batch // world))
    own = {"began_s": watch.began_s, "ends_s": watch.ends_s, "taken": devices.taken()}
    everyone: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(everyone, own)
    ends_s = [max(ends) for ends in zip(*(one["ends_s"] for one in everyone), strict=True)]
    starts_s = [max(one["began_s"] for one in everyone), *ends_s]
    plans = [held for _, held in watch.plans]
    return {
        "steps_s": [b - a for a, b in pairwise(starts_s)],
        "taken": max(one["taken"] for one in everyone),
        "plans": [[batch, described(held.groups)] for batch, held in watch.plans],
        "moved": [_moved(old, new) for old, new in pairwise(plans)],
        "replans": [asdict(replan) for replan in getattr(trainer.strategy, "replans", [])],
    }


def _strategy(name: str, model: ModelCost, cluster: Cluster, plan: PipelinePlan | None) -> Any:
    if name == DDP:
        return DDPStrategy(process_group_backend="gloo")
    if name == BALANCED:
        return LoadBalancedStrategy(process_group_backend="gloo", monitor=False, min_samples=1)
    controllers: dict[str, Any] = {OURS: "lyapunov", SHARES: LyapunovController(structure=False)}
    return HeteroPipelineStrategy(
        backbone="layers",
        cluster=cluster,
        profile=model,
        plan=plan,
        controller=controllers.get(name),
        emulate_links=True,
        process_group_backend="gloo",
        monitor=False,
    )


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
