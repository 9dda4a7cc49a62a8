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


def options(rank: int, world: int) -> dict[str, Fit]:
    reloading = Reloading()
    looking: dict[str, Any] = {"callbacks": [Looking(3)]}
    return {
        "limit 3": fit(rank, world, loader(), limit_train_batches=3),
        "overfit": fit(rank, world, loader(shuffle=True), overfit_batches=2),
        "reload": fit(
            rank, world, None, module=reloading, reload_dataloaders_every_n_epochs=1, extra=lambda _: reloading.asked
        ),
        "look": fit(rank, world, loader(), **looking),
        "look at sampler": fit(rank, world, loader(sampler=weighted()), **looking),
        "skip": fit(rank, world, loader(), module=Skipping()),
        "max_steps": fit(rank, world, loader(), max_steps=6),
    }


@cache
def option_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, options))


def expected_of(name: str) -> list[list[int]]:
    whole = ddp_order(SAMPLES, 2 * BATCH)
    epochs = [whole[i : i + PER_EPOCH] for i in range(0, len(whole), PER_EPOCH)]
    if name == "limit 3":
        return [b for e in epochs for b in e[:3]]
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
    ["limit 3", "overfit", "reload", "look", "look at sampler", "skip", "max_steps"],
)
def test_trainer_options_keep_their_meaning(name: str) -> None:
    runs = option_runs()[name]
    assert together(runs) == expected_of(name)
    assert {run.updates for run in runs} == {len(expected_of(name))}
    assert runs[0].weights.distance(runs[1].weights) < EXACT
    assert name != "reload" or {run.extra for run in runs} == {3}


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
