"""What micro-batches on the leaders log is logged once, alike on all ranks, as by one process with the whole batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import PearsonCorrCoef

from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, regression
from tests.ranks.pipeline.kit import Deep, pipeline

SAMPLES, BATCH, CLASSES = 52, 12, 3
# Rank 0 is a member, rank 3 rests.
PLAN = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "micro_batches": [3, 1], "depths": [2, 1]},
                   {"ranks": [2], "cuts": [0, 6], "micro_batches": [2, 4, 2]}]}  # fmt: skip


class Notes(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append((kwargs["step"], {k: float(v) for k, v in kwargs["metrics"].items()}))


class Logging(Deep):
    """Logs in all the ways there are; nothing is learned."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.accuracy, self.epoch_accuracy, self.val_accuracy = (
            MulticlassAccuracy(CLASSES, average="micro") for _ in range(3)
        )
        self.auroc = MulticlassAUROC(CLASSES, average="macro", thresholds=None)  # keeps rows, and whole numbers
        self.binary = BinaryAUROC(thresholds=None)
        self.pearson = PearsonCorrCoef()  # states that are stacked, not summed
        self.cat, self.mean = CatMetric(), MeanMetric()
        self.both = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)])
        self.unlogged = MeanMetric()
        self.ends: list[float] = []

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:  # a user's own
        super().log(f"my/{name}", *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        value = x.mean()
        twice = {"on_step": True, "on_epoch": True}
        self.log("mean", value, prog_bar=True, **twice)
        loss = self.loss(batch)  # others log meanwhile
        self.log("mean", 2 * value, prog_bar=True, **twice)
        self.log("sum", x.sum(), reduce_fx="sum", **twice)
        self.log_dict({"max": x.max(), "nothing": math.nan}, reduce_fx="max", **twice)
        self.log("min", x.min().float(), reduce_fx="min", sync_dist=True, **twice)
        self.log("tokens", value, batch_size=int(3 * len(x)), on_epoch=True)
        if bool((x[:, 0] > 1.2).any()):  # some micro-batches only
            self.log("seldom", x[:, 0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.scores(x, y, **twice)
        return loss

    def scores(self, x: Tensor, y: Tensor, **twice: Any) -> None:
        scores, label = x[:, :CLASSES].softmax(1), (y[:, 0] > 0).long() + (y[:, 0] > 0.5).long()
        self.accuracy(scores, label)
        self.log("accuracy", self.accuracy, **twice)
        self.epoch_accuracy.update(scores, label)
        self.log("epoch_accuracy", self.epoch_accuracy)
        self.auroc.update(scores, label)
        self.binary.update(scores[:, 0], (label > 0).long())
        self.pearson.update(x[:, 0], y[:, 0])
        self.cat.update(x[:, 1].sort().values[:1])
        self.mean.update(x[:, 0].mean(), weight=len(x))
        self.both.update(scores, label)
        self.unlogged.update(x[:, 2].mean(), weight=len(x))
        kept = {"on_step": False, "on_epoch": True}
        self.log_dict({"auroc": self.auroc, "binary": self.binary, "pearson": self.pearson, "avg": self.mean}, **kept)
        self.log_dict(self.both, **kept)

    def on_train_epoch_end(self) -> None:
        self.ends += [float(self.unlogged.compute()), float(torch.as_tensor(self.cat.compute()).sort().values[0])]
        self.unlogged.reset()
        self.cat.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        x, y = batch
        self.log("val", x.mean(), prog_bar=True)
        self.log("val_max", x.max(), reduce_fx="max", on_step=True)
        if dataloader_idx == 1:
            self.val_accuracy.update(x[:, :CLASSES].softmax(1), (y[:, 0] > 0).long())
            self.log("val_accuracy", self.val_accuracy, add_dataloader_idx=False)


def fitted(rank: int, world: int) -> tuple[Any, ...]:
    notes, module = Notes(), Logging()
    options = {"max_epochs": 2, "log_every_n_steps": 1, "logger": notes if rank == 0 else False}
    alone = world == 1
    trainer = quiet_trainer(devices=1, **options) if alone else rank_trainer(rank, world, pipeline(PLAN), **options)
    val = [DataLoader(regression(20, seed=s), batch_size=12 // world) for s in (5, 6)]  # the second one of 8
    shown: list[Any] = []
    module.on_train_batch_end = lambda *_: shown.append(  # type: ignore[method-assign]
        {k: float(v) for k, v in {**trainer.callback_metrics, **trainer.progress_bar_metrics}.items()}
    )
    with warnings.catch_warnings():
        if not alone:
            warnings.filterwarnings("error", message=".*(sync_dist|before the ``update``).*")
        data = regression(SAMPLES)
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=0) if alone else None  # as stock DDP's
        trainer.fit(module, DataLoader(data, batch_size=BATCH // world, shuffle=not alone, sampler=sampler), val)
    assert all("_sync_dist" not in vars(m) for m in module.modules())
    return notes.lines, {k: float(v) for k, v in trainer.callback_metrics.items()}, module.ends, shown


def same(ours: dict[str, float], theirs: dict[str, float]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name


@pytest.mark.stock_ddp("log_epoch", "log_step", "pipeline")
def test_loggers_callbacks_and_hooks_see_what_one_process_logs() -> None:
    ours, theirs = run_ranks(4, fitted, timeout_s=60), fitted(0, 1)
    assert [step for step, _ in ours[0][0]] == [step for step, _ in theirs[0]]
    for (_, a), (_, b) in zip(ours[0][0], theirs[0], strict=True):
        same(a, b)
    assert all(str(run[1:]) == str(ours[0][1:]) for run in ours)
    same(ours[0][1], theirs[1])
    assert ours[0][2] == pytest.approx(theirs[2])
    for a, b in zip(ours[0][3], theirs[3], strict=True):
        same(a, b)
    assert {"my/seldom", "my/mean_step", "my/mean_epoch", "my/val_accuracy"} <= theirs[1].keys()
    assert {"my/val/dataloader_idx_0", "my/val/dataloader_idx_1"} <= theirs[1].keys()


# ---- errors are Lightning's own --------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "single element": lambda module, batch: module.log("a", batch[0]),
    "reduce_fx": lambda module, batch: module.log("a", 1.0, reduce_fx=torch.median),
    "twice in `training_step`": lambda module, batch: [module.log("a", 1.0, on_epoch=e) for e in (True, False)],
    "doesn't support logging": lambda module, batch: module.log("a", 1.0),
}


class Wrong(Deep):
    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        WRONG[self.reason](self, batch)
        return self.loss(batch)

    predict_step = training_step


def errors(rank: int, world: int, reason: str) -> str:
    plan = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "micro_batches": [6, 6]}]}
    trainer = rank_trainer(rank, world, pipeline(plan), max_epochs=1)
    run = trainer.predict if "support" in reason else trainer.fit
    with pytest.raises(Exception) as error:
        run(Wrong(reason), DataLoader(regression(12), batch_size=6))
    return str(error.value)


@pytest.mark.parametrize("reason", WRONG)
def test_lightnings_errors_stay(reason: str) -> None:
    for error in run_ranks(2, errors, reason):
        assert reason in error
