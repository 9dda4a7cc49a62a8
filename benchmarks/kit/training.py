"""Trainings under Lightning on emulated devices, as every benchmark runs them (torch and Lightning)."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import Sampler, TensorDataset

from benchmarks.kit.figures import SETTLED


def gloo(strategy: Callable[..., Strategy], **options: Any) -> Strategy:
    """Returns a new strategy over gloo, ours without its monitor; the class is the caller's, as is the import of it."""
    if strategy is not DDPStrategy:
        options.setdefault("monitor", False)
    return strategy(process_group_backend="gloo", **options)


class Clock(Callback):
    """When each batch began and ended on this rank, the samples it had, and how long the fit took."""

    def __init__(self) -> None:
        self.began_s = self.over_s = 0.0
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []
        self.samples: list[int] = []

    @property
    def fit_s(self) -> float:
        """From the first epoch's start to the last one's end [s]."""
        return self.over_s - self.began_s

    def steps_s(self) -> list[float]:
        """Returns the time from each batch's start to the next one's, of the last to the end."""
        return [b - a for a, b in pairwise([*self.starts_s, self.over_s])]

    def steady_s(self) -> float:
        """Returns the mean time of the steps that are called steady."""
        steps_s = self.steps_s()[SETTLED:]
        return sum(steps_s) / len(steps_s)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began_s = self.began_s or time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.starts_s.append(time.perf_counter())
        self.samples.append(len(batch) if isinstance(batch, Tensor) else len(batch[0]))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.over_s = time.perf_counter()


def fit(
    strategy: Strategy, model: LightningModule, data: Any, *, steps: int, callbacks: Sequence[Callback],
    ranks: int | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    """Trains so many steps and returns the trainer.

    Args:
        strategy: a new one.
        model, data: as `Trainer.fit` takes them.
        steps: optimizer steps.
        callbacks: of the run.
        ranks: of the group; None: those of the process group that there is.
        options: of the trainer, besides.
    """
    trainer = Trainer(
        accelerator="cpu", devices=ranks or dist.get_world_size(), strategy=strategy, max_steps=steps, max_epochs=-1,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    gc.collect()  # of the imports' and the last run's, or it comes in some step of some engine
    trainer.fit(model, data)
    return trainer


def gathered(own: Any) -> list[Any]:
    """Returns every rank's value, by rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


@contextmanager
def forgetting() -> Iterator[None]:
    """Inside, our engines know the speeds of the runs inside."""
    with tempfile.TemporaryDirectory() as folder, patch.dict("os.environ", LIGHTNING_HETERO_CACHE=folder):
        yield


class StaticShares(Sampler[list[int]]):
    """What one writes by hand: every rank takes a fixed, uneven slice of each global batch."""

    def __init__(self, samples: int, shares: tuple[int, ...], rank: int) -> None:
        self.samples, self.shares, self.rank = samples, shares, rank

    def __len__(self) -> int:
        return self.samples // sum(self.shares)

    def __iter__(self) -> Iterator[list[int]]:
        total, offset = sum(self.shares), sum(self.shares[: self.rank])
        g = torch.Generator().manual_seed(0)  # the order of torch's DistributedSampler in epoch 0
        order = torch.randperm(self.samples, generator=g).tolist()
        for t in range(len(self)):
            yield order[t * total + offset : t * total + offset + self.shares[self.rank]]


def flat_gradient(model: nn.Module) -> Tensor:
    """Returns all gradients in a row; sharded ones are gathered."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().detach().reshape(-1).clone() for g in found])


class Compared:
    """What several engines did on one case: raw values by engine, a list each.

    Args:
        engines: their names.
        reference: the first step's gradient of one process.
    """

    FIELDS = ("steps_s", "samples", "gradient_error", "taken")

    def __init__(self, engines: Sequence[str], reference: Tensor) -> None:
        self.found: dict[str, dict[str, list[Any]]] = {e: {field: [] for field in self.FIELDS} for e in engines}
        self._reference = reference

    def add(self, name: str, clock: Clock, taken: float, gradient: Tensor | None) -> None:
        """Adds a run of an engine. Collective."""
        one = self.found[name]
        one["steps_s"].append(clock.steps_s())
        samples = gathered(clock.samples)
        one["taken"].append(max(gathered(taken)))
        if gradient is not None:
            one["samples"].append([list(step) for step in zip(*samples, strict=True)])
            one["gradient_error"].append(float((gradient - self._reference).norm() / self._reference.norm()))


def synthetic(samples: int, width: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Returns inputs and targets that no batch has alike: a loss that weighs samples wrongly shows in the gradient."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(samples, width, generator=g, dtype=dtype)
    return TensorDataset(x, x.sin().sum(1, keepdim=True) + x[:, :1] * (torch.arange(samples) % 7).unsqueeze(1))


def first_gradient(model: nn.Module, data: TensorDataset, global_batch: int) -> Tensor:
    """Returns the gradient of the mean squared error over the first global batch of torch's order, in one process."""
    first = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:global_batch]
    x, y = data.tensors
    nn.functional.mse_loss(model(x[first]), y[first]).backward()
    return flat_gradient(model)
