"""Trains under Lightning, by stock DDP, the balanced engine and ours, on the same emulated devices (layer L)."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.pipeline.models import Net, dataset, make
from benchmarks.pipeline.plans import Entry, described
from benchmarks.pipeline.scenarios import Case
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy, Scenario, ThrottleCallback
from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.types import GroupPlan, ModelCost, PipelinePlan

__all__ = ["ENGINES", "train"]

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
        return [b - a for a, b in zip(self.starts_s, self.starts_s[1:], strict=False)]


class SlowLinks(Callback):
    """Takes the time of a synchronisation over the emulated links, behind the real one, which is fast."""

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


def _replicas(case: Case) -> PipelinePlan:
    """Every device a whole model, with samples in proportion to its speed."""
    shares = apportion([device.speed for device in case.cluster.devices], case.global_batch, lower=1).shares
    layers = len(make(case.model).layers)
    return PipelinePlan(
        groups=tuple(
            GroupPlan(ranks=(rank,), cuts=(0, layers), samples=n, micro_batches=(n,), depths=(1,))
            for rank, n in enumerate(shares)
        )
    )


def _strategy(engine: str, case: Case, model: ModelCost) -> Any:
    if engine == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if engine == "balanced":
        return LoadBalancedStrategy(process_group_backend="gloo", monitor=False, min_samples=1)
    return HeteroPipelineStrategy(
        backbone="layers",
        cluster=case.cluster,
        profile=model,
        plan=_replicas(case) if engine == "replicas" else None,
        depth=case.depth,
        emulate_links=True,
        process_group_backend="gloo",
    )


def train(
    engine: str, case: Case, model: ModelCost, entry: Entry, *, steps: int, replica_sync_s: float
) -> dict[str, Any]:
    """Trains for some steps; returns this run's step times and what every rank held. Collective.

    Args:
        engine: one of `ENGINES`.
        case: what is emulated.
        model: its costs.
        entry: our plan, which the strategy finds by itself; for its synchronisation.
        steps: of the optimizer.
        replica_sync_s: emulated time of an all-reduce of all gradients among all devices [s].
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    speeds = [device.speed for device in case.cluster.devices]
    sync_s = entry.sync_s[rank] if engine == "ours" else replica_sync_s
    watch, held = Stopwatch(), Held()
    net: Net = make(case.model)
    data = dataset(case.model, case.global_batch * (steps + 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=_strategy(engine, case, model),
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            watch,
            held,
            ThrottleCallback(Scenario(speeds=speeds, sample_s=case.sample_s, step_s=case.fixed_s)),
            SlowLinks(sync_s),
        ],
    )
    trainer.fit(net, DataLoader(data, batch_size=case.global_batch // world))
    planned = getattr(trainer.strategy, "planned", None)
    everyone: list[tuple[list[float], int]] = [([], 0)] * world
    dist.all_gather_object(everyone, (watch.steps_s(), held.held_bytes))
    return {
        "steps_s": [max(times) for times in zip(*(times for times, _ in everyone), strict=True)],
        "held_bytes": [size for _, size in everyone],
        "plan": None if planned is None else described(planned.plan.groups),
    }
