"""Trains under Lightning, by stock DDP, the balanced engine and ours, on the same emulated devices (layer L)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.emulated import Emulated
from benchmarks.pipeline.exchange import ddp_exposed_s
from benchmarks.pipeline.models import Net, costs_of, dataset, make, parameters_of
from benchmarks.pipeline.plans import Entry, described, replica_sync_s
from benchmarks.pipeline.scenarios import Case
from benchmarks.pipeline.stalls import Collections, Sleeper, Span, within
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy, Scenario
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.types import GroupPlan, ModelCost, PipelinePlan

ENGINES = ("ddp", "balanced", "ours", "replicas")
"""``ours`` plans by itself; ``replicas`` is ours with a given plan, plain data parallelism."""


class Stopwatch(Callback):
    """Durations of the steps on this rank."""

    def __init__(self) -> None:
        self.starts_s: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.starts_s.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts_s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.starts_s)]

    def within_s(self, spans: Sequence[Span]) -> list[float]:
        """How much of each step the spans cover [s]."""
        return [within(spans, a, b) for a, b in pairwise(self.starts_s)]


class SlowLinks(Callback):
    """Takes the part of a synchronisation over the emulated links that nothing hides, behind the real one.

    For engines that know of no emulated links; ours takes that time by itself, by the same formula, at the same place.
    The real one, through the machine's memory, comes on top, once and behind the emulated work under every engine.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        time.sleep(self.seconds)


class Held(Callback):
    """Counts what this rank holds after the last step: parameters, gradients, optimizer state [bytes]."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        parameters = [p for p in pl_module.parameters() if not p.is_meta]
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                tensors += [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        self.held_bytes = sum(t.numel() * t.element_size() for t in tensors)


class EmulatedStages(Emulated):
    """The same where the pipeline engine sleeps by itself."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if isinstance(trainer.strategy, HeteroPipelineStrategy):
            run: Any = trainer.strategy._run
            self.pacer = getattr(run.place.busy, "pacer", None)


def _shares(case: Case) -> tuple[int, ...]:
    """Samples in proportion to speed, at least one: what the balanced engine settles on."""
    return apportion([device.speed for device in case.cluster.devices], case.global_batch, lower=1)


def _replicas(case: Case) -> PipelinePlan:
    """Every device a whole model."""
    shares = _shares(case)
    layers = len(make(case.model).layers)
    return PipelinePlan(
        groups=tuple(
            GroupPlan(ranks=(rank,), cuts=(0, layers), samples=n, micro_batches=(n,), depths=(1,))
            for rank, n in enumerate(shares)
        )
    )


def _strategy(engine: str, case: Case) -> Any:
    if engine == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if engine == "balanced":
        return LoadBalancedStrategy(process_group_backend="gloo", monitor=False, min_samples=1)
    return HeteroPipelineStrategy(
        backbone="layers",
        cluster=case.cluster,
        profile=costs_of(case.model, case.sample_s),  # the fixed time comes with the scenario
        plan=_replicas(case) if engine == "replicas" else None,
        controller=None,  # plans as they are made; that they change is `benchmarks.joint`'s
        depth=case.depth,
        emulate_links=True,
        process_group_backend="gloo",
    )


def exchange_s(engine: str, case: Case, model: ModelCost, entry: Entry) -> tuple[float, ...]:
    """Returns how long each rank waits for gradients on the emulated links, behind its last backward pass [s].

    See `benchmarks.pipeline.exchange` for what each engine hides.
    """
    world = len(case.cluster.devices)
    if engine == "ours":
        return entry.sync_s
    if engine == "replicas":
        return (replica_sync_s(case, model),) * world
    shares = (case.global_batch // world,) * world if engine == "ddp" else _shares(case)
    return (ddp_exposed_s(case, model, parameters_of(case.model), shares),) * world


def train(
    engine: str, case: Case, model: ModelCost, entry: Entry, *, steps: int, collections: Collections, sleeper: Sleeper
) -> dict[str, Any]:
    """Trains for some steps; returns this run's step times and what every rank held. Collective.

    Args:
        engine: one of `ENGINES`.
        case: what is emulated.
        model: its costs.
        entry: our plan, which the strategy finds by itself; for its synchronisation.
        steps: of the optimizer.
        collections: this process's garbage collections.
        sleeper: a process beside; only rank 0's is looked at.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    speeds = [device.speed for device in case.cluster.devices]
    scenario = Scenario(speeds=speeds, sample_s=case.sample_s, step_s=case.fixed_s)
    watch, held, emulated = Stopwatch(), Held(), EmulatedStages(scenario)
    net: Net = make(case.model)
    data = dataset(case.model, case.global_batch * (steps + 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=_strategy(engine, case),
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            watch,
            held,
            emulated,
            *([SlowLinks(exchange_s(engine, case, model, entry)[rank])] if engine in ("ddp", "balanced") else []),
        ],
    )
    trainer.fit(net, DataLoader(data, batch_size=case.global_batch // world))
    planned = getattr(trainer.strategy, "planned", None)
    own = {
        "steps_s": watch.steps_s(),
        "gc_s": watch.within_s(collections.spans),
        "late_s": watch.within_s(sleeper.late()) if rank == 0 else [],
        "held_bytes": held.held_bytes,
        "taken": emulated.taken(),
    }
    everyone: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(everyone, own)

    def slowest(name: str) -> list[float]:
        return [max(values) for values in zip(*(one[name] for one in everyone), strict=True)]

    return {
        "steps_s": slowest("steps_s"),
        "gc_s": slowest("gc_s"),
        "late_s": everyone[0]["late_s"],
        "held_bytes": [one["held_bytes"] for one in everyone],
        "taken": max(one["taken"] for one in everyone),
        "plan": None if planned is None else described(planned.plan.groups),
    }
