"""Pins what `lightning_compat.results` reads and replaces: values logged, metrics updated."""

from __future__ import annotations

import inspect
import io
import logging
import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryPrecision, BinaryRecall
from tqdm.auto import tqdm

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression
from tests.ranks.lightning_compat.kit import BATCH, SAMPLES, STEPS, VERSIONS, Ask, Each, Validated, fit, train


def test_log_interval() -> None:
    assert compat.log_interval(quiet_trainer(devices=1, log_every_n_steps=7)) == 7, VERSIONS


def test_batch_results_open() -> None:
    hooks = {
        "on_train_epoch_start": False,
        "on_train_batch_start": True,
        "on_before_backward": True,
        "on_train_batch_end": True,
        "on_train_epoch_end": False,
        "on_validation_batch_end": False,
        "on_validation_epoch_end": False,
    }
    ask = Ask(compat.batch_results_open, *hooks)
    trainer = fit(ask, val_check_interval=2)
    assert {hook: set(found) for hook, found in ask.answers.items()} == {h: {v} for h, v in hooks.items()}, VERSIONS
    assert not compat.batch_results_open(trainer)


class Logged(Validated):
    """Logs under the guard in the batches where ``dummies`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dummy = batch_idx % 2 == 1
        value = torch.tensor(math.nan if dummy else float(batch_idx))
        wild = torch.tensor(1e6 if dummy else float(batch_idx))
        if dummy:
            with compat.dummy_batch_unlogged(self.trainer):
                self._log_all(value, wild)
            self.outside.append("update_metrics" in vars(self.trainer._results))
        else:
            self._log_all(value, wild)
        return self.loss(batch)

    def _log_all(self, value: Tensor, wild: Tensor) -> None:
        where: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("mean", value, **where)
        self.log("sized", value, batch_size=3, **where)
        self.log("sum", wild, reduce_fx="sum", **where)
        self.log("max", wild, reduce_fx="max", **where)
        self.log("min", -wild, reduce_fx="min", **where)
        self.log("count", 5, reduce_fx="sum", **where)


def test_dummy_batch_unlogged() -> None:
    """Batches 0 and 2 count, 1 and 3 do not."""
    module = Logged()
    trainer = fit(module=module, limit_val_batches=0, max_epochs=1)
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert found == {"mean": 1.0, "sized": 1.0, "sum": 2.0, "max": 2.0, "min": -2.0, "count": 10.0}, VERSIONS
    assert module.outside == [False, False]


def test_dummy_batch_unlogged_outside_of_a_run() -> None:
    with compat.dummy_batch_unlogged(quiet_trainer(devices=1)):
        pass


def test_what_dummy_batch_unlogged_replaces() -> None:
    ask = Ask(lambda t: t._results, "on_train_batch_start")
    fit(ask, limit_val_batches=0, max_epochs=1)
    results = ask.answers["on_train_batch_start"][0]
    parameters = list(inspect.signature(type(results).update_metrics).parameters)
    assert parameters == ["self", "key", "value", "batch_size"], VERSIONS


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.cat, self.most = SumMetric(), CatMetric(), MaxMetric()
        self.scores = MetricCollection([BinaryPrecision(), BinaryRecall()])  # one compute group, shared states

    def update(self, *values: float) -> None:
        x = torch.tensor(values)
        for metric in (self.total, self.cat, self.most):
            metric(x)
        self.scores((x > 1.5).float(), torch.ones_like(x, dtype=torch.int))

    def results(self) -> list[float]:
        scores = self.scores.compute()
        return [float(self.total.compute()), float(self.cat.compute().sum()), float(self.most.compute()), *(
            float(scores[name]) for name in ("BinaryPrecision", "BinaryRecall")
        )]


@pytest.mark.parametrize("updates", [[(1.0,), (2.0, 3.0)], [(4.0,)]], ids=["known groups", "one update"])
@pytest.mark.parametrize("dummies_at", [(1,), (0, 1), (1, 1, 2)])
def test_metrics_frozen(updates: list[tuple[float, ...]], dummies_at: tuple[int, ...]) -> None:
    """Updates inside leave no trace, wherever they come: also first, when a collection forms its groups."""
    plain, guarded = Metrics(), Metrics()
    for i in range(len(updates) + 1):
        for _ in range(dummies_at.count(i)):
            before = [m._update_count for m in guarded.modules() if isinstance(m, torchmetrics.Metric)]
            with compat.metrics_frozen(guarded):
                guarded.update(100.0, -100.0)
            after = [m._update_count for m in guarded.modules() if isinstance(m, torchmetrics.Metric)]
            assert before == after, VERSIONS
        if i < len(updates):
            plain.update(*updates[i])
            guarded.update(*updates[i])
            assert guarded.results() == plain.results(), VERSIONS
    assert guarded.results() == plain.results(), VERSIONS


def test_metrics_frozen_keeps_the_cached_result() -> None:
    metric = SumMetric()
    metric.update(3.0)
    assert float(metric.compute()) == 3.0
    with compat.metrics_frozen(metric):
        metric.update(5.0)
        assert float(metric.compute()) == 8.0
    assert float(metric.compute()) == 3.0, VERSIONS


def test_save_metrics() -> None:
    metrics = Metrics()
    metrics.update(1.0, 2.0)
    put_back, expected = compat.save_metrics(metrics), metrics.results()
    metrics.update(100.0, -100.0)
    assert metrics.results() != expected
    put_back()
    assert metrics.results() == expected, VERSIONS


def test_metrics_of() -> None:
    metrics = Metrics()
    assert set(compat.metrics_of(metrics)) == {metrics.total, metrics.cat, metrics.most, *metrics.scores.values()}


class TakesBack(Logged):
    """What its batches 1 and 3 log counts for nothing in the epoch, though they are no dummies."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.undo: Any = None

    def on_train_start(self) -> None:
        self.undo = compat.watch_epoch_values(self.trainer, self.notes.append)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.notes.clear()
        self._log_all(torch.tensor(1.0 + 9.0 * (batch_idx % 2)), torch.tensor(1.0 + batch_idx % 2))
        if batch_idx % 2:
            for take_back in reversed(self.notes):
                take_back()
        return self.loss(batch)

    def on_train_end(self) -> None:
        self.undo()
        assert "update_metrics" not in vars(self.trainer.fit_loop.epoch_loop._results)


def test_watch_epoch_values() -> None:
    trainer = fit(module=TakesBack(), limit_val_batches=0, max_epochs=2)
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert found == {"mean": 1.0, "sized": 1.0, "sum": 2.0, "max": 1.0, "min": -1.0, "count": 10.0}, VERSIONS


class Rewinds(Toy):
    """Logs nonsense first, at which nobody must look."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        where: dict[str, Any] = {"on_step": True, "on_epoch": True}
        put_back = compat.save_logs(self.trainer), compat.save_metrics(self)
        for sign in (-1e6, 1.0):
            for kind in ("mean", "sum", "min", "max"):
                self.log(kind, sign * torch.tensor(batch_idx + 1.0), reduce_fx=kind, **where)
            self.metric(torch.tensor(sign))
            self.log("metric", self.metric, **where)
            if sign < 0:
                self.log(f"stray{batch_idx}", 1.0)
                for one in put_back:
                    one()
        return self.loss(batch)


def test_save_logs() -> None:
    """Also over epochs, whose first values reset what was collected."""
    found = train(Rewinds(), max_epochs=2).callback_metrics
    expected = {"mean": 2.5, "sum": 10.0, "min": 1.0, "max": 4.0, "metric": 4.0}
    assert {k: float(found[f"{k}_epoch"]) for k in expected} == expected, VERSIONS
    assert float(found["mean_step"]) == 4.0 and not any("stray" in name for name in found), VERSIONS


def test_a_patch_over_an_attribute_of_the_instance_is_undone() -> None:
    module = Toy()
    with patched(module, "lr", 1.0), patched(module, "loss", "once"):
        assert (module.lr, module.loss) == (1.0, "once")
    assert module.lr == 1e-2 and "loss" not in vars(module)


class Sized(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        where: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("mean", 1.0, **where)
        with compat.as_batch(self.trainer, torch.zeros(3 * BATCH, 2)):
            self.log("mean", 0.0, **where)
        self.log("mean", 1.0, **where)
        return self.loss(batch)


def test_as_batch() -> None:
    """What is logged inside counts the samples of the other batch."""
    assert float(train(Sized()).callback_metrics["mean"]) == pytest.approx(2 / 5)


class Weighed(Toy):
    """Logs batch by batch its number: by the number of its rows, or as if a constant were that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        where: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("inferred", float(batch_idx), **where)
        self.log("constant", float(batch_idx), batch_size=7, **where)
        self.log("own", float(batch_idx), batch_size=1, **where)
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_start(self) -> None:
        sizes = iter([1, 0, *[2] * STEPS])
        self.undo = compat.weigh_logs(self.trainer, lambda: next(sizes), lambda given: given == 7)

    def on_train_end(self) -> None:
        self.undo()


def test_weigh_logs() -> None:
    """Batch 0 counts 1, batch 1 nothing, the others 2 each."""
    trainer = train(Weighed())
    right = sum(2 * i for i in range(2, STEPS)) / (1 + 2 * (STEPS - 2))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert [found[name] for name in ("inferred", "constant", "hook")] == pytest.approx([right] * 3), VERSIONS
    assert found["own"] == pytest.approx((STEPS - 1) / 2), VERSIONS
    assert "_extract_batch_size" not in vars(trainer.fit_loop.epoch_loop._results)


class Counted(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.trained = [0, 0]

    def on_fit_start(self) -> None:
        self.undo = compat.count_throughput(self.trainer, lambda: (self.trained[0], self.trained[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained = [self.trained[0] + 5 * BATCH, self.trained[1] + 1]

    def on_fit_end(self) -> None:
        self.undo()


def throughput(rank: int, world: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []

    class Rows(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            rows.append(dict(metrics))

    monitor = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    arguments: dict[str, Any] = {"callbacks": [monitor], "logger": Rows("."), "log_every_n_steps": 1}
    trainer = rank_trainer(rank, world, DDPStrategy(process_group_backend="gloo"), **arguments)
    trainer.fit(Counted(), DataLoader(regression(SAMPLES), batch_size=BATCH // world))
    assert "_start" not in vars(monitor)
    return [row for row in rows if "train/samples_per_sec" in row]


def test_count_throughput() -> None:
    rows = run_ranks(2, throughput)[0]
    assert rows, VERSIONS
    for row in rows:
        batches = row["train/batches_per_sec"] / 2
        assert row["train/samples_per_sec"] == pytest.approx(5 * BATCH * batches), VERSIONS
        assert row["train/device/samples_per_sec"] == pytest.approx(BATCH // 2 * batches), VERSIONS


class Names(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("synced", loss, sync_dist=True, on_step=False, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("zero", loss, sync_dist=True, rank_zero_only=True, on_step=False, on_epoch=True)
        self.log("own", loss, on_step=False, on_epoch=True)
        self.log("step", loss, sync_dist=True, on_step=True, on_epoch=False)
        self.metric(loss)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(regression(SAMPLES), batch_size=BATCH)

    def on_validation_epoch_end(self) -> None:
        self.validated = compat.reduced_names(self.trainer)

    def on_train_epoch_end(self) -> None:
        self.trained = compat.reduced_names(self.trainer)


def names(rank: int, world: int) -> tuple[list[str], list[str]]:
    module = Names()
    trainer = rank_trainer(rank, world, "ddp", max_epochs=1)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return module.trained, module.validated


def test_reduced_names() -> None:
    assert run_ranks(2, names) == [(["training_step.metric", "training_step.synced"], ["validation_step.val"])] * 2
    assert compat.reduced_names(quiet_trainer(devices=1)) == []


def test_show_on_progress_bar() -> None:
    """It is on the bar from then on, beside what is logged there, and in no other place; the next fit forgets it."""
    bars: list[dict[str, Any]] = []

    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("own", float(batch_idx), prog_bar=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            bars.append(dict(self.trainer.progress_bar_metrics))

    show = Each(lambda t: compat.show_on_progress_bar(t, "shown", "7/9") if t.global_step == 1 else None)
    trainer = train(Logs(), show, logger=False)
    assert bars == [{"own": 0.0}, *({"own": float(i), "shown": "7/9"} for i in range(1, STEPS))], VERSIONS
    assert set(trainer.callback_metrics) == {"own"} and "shown" not in trainer.logged_metrics, VERSIONS
    trainer.fit_loop.max_epochs = 2
    bars.clear()
    trainer.fit(Logs(), DataLoader(regression(SAMPLES), batch_size=BATCH))
    assert bars[0].keys() == {"own"}, VERSIONS


@pytest.mark.parametrize("kind", ["rich", "tqdm", "none"])
def test_tell_past_bar(kind: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Above a bar that is being drawn, though Lightning's handler writes to what was ``sys.stderr`` before."""
    screen, logger = io.StringIO(), logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(screen)])
    monkeypatch.setattr(logger, "propagate", False)
    request.addfinalizer(partial(logger.setLevel, logger.level))  # which another test may have raised
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    if kind == "rich":
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=screen, force_terminal=True), auto_refresh=False) as bar:
            bar.add_task("Epoch", total=3)
            bar.refresh()
            compat.tell_past_bar("rank 1 is slow")
        drawn, told = screen.getvalue().split("rank 1 is slow")
        assert drawn.endswith("\x1b[2K") and "Epoch" in told  # the line is erased, and drawn again below
    elif kind == "tqdm":
        with tqdm(total=3, file=sys.stderr, desc="Epoch"):
            compat.tell_past_bar("rank 1 is slow")
        drawn, told = screen.getvalue().split("rank 1 is slow")
        assert drawn.endswith(" \r") and "Epoch" in told
    else:
        compat.tell_past_bar("rank 1 is slow")
        assert screen.getvalue() == "rank 1 is slow\n"
    assert [handler.stream for handler in logger.handlers] == [screen], VERSIONS


def test_unlogged() -> None:
    """Outside of a hook Lightning refuses ``self.log``; inside of this nothing is logged."""
    module = Toy()
    module.trainer = quiet_trainer(devices=1)
    with compat.unlogged(module):
        module.log("a", 1.0)
        module.log_dict({"b": 2.0})
    assert "log" not in vars(module) and not module.trainer.callback_metrics
