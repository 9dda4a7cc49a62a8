"""Trainer options that concern loaders, users who look into them, and global batches of a chosen size."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from tests.ranks.data.indexed import (
    EXACT,
    Fit,
    Looking,
    Noting,
    by_name,
    cut,
    ddp_order,
    fit,
    indexed,
    refusal,
    together,
)
from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, rank_trainer, weights

SAMPLES, BATCH = 30, 4  # on 2 ranks: 3 global batches of 8 and a tail of 6
PER_EPOCH = 4


def loader(samples: int = SAMPLES, workers: int = 0, **kwargs: Any) -> DataLoader:
    kwargs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    return DataLoader(indexed(samples), **{"batch_size": BATCH, **kwargs})


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(1))


# ---- Trainer options ---------------------------------------------------------------------------------------


class Reloading(Noting):
    """Brings its own loader, a new one each time it is asked."""

    def train_dataloader(self) -> DataLoader:
        self.asked = getattr(self, "asked", 0) + 1
        return loader()


class Skipping(Noting):
    """Ends the first epoch at its third batch, as users may."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


class Scheduled(Noting):
    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def twice(rank: int, world: int) -> Fit:
    module = Noting()
    trainer = rank_trainer(rank, world, balanced(), max_epochs=1)
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    return Fit(module.seen, weights(module), trainer.global_step)  # type: ignore[arg-type]


def options(rank: int, world: int) -> dict[str, Fit]:
    reloading, scheduled = Reloading(), Scheduled()
    looking: dict[str, Any] = {"callbacks": [Looking(3)]}
    return {
        "limit 3": fit(rank, world, loader(), limit_train_batches=3),
        "limit 0.5": fit(rank, world, loader(), limit_train_batches=0.5),
        "limit 3 ahead": fit(rank, world, loader(workers=1), limit_train_batches=3),
        "overfit": fit(rank, world, loader(shuffle=True), overfit_batches=2),
        "reload": fit(
            rank, world, None, module=reloading, reload_dataloaders_every_n_epochs=1, extra=lambda _: reloading.asked
        ),
        "look": fit(rank, world, loader(), **looking),
        "look ahead": fit(rank, world, loader(workers=1), **looking),
        "look at sampler": fit(rank, world, loader(sampler=weighted()), **looking),
        "skip": fit(rank, world, loader(), module=Skipping()),
        "twice": twice(rank, world),
        "scheduled": fit(rank, world, loader(), module=scheduled, extra=lambda _: scheduled.steps),
        "max_steps": fit(rank, world, loader(), max_steps=6),
    }


@cache
def option_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, options))


def expected_of(name: str) -> list[list[int]]:
    whole = ddp_order(SAMPLES, 2 * BATCH)
    epochs = [whole[i : i + PER_EPOCH] for i in range(0, len(whole), PER_EPOCH)]
    if name.startswith("limit 3"):
        return [b for e in epochs for b in e[:3]]
    if name == "limit 0.5":
        return [b for e in epochs for b in e[:2]]
    if name == "overfit":
        return cut(range(SAMPLES), 2 * BATCH)[:2] * 3
    if name == "look at sampler":
        sampler = weighted()
        return [b for _ in range(3) for b in cut(list(sampler), 2 * BATCH)]
    if name == "skip":
        return epochs[0][:2] + epochs[1] + epochs[2]
    return whole[:6] if name == "max_steps" else whole


@pytest.mark.parametrize(
    "name",
    ["limit 3", "limit 0.5", "limit 3 ahead", "overfit", "reload", "look", "look ahead", "look at sampler", "skip",
     "twice", "scheduled", "max_steps"],
)  # fmt: skip
def test_trainer_options_keep_their_meaning(name: str) -> None:
    runs = option_runs()[name]
    assert together(runs) == expected_of(name)
    assert {run.updates for run in runs} == {len(expected_of(name))}
    assert runs[0].weights.distance(runs[1].weights) < EXACT


def test_what_the_user_asks_for_is_what_happens() -> None:
    runs = option_runs()
    assert {run.extra for run in runs["scheduled"]} == {3 * PER_EPOCH}
    assert {run.extra for run in runs["reload"]} == {3}
    assert all(set(map(len, run.seen)) != {4} for run in runs["look"])  # the shares went on changing


# ---- a chosen global batch, in pieces where it does not fit -------------------------------------------------


BIG = {"global_batch_size": 20}
FIFTY = 50  # 2 global batches of 20 and a tail of 10


class Manual(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def too_big(rank: int, world: int) -> list[str]:
    return [
        refusal(rank, world, loader(FIFTY), module=Manual(), strategy={**BIG, "max_samples": 4}),
        refusal(rank, world, loader(FIFTY), strategy={**BIG, "max_samples": 0}),
        refusal(rank, world, {"a": loader(), "b": loader()}, strategy={**BIG}),
        refusal(rank, world, {"a": loader(), "b": loader()}, strategy={"max_samples": 2}),
    ]


def test_batches_that_cannot_be_in_pieces_are_refused() -> None:
    zero, one = run_ranks(2, too_big)
    assert zero == one
    manual, none, ambiguous, several = zero
    assert "20 samples exceeds max_samples=4 on 2 ranks (8 together) and manual optimization" in manual
    assert "max_samples=0 leaves no room" in none
    assert "global_batch_size=20 is ambiguous with 2 train loaders" in ambiguous
    assert "max_samples below the global batch cannot be combined with several train loaders" in several
