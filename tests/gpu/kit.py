"""Models, engines and trainers on GPUs that ranks share; the oracle is a single process on the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from lightning_hetero import AutoStrategy
from tests.gpu.ranks import CardEnvironment, SharedCards
from tests.ranks.federated.kit import federated
from tests.ranks.kit import Weights, balanced, quiet_trainer, regression, stale
from tests.ranks.pipeline.kit import LAYERS, Block, Deep, pipeline

SIMULATED = "LIGHTNING_HETERO_SIMGPUS" in os.environ
STEPS, BATCH, SAMPLES = 10, 16, 208
PRECISIONS = {"32-true": 1e-5, "16-mixed": 2e-2, "bf16-mixed": 1e-1}
"""How far weights may be from those of a single process in float32, as part of what training has moved them by."""

of_kernels = pytest.mark.skipif(SIMULATED, reason="it is about kernels and their time; a simulated GPU has neither")


class Model(Deep):
    """A `Deep` in float32, under SGD, so that a rounding error stays as small as it is; others by name.

    Args:
        optimizer: a class of `torch.optim`.
        dropout: in each block of the backbone.
    """

    def __init__(self, optimizer: str = "SGD", dropout: float = 0.0) -> None:
        super().__init__(torch.float32, dropout=dropout)
        self.optimizer = optimizer

    def backbone(self, dropout: float = 0.0) -> nn.Module:
        return nn.Sequential(*(Block(dropout=dropout) for _ in range(LAYERS)))

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.optimizer)
        options: dict[str, Any] = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return kind(self.parameters(), lr=1e-2, **options)


def weights(module: nn.Module) -> Weights:
    """Returns a module's state as it is, on the CPU."""
    return Weights({name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()})


def moved(found: Weights, expected: Weights, start: Weights) -> float:
    """Returns how far ``found`` is from ``expected``, as part of what training has moved the latter by."""
    apart = sum(float(((found[k] - expected[k]).double() ** 2).sum()) for k in expected)
    way = sum(float(((expected[k] - start[k]).double() ** 2).sum()) for k in expected)
    return (apart / way) ** 0.5


def card_trainer(rank: int, world: int, strategy: Any, *, precision: str = "32-true", **options: Any) -> Trainer:
    """Returns a Trainer of ``world`` ranks on the GPUs there are; Lightning makes the process group."""
    plugins: list[Any] = [CardEnvironment(rank, world)]
    if precision == "16-mixed":  # Lightning's own begins at 2 ** 16 and leaves out the first steps
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        plugins.append(MixedPrecision("16-mixed", "cuda", scaler))
    else:
        options["precision"] = precision
    options = {"max_steps": STEPS, "max_epochs": None, **options}
    return quiet_trainer(accelerator=SharedCards(), devices=world, strategy=strategy, plugins=plugins, **options)


def auto(**options: Any) -> AutoStrategy:
    options = {"monitor": False, "process_group_backend": "gloo", **options}
    return AutoStrategy(**options)


def engine(name: str, backend: str = "gloo") -> Any:
    """Returns a strategy that trains what one process does: ``pipeline 2x2`` by a plan, ``balanced equal`` as DDP."""
    name, _, plan = name.partition(" ")
    options: dict[str, Any] = {"process_group_backend": backend}
    if name == "pipeline":
        return pipeline(plan or None, **options)
    if name == "balanced" and plan == "equal":
        return balanced(policy=None, rebalance=False, **options)
    if name == "stale":
        return stale(policy="bsp", **options)
    if name == "federated":
        return federated(local_steps=1, **options)
    if name == "ddp":
        return DDPStrategy(**options)
    return {"balanced": balanced, "auto": auto}[name](**options)


def parts(name: str, rank: int, world: int, data: Dataset) -> Dataset:
    """Returns what the loader of a rank holds: under ``federated`` its parts of the global batches, else all."""
    if name != "federated" or world == 1:
        return data
    count, full = len(data), BATCH  # type: ignore[arg-type]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    mine = BATCH // world
    return Subset(data, [i for at in range(rank * mine, count, full) for i in order[at : at + mine]])


def samples(same: bool = False) -> TensorDataset:
    """Returns the data; ``same``: all of them are the same, so that their order does not matter."""
    x, y = regression(1 if same else SAMPLES, dtype=torch.float32).tensors
    times = SAMPLES if same else 1
    return TensorDataset(x.repeat(times, 1), y.repeat(times, 1))


class Trained(NamedTuple):
    """What a rank has after a fit."""

    weights: Weights
    logged: Mapping[str, float]
    warned: list[str]
    strategy: str
    choice: str
    on: set[str]
    """The types of devices on which parameters were while it trained."""


class _Where(Callback):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.kinds |= {parameter.device.type for parameter in pl_module.parameters()}


def fit_engine(
    rank: int,
    world: int,
    name: str,
    precision: str = "32-true",
    module: LightningModule | None = None,
    *,
    backend: str = "gloo",
    validate: bool = False,
    same: bool = False,
    ckpt_path: str | None = None,
    save: str | None = None,
    **options: Any,
) -> Trained:
    """Trains `STEPS` steps of global batches of `BATCH` samples.

    Args:
        rank, world, backend: where.
        name, precision: as of `engine` and `PRECISIONS`.
        module: a `Model` unless given.
        validate: as often as ``options`` say.
        same: of `samples`.
        ckpt_path, save: a checkpoint to begin with, and one to write in the end.
        options: of the Trainer.
    """
    module = Model() if module is None else module
    strategy, where = engine(name, backend), _Where()
    callbacks = [where, *options.pop("callbacks", ())]
    trainer = card_trainer(rank, world, strategy, precision=precision, callbacks=callbacks, **options)
    data = samples(same)
    own = parts(name, rank, world, data)
    train = DataLoader(own, batch_size=BATCH // world, shuffle=own is data)
    val = DataLoader(regression(40, seed=9, dtype=torch.float32), batch_size=5) if validate else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
        if save is not None:
            trainer.save_checkpoint(save)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    choice = getattr(getattr(strategy, "choice", None), "line", "")
    warned = [str(warning.message) for warning in caught]
    return Trained(weights(module), logged, warned, type(trainer.strategy).__name__, choice, where.kinds)


def oracle(
    module: LightningModule | None = None,
    *,
    same: bool = False,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Weights:
    """Trains the same on the CPU in one process, with the global batches that stock DDP's sampler would form."""
    module = Model() if module is None else module
    data = samples(same)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(**{"devices": 1, "max_steps": STEPS, "max_epochs": None, **options})
        trainer.fit(module, DataLoader(data, batch_size=BATCH, sampler=sampler), ckpt_path=ckpt_path)
    return weights(module)
