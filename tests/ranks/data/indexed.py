"""Runs that note which samples each rank trained on at each step, for the tests of loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DistributedSampler, TensorDataset

from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.kit import Scripted, Toy, Weights, balanced, rank_trainer, regression, weights

EXACT = 1e-12

T = TypeVar("T")


def indexed(samples: int) -> TensorDataset:
    """Samples (index, x, y)."""
    return TensorDataset(torch.arange(samples), *regression(samples).tensors)


class Noting(Toy):
    """Notes the indices of each batch; the dummy of a rank without samples is none."""

    def note(self, indices: list[int]) -> None:
        empty = getattr(self.trainer.strategy, "current_samples", lambda: None)() == 0
        self.seen.append([] if empty else indices)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, x, y = batch
        self.note(index.tolist())
        return super().training_step((x, y), batch_idx)


class Other(Scripted):
    """Another pattern of shares: another mix of speeds."""

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self._seen += 3
        return super().observe(records)


@dataclass
class Fit:
    """What one rank saw: the indices of each of its batches, the weights at the end, the updates made."""

    seen: list[list[int]]
    weights: Weights
    updates: int
    extra: Any = None


def fit(
    rank: int,
    world: int,
    loader: Any,
    *,
    strategy: Any = None,
    module: Toy | None = None,
    extra: Callable[[Trainer], Any] | None = None,
    **kwargs: Any,
) -> Fit:
    """Trains; ``strategy`` is one, or the arguments of `balanced`; ``extra`` looks at the Trainer afterwards."""
    strategy = balanced(**(strategy or {})) if strategy is None or isinstance(strategy, dict) else strategy
    module = module or Noting()
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": 3, **kwargs})
    trainer.fit(module, loader)
    seen: Any = module.seen
    return Fit(seen, weights(module), trainer.global_step, extra(trainer) if extra is not None else None)


def refusal(rank: int, world: int, loader: Any, **kwargs: Any) -> str:
    """Returns the message of the TypeError or ValueError with which the fit is refused."""
    try:
        fit(rank, world, loader, **kwargs)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def together(ranks: Sequence[Fit]) -> list[list[int]]:
    """The global batches: each step's indices in rank order."""
    return [[i for batch in step for i in batch] for step in zip(*(r.seen for r in ranks), strict=True)]


class Looking(Callback):
    """A user on rank 0 who looks at batches, also at ones whose shares nobody can know yet.

    Args:
        most: how many, at the start of training.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def look(self, trainer: Trainer, batches: int) -> None:
        if trainer.global_rank == 0:
            assert len(list(islice(trainer.train_dataloader, batches))) == batches  # type: ignore[arg-type]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.look(trainer, 1)
        self.look(trainer, self.most)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.look(trainer, 2)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.look(trainer, 2)


def cut(indices: Sequence[int], size: int, drop_last: bool = False) -> list[list[int]]:
    chunks = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return chunks[:-1] if drop_last and len(chunks[-1]) < size else chunks


def ddp_order(samples: int, size: int, epochs: int = 3, *, drop_last: bool = False, seed: int = 0) -> list[list[int]]:
    """The global batches that stock DDP trains on, by torch's own sampler."""
    batches: list[list[int]] = []
    for epoch in range(epochs):
        sampler = DistributedSampler(range(samples), num_replicas=1, rank=0, seed=seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        batches += cut(list(sampler), size, drop_last)
    return batches


def by_name(ranks: Sequence[dict[str, T]]) -> dict[str, list[T]]:
    """From one dict per rank to one list of ranks per name."""
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}
