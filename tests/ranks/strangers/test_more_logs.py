"""More of strangers: what is logged, and torchmetrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    R2Score,
    SumMetric,
)
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score
from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef

from tests.ranks.strangers.kit import ENGINES, trainer
from tests.ranks.strangers.more_kit import DIVIDED, Small, batches, fit, numbers, right


def collection(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#13254, PL#15580: MetricCollection with compute groups, logged as a whole."""

    class Measured(Small):
        def __init__(self) -> None:
            super().__init__()
            both = MetricCollection(
                {"acc": BinaryAccuracy(), "f1": BinaryF1Score(), "matrix": BinaryAccuracy(threshold=0.4)}
            )
            self.train_metrics, self.val_metrics = both.clone(prefix="train/"), both.clone(prefix="val/")

        def step(self, batch: Any, metrics: Any) -> Any:
            x, y = batch
            out = self.net(x)
            metrics.update(out.sigmoid().flatten(), (y > 0).long().flatten())
            self.log_dict(metrics, on_step=False, on_epoch=True)
            return (out - y).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(batch, self.train_metrics)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, self.val_metrics)

    module = Measured()
    fits = fit(
        rank,
        world,
        engine,
        module,
        batches(numbers(), world),
        batches(numbers(), world, sampler=None),
        max_epochs=2,
    )
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())}}


def computed_by_hand(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torchmetrics#2231: metrics updated in steps, computed, logged and reset in on_train_epoch_end."""

    class Measured(Small):
        def __init__(self) -> None:
            super().__init__()
            self.auroc, self.pearson, self.r2 = BinaryAUROC(), PearsonCorrCoef(), R2Score()
            self.cat, self.most = CatMetric(), MaxMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            out = self.net(x)
            self.auroc.update(x[:, 0].sigmoid(), (y > 0).long().flatten())
            self.pearson.update(x[:, 0].float(), y.flatten().float())
            self.r2.update(x[:, 0].float(), y.flatten().float())
            self.cat.update(x[:, 0])
            self.most.update(x[:, 0])
            return (out - y).square().mean()

        def on_train_epoch_end(self) -> None:
            self.log_dict(
                {"auroc": self.auroc.compute(), "r": self.pearson.compute(), "r2": self.r2.compute()}
            )
            self.log("kept", self.cat.compute().sum())
            self.log("most", self.most.compute())
            for m in (self.auroc, self.pearson, self.r2, self.cat, self.most):
                m.reset()

    module = Measured()
    fits = fit(rank, world, engine, module, max_epochs=2)
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())}}


def tracked(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torchmetrics#718: MetricTracker over epochs, MinMaxMetric over validation."""

    class Tracked(Small):
        def __init__(self) -> None:
            super().__init__()
            self.tracker = MetricTracker(MeanSquaredError(), maximize=False)
            self.extremes = MinMaxMetric(MeanAbsoluteError())

        def on_train_epoch_start(self) -> None:
            self.tracker.increment()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            out = self.net(x)
            self.tracker.update(x[:, :1] * (1 + self.current_epoch), y)
            return (out - y).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.extremes.update(self.net(x), y)

        def on_validation_epoch_end(self) -> None:
            told = self.extremes.compute()
            self.log_dict({k: v for k, v in told.items()})

    module = Tracked()
    fits = fit(
        rank,
        world,
        engine,
        module,
        batches(numbers(), world),
        batches(numbers(), world, sampler=None),
        max_epochs=2,
    )
    best, which = module.tracker.best_metric(return_step=True)
    return {
        "told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())},
        "best": float(best),
        "which": which,
    }


def ignored_nan(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torchmetrics' documentation: MeanMetric(nan_strategy='ignore') weighted by rows, and SumMetric."""

    class Nan(Small):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.sum = MeanMetric(nan_strategy="ignore"), SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0]
            values = torch.where(x[:, 0] > 0, x[:, 0], torch.nan)
            self.mean.update(values)
            self.sum.update(len(x))
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            self.log("sum", self.sum, on_epoch=True, on_step=False)
            return self.loss(batch)

    module = Nan()
    fits = fit(rank, world, engine, module)
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())}}


def two_validation_loaders(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Lightning's documentation: log_dict with add_dataloader_idx=False and names of its own."""

    class Two(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.loss(batch)
            name = ["near", "far"][dataloader_idx]
            self.log_dict(
                {f"{name}/loss": loss, f"{name}/root": loss.sqrt()}, add_dataloader_idx=False, sync_dist=True
            )
            self.log("plain", loss, sync_dist=True)

    module = Two()
    loaders = [batches(numbers(n), world, sampler=None) for n in (16, 32)]
    fits = fit(rank, world, engine, module, batches(numbers(16), world), loaders)
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items()) if "root" not in k}}


def logged_everywhere(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#9791: self.log in hooks around the step."""

    class Everywhere(Small):
        def on_train_epoch_start(self) -> None:
            self.log("epoch_start", float(self.current_epoch))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("batch_start", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.log("zero", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log(
                "batch_end",
                outputs["loss"],
                on_step=False,
                on_epoch=True,
                sync_dist=True,
                batch_size=len(batch[0]),
            )

        def on_train_epoch_end(self) -> None:
            self.log("epoch_end", torch.tensor(float(self.global_step)), sync_dist=True)

    module = Everywhere()
    fits = fit(rank, world, engine, module, max_epochs=2)
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())}}


def own_metric(rank: int, world: int, engine: str) -> dict[str, Any]:
    """torchmetrics#338: a metric of one's own with lists of tensors, and an extreme."""

    class Lists(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("kept", default=[], dist_reduce_fx="cat")
            self.add_state("most", default=torch.tensor(-1e9), dist_reduce_fx="max")

        def update(self, x: Any) -> None:
            self.kept.append(x.detach().float())
            self.most = torch.maximum(self.most, x.max().float())

        def compute(self) -> Any:
            every = self.kept if isinstance(self.kept, torch.Tensor) else torch.cat(self.kept)
            return every.std() + self.most

    class Measured(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lists = Lists()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.lists(batch[0][:, 0])
            self.log("lists", self.lists, on_step=False, on_epoch=True)
            return self.loss(batch)

    module = Measured()
    fits = fit(rank, world, engine, module)
    return {"told": {k: v.double() for k, v in sorted(fits.callback_metrics.items())}}


def kept_metric(rank: int, world: int, engine: str) -> dict[str, Any]:
    """PL#20223: a metric that is never reset, computed by hand after each epoch; rank 1 has no samples."""
    told: list[float] = []

    class Kept(Small):
        def __init__(self) -> None:
            super().__init__()
            self.sum = SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sum.update(batch[0][:, 0])
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            told.append(float(self.sum.compute()))

    module = Kept()
    options = {**DIVIDED, "balanced": {"min_samples": [16, 0], "max_samples": [16, 1]}}
    trainer(rank, world, engine, options, max_epochs=2).fit(module, batches(numbers(32), world))
    return {"told": told}


@pytest.mark.stock_ddp("torchmetrics")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [collection, computed_by_hand, tracked, ignored_nan, own_metric])
@pytest.mark.short("collection", "computed_by_hand", "own_metric", "tracked-stale", "pipeline")
def test_metrics(situation: Any, engine: str) -> None:
    right(situation, engine, tolerance=1e-5)


@pytest.mark.stock_ddp("metric_kept")
@pytest.mark.parametrize("engine", ENGINES)
def test_kept_metric(engine: str) -> None:
    right(kept_metric, engine, tolerance=1e-5)


@pytest.mark.stock_ddp("log_anywhere")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("situation", [two_validation_loaders, logged_everywhere])
def test_logged(situation: Any, engine: str) -> None:
    right(situation, engine, tolerance=1e-6)
