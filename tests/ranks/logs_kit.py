"""A module that logs means of its samples' values in every way, and what one step or epoch of them must give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision, BinaryRecall

SAMPLES = 86


def values() -> Tensor:
    """One number per sample; float32 holds it and its sums exactly enough."""
    return torch.arange(SAMPLES, dtype=torch.float64).mul(0.37).cos()


class Logs(LightningModule):
    """Logs means of the samples' values in every way; keeps the values of its own samples per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.total = SumMetric()
        self.cat = CatMetric()
        self.scores = MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryRecall()])
        self.of_means = MeanMetric()
        self.weighted = MeanMetric()
        self.mine: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        dummy = self.trainer.strategy.current_samples() == 0  # type: ignore[attr-defined]
        self.mine.append([] if dummy else x.tolist())
        mean = x.mean() * (math.nan if dummy else 1.0)  # a dummy's NaN must not reach anything
        sync: dict[str, Any] = {"sync_dist": True, "on_step": True, "on_epoch": True}
        self.log("mean", mean, prog_bar=True, **sync)
        self.log("sized", mean, batch_size=len(x), **sync)
        self.log("plain", x.mean(), **{**sync, "on_step": False})
        self.log("sum", x.sum(), reduce_fx="sum", **sync)
        self.log("max", x.max(), reduce_fx="max", **sync)
        self.log("min", x.min(), reduce_fx="min", **sync)
        self.log("count", len(x), reduce_fx="sum", **sync)
        self.log("size", torch.tensor(len(x)), **sync)
        self.log("own", mean, on_step=True, on_epoch=False)
        self._metrics_step(x)
        return (self.weight * x).mean()

    def _metrics_step(self, x: Tensor) -> None:
        self.total(x)
        self.cat(x)
        self.scores(x.abs(), (x > 0).int())
        self.of_means(x.mean())
        self.weighted(x.mean(), weight=len(x))
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("of_means", self.of_means, on_step=False, on_epoch=True)
        self.log("weighted", self.weighted, on_step=False, on_epoch=True)
        self.log_dict(self.scores, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("cat_mean", self.cat.compute().mean())
        self.log("cat_size", float(self.cat.compute().numel()))
        self.log("at_end", float(self.global_rank), sync_dist=True)
        self.cat.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val", x.mean(), sync_dist=True, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def near(value: float) -> Any:
    return pytest.approx(value, abs=2e-6)  # Lightning accumulates in float32
