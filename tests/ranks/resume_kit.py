"""Runs that save and resume: which samples each rank trained on, and the checks of what goes on after a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.kit import Scripted, Toy, Weights, rank_trainer, regression, single, weights

SAMPLES, BATCH, EPOCHS = 90, 16, 3  # 5 full global batches and a tail of 10 per epoch
PER_EPOCH = 6
EXACT = 1e-12

Result = tuple[Weights, list[list[int]]]  # of one rank: final weights, indices of each of its batches


class Noting(Toy):
    """Notes the indices it trains on; the dummy batch of a rank without samples trains on none."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        index, x, y = batch
        empty = getattr(self.trainer.strategy, "current_samples", lambda: None)() == 0
        self.seen.append([] if empty else index.tolist())
        return super().training_step((x, y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[1:]), sync_dist=True)


def data(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(samples), *regression(samples).tensors)


def loader(batch_size: int, workers: int = 0, samples: int = SAMPLES, **kwargs: Any) -> DataLoader:
    kwargs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    return DataLoader(data(samples), batch_size=batch_size, **kwargs)


class Other(Scripted):
    """Another pattern of shares: another mix of speeds."""

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self._seen += 3
        return super().observe(records)


class Saver(Callback):
    """Saves by hand at (epoch, batch) in ``on_train_batch_end``, at every validation's end, at every epoch's end."""

    def __init__(self, folder: str, batches: Sequence[tuple[int, int]]) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) in self.batches:
            trainer.save_checkpoint(f"{self.folder}/batch-{trainer.current_epoch}-{batch_idx}.ckpt")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/val-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/epoch-{trainer.current_epoch}.ckpt")


class Fault(Callback):
    """Raises on every rank before or after training on a batch."""

    def __init__(self, epoch: int, batch: int, *, after: bool) -> None:
        self.at, self.after = (epoch, batch), after

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.after and (trainer.current_epoch, batch_idx) == self.at:
            raise RuntimeError("a fault")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.after and (trainer.current_epoch, batch_idx) == self.at:
            raise RuntimeError("a fault")


def result(module: Noting) -> Result:
    return weights(module), [[int(i) for i in batch] for batch in module.seen]


def fit(
    rank: int, world: int, strategy: Any, loaders: Any, *, ckpt: str | None = None, **kwargs: Any
) -> Result:
    # An earlier fit's reducer is cyclic garbage; a forked loader worker that collects it crashes, under stock DDP too.
    gc.collect()
    module = Noting()
    trainer = rank_trainer(rank, world, strategy, max_epochs=EPOCHS, **kwargs)
    trainer.fit(module, *loaders if isinstance(loaders, tuple) else (loaders,), ckpt_path=ckpt)
    return result(module)


def joined(ranks: Sequence[Result]) -> list[list[int]]:
    """Sorted indices of every global batch, in the order of training."""
    assert len({len(seen) for _, seen in ranks}) == 1
    return [sorted(chain.from_iterable(parts)) for parts in zip(*(seen for _, seen in ranks), strict=True)]


def oracle(accumulate: int = 1, samples: int = SAMPLES) -> Result:
    module = Noting()
    single(module, data(samples), BATCH, max_epochs=EPOCHS, accumulate_grad_batches=accumulate)
    final, seen = result(module)
    return final, [sorted(batch) for batch in seen]


def check(ranks: Sequence[Result], expected: Result, from_batch: int, what: str) -> None:
    assert joined(ranks) == expected[1][from_batch:], what
    for final, _ in ranks:
        assert final.distance(expected[0]) <= EXACT, what


def plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and plain_types(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(plain_types(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)
