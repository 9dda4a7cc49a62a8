"""Our callbacks' values, and Lightning's own callbacks and entry points under the strategy."""

from __future__ import annotations

import csv
import gc
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero import BatchRebalancer, LoadBalancedStrategy, StragglerMonitor
from lightning_hetero.balanced.policy import Decision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Scripted, Toy, Weights, balanced, rank_trainer, regression, single, weights

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


# ---- StragglerMonitor --------------------------------------------------------------------------------------


class Seen(Callback):
    """Notes the logged ``hetero/*`` values after every batch and epoch, and the step they were measured on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.reports: list[Any] = []
        self.bars: list[set[str]] = []
        self.epochs: list[dict[str, float]] = []
        self.summary: str | None = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append({k: float(v) for k, v in trainer.logged_metrics.items() if k.startswith("hetero/")})
        self.bars.append(set(trainer.progress_bar_metrics))
        self.reports.append(
            trainer.strategy.step_report() if hasattr(trainer.strategy, "step_report") else None
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(trainer.strategy, "summary"):
            self.summary = trainer.strategy.summary()
        self.epochs.append(
            {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("hetero/")}
        )


def monitor_job(rank: int, world: int) -> tuple[Seen, Seen]:
    ours, stock = Seen(), Seen()
    for seen, strategy in ((ours, balanced()), (stock, DDPStrategy(process_group_backend="gloo"))):
        callbacks = [StragglerMonitor(every_n_steps=2), seen]
        options = {"max_epochs": 2, "log_every_n_steps": 1, "logger": CSVLogger(type(strategy).__name__)}
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, **options)
        trainer.fit(Toy(), loader())
    return ours, stock


def silent_job(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in (balanced(), DDPStrategy(process_group_backend="gloo")):
            callbacks = [StragglerMonitor(every_n_steps=2)]
            rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=1).fit(Toy(), loader())
    return [str(w.message) for w in caught if "hetero/" in str(w.message)]


def test_without_a_logger_nothing_is_warned_of() -> None:
    assert run_ranks(2, silent_job) == [[], []]


@pytest.fixture(scope="module")
def monitored() -> list[tuple[Seen, Seen]]:
    return run_ranks(2, monitor_job)


NAMES = ("share", "compute_s", "wait_s", "score")


def keys(names: Sequence[str]) -> set[str]:
    of_each = {f"hetero/{name}/{who}" for name in names for who in ("rank0", "rank1", "max", "min")}
    return of_each | {"hetero/imbalance"}


def check_derived(values: dict[str, float]) -> None:
    """Scores, extremes and imbalance follow from the logged times (float32 in the logs)."""
    times = [values[f"hetero/compute_s/rank{r}"] for r in range(2)]
    shares = [max(1.0, values[f"hetero/share/rank{r}"]) for r in range(2)]
    assert min(times) > 0
    speeds = [n / t for n, t in zip(shares, times, strict=True)]
    scores = [values[f"hetero/score/rank{r}"] for r in range(2)]
    assert scores == pytest.approx([s / max(speeds) for s in speeds], rel=1e-5)
    assert values["hetero/imbalance"] == pytest.approx(2 * max(times) / sum(times), rel=1e-5)
    for name in NAMES:
        both = [values[f"hetero/{name}/rank{r}"] for r in range(2)]
        assert (values[f"hetero/{name}/max"], values[f"hetero/{name}/min"]) == (max(both), min(both))


def test_the_monitor_logs_what_the_ranks_have_exchanged(monitored: list[tuple[Seen, Seen]]) -> None:
    for ours, _ in monitored:
        logged = [(values, report) for values, report in zip(ours.steps, ours.reports, strict=True) if values]
        assert len(ours.steps) == 10 and logged
        for values, report in logged:
            assert values.keys() in (keys(NAMES), keys((*NAMES, "predicted_s")))
            check_derived(values)
            assert sum(values[f"hetero/share/rank{r}"] for r in range(2)) >= BATCH
            assert report is not None
        assert logged[-1][0].keys() == keys((*NAMES, "predicted_s"))
        assert "hetero/imbalance" in ours.bars[-1]
    first, second = monitored
    assert first[0].steps == second[0].steps  # the same on every rank


def test_the_monitor_logs_every_n_steps_and_at_the_end_of_an_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    """Values of step 2k stay in ``logged_metrics`` during step 2k + 1, unless that is the last of 5 batches."""
    for ours, _ in monitored:
        changed = [i for i in range(2, 11) if ours.steps[i - 1] != ours.steps[i - 2]]
        assert set(changed) <= {2, 4, 5, 6, 8, 10}
        assert 5 in changed


def test_with_stock_ddp_the_monitor_logs_means_of_the_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    for _, stock in monitored:
        assert not stock.steps[0]
        (values,) = stock.epochs
        assert values.keys() == keys(NAMES)  # nothing is predicted there
        check_derived(values)
        assert [values[f"hetero/share/rank{r}"] for r in range(2)] == [BATCH / 2] * 2
    assert monitored[0][1].epochs == monitored[1][1].epochs


def test_the_last_line_tells_the_shares(monitored: list[tuple[Seen, Seen]]) -> None:
    pattern = (
        r"hetero_balanced: shares (\d+)/(\d+), [\d.]+ ms of work per batch;"
        r" equal shares would take [\d.]+ times as long"
    )
    for ours, _ in monitored:
        assert ours.summary is not None
        found = re.fullmatch(pattern, ours.summary)
        assert found and int(found[1]) + int(found[2]) == BATCH
    assert monitored[0][0].summary == monitored[1][0].summary


def test_the_monitor_refuses_a_bad_interval() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=0 must be at least 1"):
        StragglerMonitor(every_n_steps=0)


def added_job(rank: int, world: int) -> list[list[str]]:
    found = []
    for strategy, callbacks in (
        (LoadBalancedStrategy(), []),
        (LoadBalancedStrategy(monitor=False), []),
        (LoadBalancedStrategy(), [StragglerMonitor(), BatchRebalancer()]),
    ):
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=1)
        for _ in range(2):  # a second fit adds nothing more
            trainer.fit(Toy(), loader())
        names = [type(c).__name__ for c in vars(trainer)["callbacks"]]
        found.append(sorted(n for n in names if n in ("BatchRebalancer", "StragglerMonitor")))
    return found


def test_the_monitor_is_added_once_unless_given_or_declined() -> None:
    both = ["BatchRebalancer", "StragglerMonitor"]
    assert run_ranks(2, added_job) == [[["StragglerMonitor"], [], both]] * 2


# ---- BatchRebalancer ---------------------------------------------------------------------------------------


class Counting(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def observe(self, records: Sequence[SpeedSample]) -> Decision:
        self.asked += 1
        return super().observe(records)


class SwitchOff(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.strategy.rebalancer.enabled = False


class Shares(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.strategy.shares)


def rebalancer_job(rank: int, world: int) -> list[tuple[int, list[tuple[int, ...]], Weights]]:
    results = []
    for own, strategy, off in (
        (Counting(), balanced(), False),  # the callback's policy replaces the strategy's
        (Counting(), balanced(), True),
        (None, balanced(rebalance=False), False),
    ):
        shares, module = Shares(), Toy()
        callbacks = [shares, *([BatchRebalancer(own)] if own else []), *([SwitchOff()] if off else [])]
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=2)
        trainer.fit(module, loader())
        results.append((own.asked if own else 0, shares.seen, weights(module)))
    return results


def test_the_rebalancer_brings_its_own_policy_and_can_be_switched_off() -> None:
    oracle = Toy()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=2)
    for given, switched, never in run_ranks(2, rebalancer_job):
        assert given[0] == 10 and len(set(given[1])) > 3
        assert switched[0] == 3 and len(set(switched[1][4:])) == 1 and len(set(switched[1])) > 1
        assert set(never[1]) == {(BATCH // 2, BATCH // 2)}
        for _, _, final in (given, switched, never):
            assert final.distance(weights(oracle)) <= EXACT


# ---- Lightning's own callbacks and entry points ------------------------------------------------------------


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
        rank, world, balanced(monitor=True), max_epochs=9, enable_checkpointing=True, log_every_n_steps=1,
        callbacks=[best, stop, LearningRateMonitor("step"), TQDMProgressBar(refresh_rate=1)],
        logger=CSVLogger(folder, name="", version="csv"), profiler="simple", enable_progress_bar=True,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(5))
    return {
        "epochs": trainer.current_epoch,
        "best": best.best_model_path,
        "score": float(best.best_model_score or 0),
    }


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
        found.suggestion(skip_begin=1, skip_end=1),
        len(found.results["lr"]),
        str(error.value),
        weights(after),
    )


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
