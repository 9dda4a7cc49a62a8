"""Trains by what Lightning's Trainer can be given: stock DDP, a static split by hand, post-localSGD, our engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local_sgd
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler

from benchmarks.emulated import Emulated
from benchmarks.kit.training import Clock, fit, gloo
from benchmarks.peers.cases import (
    BATCHES,
    CLUSTERS,
    GLOBAL_BATCH,
    PEERS,
    SPELL_STEP_S,
    SYNC_EVERY,
    WORLD,
    Run,
    parts_of,
)
from benchmarks.peers.task import Curve, datasets, net_of, order_of, recipe
from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.solvers import apportion


class Digits(LightningModule):
    """The CNN, and stock DDP's recipe.

    Args:
        seed: of the weights.
        updates: of the training.
        weighted: the folk fix done right: a rank's mean loss counts in proportion to its samples.
    """

    def __init__(self, seed: int, updates: int, *, weighted: bool = False) -> None:
        super().__init__()
        self.net: nn.Module = net_of(seed)
        self.updates, self.weighted = updates, weighted

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        return loss * (len(labels) * WORLD / GLOBAL_BATCH) if self.weighted else loss

    def configure_optimizers(self) -> Any:
        optimizer, schedule = recipe(self.parameters(), self.updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Dealt(Sampler[list[int]]):
    """The parts of all global batches in shares that are given beforehand; another order in each pass.

    Args:
        seed: of the order.
        shares: samples by rank.
        rank: whose parts; None: those of all, rank after rank, for a library that deals them itself.
    """

    def __init__(self, seed: int, shares: tuple[int, ...], rank: int | None) -> None:
        self.seed, self.shares, self.rank, self.epoch = seed, shares, rank, 0

    def __len__(self) -> int:
        return BATCHES * (len(self.shares) if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[int]]:
        order, self.epoch = order_of(self.seed, self.epoch), self.epoch + 1
        for i, part in enumerate(parts_of(order, self.shares)):
            if self.rank is None or i % len(self.shares) == self.rank:
                yield part


def shares_of(run: Run) -> tuple[int, ...]:
    """Returns samples in proportion to the speeds, which nobody knows beforehand but who makes a static division."""
    cluster = next(c for c in CLUSTERS if c.name == run.cluster)
    return apportion(cluster.speeds, GLOBAL_BATCH, lower=1)


class Watch(Clock):
    """Follows a training; a look comes when a batch begins, after the update before it."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if trainer.current_epoch == 0:
            trainer.strategy.barrier()
            self.curve.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.curve.look(trainer.current_epoch * BATCHES + batch_idx, pl_module.parameters())

    def on_extra_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Of a strategy that trains a further batch within a step of the loop."""
        self.samples.append(len(batch[1]))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.curve.end()


class LocalHook(Callback):
    """Registers post-localSGD's hook, which Lightning's `DDPStrategy` leaves out on CPUs."""

    def __init__(self, state: post_local_sgd.PostLocalSGDState) -> None:
        self.state = state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model: Any = trainer.strategy.model
        model.register_comm_hook(self.state, post_local_sgd.post_localSGD_hook)


def _local_sgd() -> tuple[DDPStrategy, list[Callback]]:
    """Gradients are averaged in the first updates, then weights; every device is a node of its own."""
    state = post_local_sgd.PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=2 * SYNC_EVERY - 1,  # so that updates 8, 12, 16, ... and the last end with an average
        post_local_gradient_allreduce=False,
    )
    strategy = DDPStrategy(
        process_group_backend="gloo",
        ddp_comm_state=state,
        ddp_comm_hook=post_local_sgd.post_localSGD_hook,
        model_averaging_period=SYNC_EVERY,
    )
    return strategy, [LocalHook(state)]


OURS: dict[str, Any] = {
    "ours: balanced": LoadBalancedStrategy,
    "ours: stale": BoundedStalenessStrategy,
    "ours: pipeline": HeteroPipelineStrategy,
}


def train(run: Run, rank: int, curve: Curve) -> dict[str, Any]:
    """Trains; returns what this rank saw."""
    seed_everything(run.seed, verbose=False)  # of Lightning's DistributedSampler, too
    cluster = next(c for c in CLUSTERS if c.name == run.cluster)
    emulated = Emulated(cluster.scenario(run.seed), step_every_s=SPELL_STEP_S if cluster.spells else None)
    watch, static = Watch(curve), run.peer.startswith("static split")
    ranks = next(peer.ranks for peer in PEERS if peer.name == run.peer)
    callbacks: list[Callback] = [watch, emulated]
    data = datasets()[0]
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // ranks, shuffle=True)
    if static:
        loader = DataLoader(data, batch_sampler=Dealt(run.seed, shares_of(run), rank))
    if run.peer == "post-localSGD":
        strategy, more = _local_sgd()
        callbacks += more
    else:
        strategy = gloo(OURS.get(run.peer, DDPStrategy))
    model = Digits(run.seed, run.updates, weighted=run.peer.endswith(", weighted"))
    trainer = fit(
        strategy, model, loader, steps=run.updates, ranks=ranks, callbacks=callbacks, use_distributed_sampler=not static
    )
    curve.close(trainer.global_step, model.parameters())
    return {"updates": trainer.global_step, "samples": watch.samples, "taken": emulated.taken()}
