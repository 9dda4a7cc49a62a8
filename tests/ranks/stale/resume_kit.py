"""Fits that are interrupted and resumed: what each rank trained, and what a checkpoint says is applied."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from tests.ranks.kit import rank_trainer
from tests.ranks.resume_kit import BATCH, EPOCHS, PER_EPOCH, SAMPLES, Noting, loader


def state_of(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


class Scheduled(Noting):
    """A scheduler every step and one every epoch; a buffer that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
        epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        return [optimizer], [{"scheduler": step, "interval": "step"}, epoch]


class Diary(Scheduled):
    """Notes samples per epoch, and what the server has accepted; rank 1 is slow now and then."""

    def __init__(self, rank: int, slow_s: float = 0.0, first_s: float = 0.0, fails: bool = False) -> None:
        super().__init__()
        self.updates = 0
        self.rank, self.slow_s, self.first_s, self.fails = rank, slow_s, first_s, fails
        self.epochs: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self.accepted = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if getattr(self.trainer.strategy, "current_samples", int)():
            self.epochs.setdefault(self.trainer.current_epoch, []).extend(batch[0].tolist())
            self.sizes.append(len(batch[0]))
        time.sleep(self.slow_s if self.rank == 1 and batch_idx % 3 == 1 else 0.0)
        time.sleep(self.first_s if len(self.sizes) == 1 else 0.0)
        if self.fails and (self.current_epoch, batch_idx) >= (1, 2):
            raise RuntimeError("a fault")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        if (counted := getattr(self.trainer.strategy, "server_metrics", None)) is not None:
            self.accepted = sum(counted()["samples"].values())


def diary(
    rank: int, world: int, strategy: Any, *, ckpt: str | None = None, slow_s: float = 0.0, first_s: float = 0.0,
    fails: bool = False, **kwargs: Any,
) -> Diary:  # fmt: skip
    module = Diary(rank, slow_s, first_s, fails)
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": EPOCHS, **kwargs})
    trainer.fit(module, loader(BATCH // 2), ckpt_path=ckpt)
    module.updates = trainer.global_step
    return module


Page = tuple[dict[int, list[int]], int, int, list[int]]


def page(module: Diary) -> Page:
    return module.epochs, module.accepted, module.updates, module.sizes


def positions(epoch: int) -> list[int]:
    sampler = DistributedSampler(range(SAMPLES), num_replicas=1, rank=0, seed=0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def applied(path: Path) -> tuple[int, set[int]]:
    """Epoch and samples that a checkpoint says are applied."""
    state = state_of(path)["lightning_hetero"]["applied"]
    order = positions(state["epoch"])
    chosen = [order[p] for start, end in state["spans"] for p in range(start, end)]
    assert len(set(chosen)) == len(chosen)
    return state["epoch"], set(chosen)


def check_rest(pages: Sequence[Page], path: Path) -> None:
    """A resumed run has trained exactly what the checkpoint has not, each sample once, in DDP's number of updates."""
    epoch, before = applied(path)
    for number in range(epoch, EPOCHS):
        trained = set(chain.from_iterable(p[0].get(number, []) for p in pages))
        assert trained == set(range(SAMPLES)) - (before if number == epoch else set())
    left = (EPOCHS - epoch) * SAMPLES - len(before)
    assert all(p[1] == left and p[2] == EPOCHS * PER_EPOCH for p in pages)


def scattered(path: Path, out: Path) -> Path:
    """The checkpoint of epoch 1, batch 2, had its 51 samples been applied out of order."""
    state = state_of(path)
    state["lightning_hetero"]["applied"]["spans"] = [[0, 30], [35, 50], [60, 66]]
    torch.save(state, out)
    return out
