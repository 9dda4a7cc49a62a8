"""Lightning's own callbacks, tuners and entry points under the balanced strategy."""

from __future__ import annotations

import csv
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import StragglerMonitor
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH = 80, 16
EXACT = 1e-12


class Full(Toy):
    """With validation, test, prediction and a scheduler."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(batch_size: int = BATCH // 2, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch_size)


def entries_job(rank: int, world: int) -> dict[str, Any]:
    """fit -> validate -> test -> predict -> fit with one Trainer and one strategy."""
    module = Full()
    trainer = rank_trainer(rank, world, balanced(), max_epochs=2)
    said: dict[str, Any] = {}
    trainer.fit(module, loader(), loader(5))
    said["first"] = weights(module)
    said["validate"] = trainer.validate(module, loader(5), verbose=False)[0]["val"]
    said["test"] = trainer.test(module, loader(5), verbose=False)[0]["test"]
    predicted = trainer.predict(module, loader(5))
    assert predicted is not None
    said["predicted"] = sum(len(p) for p in predicted)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader(), loader(5))
    said["second"] = weights(module)
    said["steps"] = trainer.global_step
    dry = Trainer(accelerator="cpu", devices=world, strategy=balanced(), plugins=[RankEnvironment(rank, world)],
                  fast_dev_run=True, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    dry.fit(Full(), loader(), loader(5))
    said["dry"] = dry.global_step
    return said


@pytest.mark.stock_ddp("entry_points", "balanced")
def test_every_entry_point_in_one_process() -> None:
    module, data = Full(), regression(SAMPLES)
    trainer = single(module, data, BATCH, max_epochs=2)
    first = weights(module)
    with torch.no_grad():
        loss = float(module.loss(data.tensors))
    trainer.fit_loop.max_epochs = 4
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    trainer.fit(module, DataLoader(data, batch_size=BATCH, sampler=sampler))
    for said in run_ranks(2, entries_job):
        assert said["first"].distance(first) <= EXACT
        assert said["validate"] == pytest.approx(loss) and said["test"] == pytest.approx(loss)
        assert said["predicted"] == SAMPLES // 2
        assert said["steps"] == 20 and said["second"].distance(weights(module)) <= EXACT
        assert said["dry"] == 1


def callbacks_job(rank: int, world: int, folder: str) -> dict[str, Any]:
    module = Full(lr=3e-3)
    best = ModelCheckpoint(f"{folder}/best", monitor="val", save_top_k=1, filename="best")
    stop = EarlyStopping("val", patience=2, min_delta=10.0)  # nothing improves by that much: stops at epoch 2
    trainer = rank_trainer(
        rank, world, balanced(), max_epochs=9, enable_checkpointing=True, log_every_n_steps=1,
        callbacks=[best, stop, LearningRateMonitor("step"), TQDMProgressBar(refresh_rate=1), StragglerMonitor()],
        logger=CSVLogger(folder, name="", version="csv"), profiler="simple", enable_progress_bar=True,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(5))
    return {
        "epochs": trainer.current_epoch,
        "best": best.best_model_path,
        "score": float(best.best_model_score or 0),
    }


@pytest.mark.stock_ddp("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "ProgressBar", "balanced")
def test_lightnings_callbacks_loggers_and_profiler(tmp_path: Path) -> None:
    said = run_ranks(2, callbacks_job, str(tmp_path))
    assert said[0] == said[1]  # one decision on all ranks
    assert said[0]["epochs"] == 3 and Path(said[0]["best"]).exists() and math.isfinite(said[0]["score"])
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"loss_step", "loss_epoch", "val", "lr-Adam", "hetero/imbalance", "hetero/share/rank1"} <= rows[
        0
    ].keys()
    rates = {float(row["lr-Adam"]) for row in rows if row["lr-Adam"]}
    assert rates == {3e-3, 1.5e-3, 0.75e-3}


def accumulating_job(rank: int, world: int) -> tuple[Weights, Weights, int]:
    module, averaged = Toy(), Toy()
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 3: 5})
    trainer = rank_trainer(rank, world, balanced(), max_epochs=4, callbacks=[schedule])
    trainer.fit(module, loader())
    steps = trainer.global_step
    swa = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)
    rank_trainer(rank, world, balanced(), max_epochs=4, callbacks=[swa]).fit(averaged, loader())
    return weights(module), weights(averaged), steps


@pytest.mark.stock_ddp("GradientAccumulationScheduler", "StochasticWeightAveraging", "balanced")
def test_accumulation_schedules_and_weight_averaging_match_one_process() -> None:
    scheduled, averaged = Toy(), Toy()
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 3: 5})
    single(scheduled, regression(SAMPLES), BATCH, max_epochs=4, callbacks=[schedule])
    swa = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)
    single(averaged, regression(SAMPLES), BATCH, max_epochs=4, callbacks=[swa])
    for ours, ours_averaged, steps in run_ranks(2, accumulating_job):
        assert steps == 5 + 3 + 3 + 1
        assert ours.distance(weights(scheduled)) <= EXACT
        assert ours_averaged.distance(weights(averaged)) <= EXACT


class Zero(Toy):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes long to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=self.lr)


class OneAdam(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def zero_job(rank: int, world: int) -> tuple[Weights, Weights]:
    """Trained in one go; and stopped after an epoch, saved, and resumed."""
    module, resumed = Zero(), Zero()
    rank_trainer(rank, world, balanced(), max_epochs=2).fit(module, loader())
    first = rank_trainer(rank, world, balanced(), max_epochs=1)
    first.fit(Zero(), loader())
    first.save_checkpoint("zero.ckpt")
    rank_trainer(rank, world, balanced(), max_epochs=2).fit(resumed, loader(), ckpt_path="zero.ckpt")
    return weights(module), weights(resumed)


@pytest.mark.stock_ddp("zero", "balanced")
def test_zero_trains_and_resumes_as_one_process_does() -> None:
    expected = OneAdam()
    single(expected, regression(SAMPLES), BATCH, max_epochs=2)
    for trained, resumed in run_ranks(2, zero_job):
        assert trained.distance(weights(expected)) <= EXACT
        assert resumed.distance(weights(expected)) <= EXACT


class Sized(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return loader(self.batch_size)


def tuner_job(rank: int, world: int) -> tuple[float | None, int, str, Weights]:
    gc.collect()
    module = Sized()
    trainer = rank_trainer(rank, world, balanced(), max_epochs=2, enable_checkpointing=True)
    found = Tuner(trainer).lr_find(module, num_training=12, update_attr=False)
    assert found is not None
    # As a callback the finder trains inside the fit, which then starts over: nothing of the search may remain.
    rate = LearningRateFinder(num_training_steps=12, update_attr=False)
    after = Toy()
    trainer = rank_trainer(rank, world, balanced(), max_epochs=2, enable_checkpointing=True, callbacks=[rate])
    trainer.fit(after, loader())
    with pytest.raises(ValueError) as error:
        Tuner(rank_trainer(rank, world, balanced(), max_epochs=1)).scale_batch_size(module, max_trials=1)
    return (
        found.suggestion(skip_begin=1, skip_end=1), len(found.results["lr"]), str(error.value), weights(after)
    )


@pytest.mark.stock_ddp("LearningRateFinder", "balanced")
def test_the_learning_rate_finder_works_and_batch_scaling_is_lightnings_refusal() -> None:
    oracle = Toy()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=2)
    first, second = run_ranks(2, tuner_job)
    rate, count, message, _ = first
    assert count >= 10 and rate is not None
    assert second[:3] == first[:3]
    for *_, after in (first, second):
        assert after.distance(weights(oracle)) <= EXACT
    assert "not supported with distributed strategies" in message
