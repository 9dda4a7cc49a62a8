"""Logged values: what `self.log` reports under uneven shares is the true value over the samples, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, rank_trainer
from tests.ranks.logs_kit import SAMPLES, Logs, near, values

BATCH, EPOCHS = 18, 2  # four batches and a tail of 14 per epoch
STEPS = 5


class Report(Callback):
    """Collects what callbacks and the progress bar see: after each step, and each epoch's when it is complete."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.bars: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(numbers(trainer))
        self.bars.append(float(trainer.progress_bar_metrics["mean_step"]))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            self.epochs.append(numbers(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(numbers(trainer))


def numbers(trainer: Any) -> dict[str, float]:
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


Seen = dict[str, Any]


def logged(rank: int, world: int, args: dict[str, Any]) -> Seen:
    report, module = Report(), Logs()
    trainer = rank_trainer(rank, world, balanced(**args), max_epochs=EPOCHS, callbacks=[report])
    train = DataLoader(TensorDataset(values()), batch_size=BATCH // world)
    valid = DataLoader(TensorDataset(values()[:50]), batch_size=4)
    trainer.fit(module, train, valid)
    return {"steps": report.steps, "bars": report.bars, "epochs": report.epochs, "mine": module.mine}


@pytest.fixture(scope="module", params=[(2, 1), (3, 0)], ids=["2 ranks", "3 ranks, some without samples"])
def seen(request: pytest.FixtureRequest) -> list[Seen]:
    world, least = request.param
    return run_ranks(world, logged, {"min_samples": least})


def batches(seen: list[Seen]) -> list[list[list[float]]]:
    """The values each rank trained on: step, rank, sample."""
    return [list(step) for step in zip(*(one["mine"] for one in seen), strict=True)]


def flat(step: list[list[float]]) -> list[float]:
    return [v for part in step for v in part]


def test_shares_differ_and_change(seen: list[Seen]) -> None:
    sizes = [tuple(len(part) for part in step) for step in batches(seen)]
    assert len(sizes) == EPOCHS * STEPS
    assert len(set(sizes)) >= 5
    assert [sum(s) for s in sizes[:STEPS]] == [18, 18, 18, 18, 14]
    if len(seen) == 3:
        assert any(0 in s for s in sizes)


@pytest.mark.stock_ddp("log_step", "balanced")
def test_means_per_step_count_samples(seen: list[Seen]) -> None:
    apart = 0.0
    for t, step in enumerate(batches(seen)):
        true = math.fsum(flat(step)) / len(flat(step))
        for one in seen:
            assert one["steps"][t]["mean_step"] == near(true)
            assert one["steps"][t]["sized_step"] == near(true)
            assert one["bars"][t] == near(true)
        of_ranks = [math.fsum(part) / len(part) for part in step if part]
        apart = max(apart, abs(math.fsum(of_ranks) / len(of_ranks) - true))
    assert apart > 1e-2, "the plain mean of ranks would have passed too"


@pytest.mark.stock_ddp("log_epoch", "balanced")
def test_means_per_epoch_count_samples(seen: list[Seen]) -> None:
    """86 samples: their number per rank, averaged over the ranks, is not whole for 3 ranks."""
    true = float(values().mean())
    for one in seen:
        for epoch in one["epochs"]:
            for name in ("mean_epoch", "sized_epoch", "plain"):
                assert epoch[name] == near(true), name


def test_sums_and_extremes(seen: list[Seen]) -> None:
    for t, step in enumerate(batches(seen)):
        for one in seen:
            got = one["steps"][t]
            assert got["sum_step"] == near(math.fsum(flat(step)))
            assert got["count_step"] == len(flat(step))
            # `reduce_fx` is an operation over the ranks, per step as per epoch
            assert got["max_step"] == near(max(flat(step)))
            assert got["min_step"] == near(min(flat(step)))
    for one in seen:
        for epoch in one["epochs"]:
            assert epoch["sum_epoch"] == pytest.approx(float(values().sum()), abs=2e-5)
            assert epoch["count_epoch"] == SAMPLES
            assert epoch["max_epoch"] == near(float(values().max()))
            assert epoch["min_epoch"] == near(float(values().min()))


@pytest.mark.stock_ddp("torchmetrics", "balanced")
def test_torchmetrics_states_are_exact(seen: list[Seen]) -> None:
    """Summed and concatenated states count each sample once, a dummy batch never."""
    x = values()
    positive, called = x > 0, x.abs() > 0.5
    hits = float((positive & called).sum())
    for one in seen:
        for epoch in one["epochs"]:
            assert epoch["total"] == pytest.approx(float(x.sum()), abs=2e-5)
            assert epoch["cat_size"] == SAMPLES
            assert epoch["cat_mean"] == near(float(x.mean()))
            assert epoch["BinaryAccuracy"] == near(float((positive == called).double().mean()))
            assert epoch["BinaryPrecision"] == near(hits / float(called.sum()))
            assert epoch["BinaryRecall"] == near(hits / float(positive.sum()))
            assert epoch["weighted"] == near(float(x.mean()))


def squared(batch: Any) -> float:
    return float(len(batch[0]) ** 2)


def test_means_per_step_count_the_users_unit() -> None:
    """With ``batch_weight`` a step's mean is the one the loss takes; an epoch's counts ``batch_size``, as ever."""
    seen = run_ranks(2, logged, {"batch_weight": squared})
    for t, step in enumerate(batches(seen)):
        weights = [len(part) ** 2 for part in step]
        of_ranks = [math.fsum(part) / len(part) for part in step]
        true = math.fsum(w * v for w, v in zip(weights, of_ranks, strict=True)) / sum(weights)
        assert all(one["steps"][t]["mean_step"] == near(true) for one in seen)
    assert all(epoch["mean_epoch"] == near(float(values().mean())) for one in seen for epoch in one["epochs"])
