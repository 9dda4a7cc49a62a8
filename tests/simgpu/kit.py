"""Trainers, models and oracles for tests on simulated GPUs; models are those of tests/ranks, in float32."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import (
    AutoStrategy,
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
)
from tests.gpu.ranks import SharedCards
from tests.ranks.kit import FEATURES, Toy, Weights, quiet_trainer, regression, single, weights
from tests.ranks.pipeline.kit import PLANS, Deep
from tests.simgpu.sim.syncs import syncs

STEPS = 10


class Plain(Toy):
    """An MLP in float32, with validation."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Sgd(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class WithNorm(Plain):
    """With batch normalization, whose statistics are each rank's own.

    Args:
        dropout: drawn on each device from its own numbers.
    """

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )


class DeepPlain(Deep):
    """Layers for the pipeline, in float32."""

    def __init__(self) -> None:
        super().__init__(torch.float32)


class CountSyncs(Callback):
    """Counts the host's waits for the device in batches 4 to 11, with what is between them.

    Attributes:
        steps: batches that were counted.
    """

    SKIPPED, COUNTED = 3, 8

    def __init__(self) -> None:
        self.steps = 0
        self._begun = -self.SKIPPED

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begun += 1
        syncs.counting = 0 < self._begun <= self.COUNTED
        self.steps += syncs.counting

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        syncs.counting = False

    def per_step(self, *, beside: bool = False) -> dict[str, float]:
        """Returns how often the host waited, per step, by kind and place.

        Args:
            beside: in threads beside those that train.
        """
        found = syncs.beside if beside else syncs.found
        return {f"{kind} | {place}": round(n / max(1, self.steps), 2) for (kind, place), n in found.most_common()}


def strategy_of(engine: str, backend: str = "gloo", **options: Any) -> Any:
    """Returns an engine's strategy by its short name; ``plan`` of a pipeline is a name of tests/ranks."""
    options = {"process_group_backend": backend, **options}
    if engine == "ddp":
        return DDPStrategy(**options)
    if engine == "pipeline":
        plan = options.pop("plan", None)
        return HeteroPipelineStrategy(
            backbone="model", plan=PLANS[plan] if isinstance(plan, str) else plan, **options
        )
    kinds = {
        "balanced": LoadBalancedStrategy,
        "stale": BoundedStalenessStrategy,
        "federated": FederatedStrategy,
        "auto": AutoStrategy,
    }
    return kinds[engine](**options)


def trainer_on_gpus(world: int, strategy: Any, **options: Any) -> Trainer:
    """Returns a quiet Trainer on ``world`` devices; ranks share them if there are fewer."""
    shared = torch.cuda.device_count() < world
    options = {"max_epochs": None, "max_steps": STEPS, **options}
    return quiet_trainer(
        **{"accelerator": SharedCards() if shared else "gpu", "devices": world, "strategy": strategy, **options}
    )


def loader(world: int, *, batch: int = 16, data: Dataset | None = None, **options: Any) -> DataLoader:
    """Returns a rank's loader of batches that are ``batch`` samples on all ranks together."""
    data = data if data is not None else regression(400, dtype=torch.float32)
    return DataLoader(data, batch_size=batch // world, shuffle=True, **options)


def val_loader() -> DataLoader:
    return DataLoader(regression(40, seed=9, dtype=torch.float32), batch_size=5)


def fit_quietly(trainer: Trainer, module: LightningModule, *loaders: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, *loaders, **options)


def host_weights(module: nn.Module) -> Weights:
    """Returns what was trained, on the host."""
    return Weights({name: value.detach().cpu().clone() for name, value in module.state_dict().items()})


def oracle(module: LightningModule, *, batch: int = 16, data: Dataset | None = None, **options: Any) -> Weights:
    """Trains on the host in one process, with the same global batches; returns what was trained."""
    options = {"max_steps": STEPS, "max_epochs": None, **options}
    single(module, data if data is not None else regression(400, dtype=torch.float32), batch, **options)
    return weights(module)


def scalars(trainer: Trainer) -> dict[str, float]:
    """Returns what was logged, as numbers."""
    metrics: dict[str, Tensor] = dict(trainer.callback_metrics)
    return {name: float(value) for name, value in metrics.items()}
