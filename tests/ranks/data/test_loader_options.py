"""Trainer options that concern loaders, users who look into them, and global batches of a chosen size."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_hetero.transport.side_channel import SideChannel
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
from tests.ranks.data.kit import Pairs
from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, rank_trainer, single, weights

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


# ---- the other loaders -------------------------------------------------------------------------------------


class Everything(Noting):
    def on_fit_start(self) -> None:
        self.others: dict[str, list[Any]] = {}

    def see(self, stage: str, batch: Any) -> None:
        loaders: Any = getattr(self.trainer, f"{stage}_dataloaders")
        self.others.setdefault(stage, [type(loaders).__name__, type(loaders.sampler).__name__]).append(
            batch[0].tolist()
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.see("predict", batch)
        return batch[0]


def all_stages(rank: int, world: int, stock: bool) -> dict[str, list[Any]]:
    module = Everything()
    strategy = DDPStrategy(process_group_backend="gloo") if stock else balanced()
    trainer = rank_trainer(rank, world, strategy, max_epochs=2)
    trainer.fit(module, loader(), loader(21))
    trainer.test(module, loader(22), verbose=False)
    trainer.predict(module, loader(23))
    return module.others


def test_other_loaders_are_lightnings_business() -> None:
    stock, ours = run_ranks(2, all_stages, True), run_ranks(2, all_stages, False)
    assert ours == stock
    assert ours[0]["val"][:2] == ["DataLoader", "DistributedSampler"]
    assert {len(ours[0][stage]) for stage in ("val", "test", "predict")} == {2 + 6, 2 + 3}


# ---- what is left of a fit ---------------------------------------------------------------------------------


class Groups(Callback):
    """Watches the engine's own process group: all groups but the default one."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.watched = [weakref.ref(o) for o in gc.get_objects() if isinstance(o, SideChannel)]
        self.groups = [weakref.ref(channel.group) for ref in self.watched if (channel := ref()) is not None]


def after_the_fit(rank: int, world: int, sampler: bool) -> tuple[int, int]:
    """Returns how many groups were in use, and how many are left: the Trainer still there, nothing collected."""
    gc.collect()
    groups = Groups()
    gc.disable()
    try:
        trainer = rank_trainer(rank, world, balanced(), max_epochs=1, callbacks=[groups])
        trainer.fit(Noting(), loader(sampler=weighted() if sampler else None))
        assert trainer.train_dataloader is not None
        return len(groups.groups), sum(ref() is not None for ref in groups.groups)
    finally:
        gc.enable()


@pytest.mark.parametrize("sampler", [False, True])
def test_no_process_group_is_left_for_the_garbage_collector(sampler: bool) -> None:
    """It may run in a forked DataLoader worker of the next fit, where a group's destructor hangs or crashes."""
    assert run_ranks(2, after_the_fit, sampler) == [(1, 0)] * 2


# ---- a chosen global batch, in pieces where it does not fit -------------------------------------------------


class Sizes(Callback):
    """Notes what the strategy and the Trainer say while training, and the batches that hooks see."""

    def __init__(self) -> None:
        self.said: set[tuple[Any, ...]] = set()
        self.numbers: list[int] = []
        self.batches: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.said.add(
            (strategy.global_batch_size, strategy.effective_batch_size, trainer.accumulate_grad_batches)
        )
        self.numbers.append(batch_idx)
        self.batches.append(batch[0].tolist() if strategy.current_samples() else [])


BIG = {"global_batch_size": 20}
FIFTY = 50  # 2 global batches of 20 and a tail of 10


class Manual(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def chosen(rank: int, world: int) -> dict[str, Fit]:
    def run(strategy: dict[str, Any], data: DataLoader | None = None, **kwargs: Any) -> Fit:
        sizes = Sizes()
        done = fit(
            rank,
            world,
            data or loader(FIFTY),
            strategy=strategy,
            callbacks=[sizes],
            extra=lambda trainer: (sizes.said, sizes.numbers, sizes.batches),
            **kwargs,
        )
        return done

    pairs = DataLoader(indexed(14), batch_sampler=Pairs())  # 7 pairs: pools of 4, 4, 4 and 2
    return {
        "size": run(BIG),
        "pieces": run({**BIG, "max_samples": 4}),
        "dropped": run({**BIG, "max_samples": 4}, loader(FIFTY, drop_last=True)),
        "accumulated": run({**BIG, "max_samples": 4}, accumulate_grad_batches=2),
        "lazy": run({**BIG, "max_samples": (3, 4), "min_samples": 0}),
        "quantum": run({**BIG, "max_samples": (5, 7), "quantum": 4}),
        "ahead": run({**BIG, "max_samples": 4}, loader(FIFTY, workers=1)),
        "pooled": run({"batch_sampler": "pool", "max_samples": 1}, pairs),
    }


@cache
def chosen_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, chosen))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("size", (20, 20)),
        ("pieces", (4, 4)),
        ("dropped", (4, 4)),
        ("accumulated", (4, 4)),
        ("lazy", (3, 4)),
        ("quantum", (4, 4)),
        ("ahead", (4, 4)),
    ],
)
def test_global_batches_in_pieces_train_like_one_process(name: str, most: tuple[int, int]) -> None:
    dropped, own = name == "dropped", 2 if name == "accumulated" else 1
    runs = chosen_runs()[name]
    whole = ddp_order(FIFTY, 20, drop_last=dropped)
    assert [a + b for a, b in zip(*(run.extra[2] for run in runs), strict=True)] == whole
    oracle = Noting()
    trainer = single(
        oracle, indexed(FIFTY), 20, max_epochs=3, accumulate_grad_batches=own, loader_args={"drop_last": dropped}
    )
    for run, cap in zip(runs, most, strict=True):
        assert run.weights.distance(weights(oracle)) < EXACT
        assert run.updates == trainer.global_step
        said, numbers, batches = run.extra
        assert said == {(20, 20 * own, own)}
        assert numbers == list(range(len(whole) // 3)) * 3
        assert max(map(len, run.seen)) <= cap
        assert [i for piece in run.seen for i in piece] == [i for batch in batches for i in batch]


def test_pools_in_pieces() -> None:
    """A batch sampler's pools vary in size."""
    runs = chosen_runs()["pooled"]
    pools = [a + b for a, b in zip(*(run.extra[2] for run in runs), strict=True)]
    expected = []
    for epoch in range(3):
        pairs = Pairs()
        pairs.set_epoch(epoch)
        drawn = list(pairs)
        expected += [[i for b in drawn[k : k + 2] for i in b] for k in range(0, 7, 2)]
    assert pools == expected
    oracle = Noting()
    trainer = rank_free(oracle, expected)
    for run in runs:
        assert run.updates == trainer.global_step == len(expected)
        assert run.weights.distance(weights(oracle)) < EXACT


def rank_free(module: Noting, batches: list[list[int]]) -> Trainer:
    """Trains in this process on just these batches."""
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, DataLoader(indexed(14), batch_sampler=batches))
    return trainer


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
