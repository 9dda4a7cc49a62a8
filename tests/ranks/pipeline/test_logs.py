"""What micro-batches on the leaders log is logged once, alike on all ranks, as by one process with the whole batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import PearsonCorrCoef

from lightning_hetero import lightning_compat as compat
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.runtime.step.resumable import Carrier, Done, ResumableStep, current_step
from lightning_hetero.transport.side_channel import SideChannel
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Toy, quiet_trainer, regression

SAMPLES, BATCH, CLASSES = 50, 12, 3
MICRO = {1: (3, 1), 2: (2, 4, 2)}  # micro-batches by leader; rank 0 is a member, rank 3 rests


class Notes(DummyLogger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.lines.append((kwargs["step"], {k: float(v) for k, v in kwargs["metrics"].items()}))


class Logging(LightningModule):
    """Logs in all the ways there are; nothing is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
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
        if (step := current_step()) is not None:
            step.suspend(None)  # others log meanwhile
        self.log("mean", 2 * value, prog_bar=True, **twice)
        self.log("sum", x.sum(), reduce_fx="sum", **twice)
        self.log_dict({"max": x.max(), "nothing": math.nan}, reduce_fx="max", **twice)
        self.log("min", x.min().float(), reduce_fx="min", sync_dist=True, **twice)
        self.log("tokens", value, batch_size=int(3 * len(x)), on_epoch=True)
        if bool((x[:, 0] > 1.2).any()):  # some micro-batches only
            self.log("seldom", x[:, 0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.scores(x, y, **twice)
        return self.weight.sum() * 0

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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Piped(DDPStrategy):
    """Leaders run the steps in micro-batches, or on their part of a validation batch; the others only log."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        group = torch.distributed.new_group(backend="gloo")
        assert isinstance(group, torch.distributed.ProcessGroup)
        assert self.lightning_module is not None
        self.carrier = Carrier()
        self.channel = SideChannel(group)
        self.logs = StepLogs(self.lightning_module, self.channel)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        module, rank = self.lightning_module, self.global_rank
        assert module is not None
        total = len(batch[0])
        sizes = {r: [s * total // BATCH for s in part] for r, part in MICRO.items()} if total == BATCH else {1: [total]}
        start = 0 if rank != 2 else sum(sizes[1])
        if rank == 2 and rank not in sizes:  # no samples for this group: its leader has a dummy
            with self.logs.collecting(0), compat.metrics_frozen(module):
                module.training_step([t[:1] + 100 for t in batch], batch_idx)
        if rank in sizes:
            mine = [t[start : start + sum(sizes[rank])] for t in batch]

            def body(part: Any, samples: int) -> Any:
                with self.logs.collecting(samples):
                    return module.training_step(part, batch_idx)

            parts = list(zip(*(t.split(sizes[rank]) for t in mine), strict=True))
            steps = [
                ResumableStep(lambda p=p, s=s: body(p, s), carrier=self.carrier, seed=1)
                for p, s in zip(parts, sizes[rank], strict=True)
            ]
            for step in steps:
                step.start()
            assert all(isinstance(step.resume(), Done) for step in steps)
        self.logs.publish()
        return self.model.module.weight.sum() * 0  # type: ignore[union-attr]

    def validation_step(self, batch: Any, *args: Any) -> Any:
        assert self.lightning_module is not None
        parts = {1: slice(0, 5), 2: slice(5, None)}
        if self.global_rank in parts:
            part = [t[parts[self.global_rank]] for t in batch]
            with self.logs.collecting(len(part[0])):
                self.lightning_module.validation_step(part, *args)
        self.logs.publish()

    def teardown(self) -> None:
        self.logs.close()
        self.carrier.close()
        self.channel.close()
        super().teardown()


def fit(rank: int, world: int) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        if world > 1:  # no recommendations, no "compute before update"
            warnings.simplefilter("error", UserWarning)
        return fitted(rank, world)


def fitted(rank: int, world: int) -> tuple[Any, ...]:
    notes, module = Notes(), Logging()
    data, val = regression(SAMPLES), [DataLoader(regression(20, seed=s), batch_size=10) for s in (5, 6)]
    alone = world == 1
    strategy = SingleDeviceStrategy("cpu") if alone else Piped(process_group_backend="gloo")
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        plugins=[] if alone else [RankEnvironment(rank, world)],
        max_epochs=2,
        log_every_n_steps=1,
        logger=notes if rank == 0 else False,
        use_distributed_sampler=False,
    )
    shown: list[Any] = []
    module.on_train_batch_end = lambda *_: shown.append(  # type: ignore[method-assign]
        {k: float(v) for k, v in {**trainer.callback_metrics, **trainer.progress_bar_metrics}.items()}
    )
    trainer.fit(module, DataLoader(data, batch_size=BATCH), val)
    assert all("_sync_dist" not in vars(m) for m in module.modules())
    return notes.lines, {k: float(v) for k, v in trainer.callback_metrics.items()}, module.ends, shown


@cache
def runs() -> tuple[list[Any], Any]:
    return run_ranks(4, fit, timeout_s=60), fit(0, 1)


def same(ours: dict[str, float], theirs: dict[str, float], loose: Sequence[str] = ()) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name not in loose:
            assert ours[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name


@pytest.mark.stock_ddp("logging: means of an epoch, over ranks", "pipeline")
def test_loggers_see_what_one_process_logs() -> None:
    ours, theirs = runs()
    assert [step for step, _ in ours[0][0]] == [step for step, _ in theirs[0]]
    for (_, a), (_, b) in zip(ours[0][0], theirs[0], strict=True):
        same(a, b)


def test_all_ranks_have_the_same_values_at_any_time() -> None:
    ours, theirs = runs()
    assert all(str(run[1:]) == str(ours[0][1:]) for run in ours)
    same(ours[0][1], theirs[1])
    assert ours[0][2] == pytest.approx(theirs[2])
    for a, b in zip(ours[0][3], theirs[3], strict=True):
        same(a, b)
    assert {"my/seldom", "my/mean_step", "my/mean_epoch", "my/val_accuracy"} <= theirs[1].keys()
    assert {"my/val/dataloader_idx_0", "my/val/dataloader_idx_1"} <= theirs[1].keys()


# ---- on its own ------------------------------------------------------------------------------------------------


class Alone(SingleDeviceStrategy):
    """Runs the step twice, on a channel of one rank; ``between`` is called in between."""

    between: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        channel: Any = SimpleNamespace(world_size=1)
        module = self.lightning_module
        assert module is not None
        logs = StepLogs(module, channel)
        try:
            for samples in (None, 4):
                with logs.collecting(samples):
                    loss = module.training_step(batch, batch_idx)
                if self.between is not None:
                    self.between(logs)
            logs.publish()
        finally:
            logs.close()
        return loss

    def predict_step(self, batch: Any, *args: Any) -> Any:
        assert self.lightning_module is not None
        channel: Any = SimpleNamespace(world_size=1)
        logs = StepLogs(self.lightning_module, channel)
        with logs.collecting(1):
            self.lightning_module.predict_step(batch, *args)
        logs.publish()
        return 0


def alone(step: Any, between: Any = None) -> Any:
    """Fits one batch of 12 samples; returns what is known of it."""
    strategy = Alone("cpu")
    strategy.between = between

    class Module(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            step(self, batch)
            return self.loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            step(self, batch)

    trainer = quiet_trainer(devices=1, strategy=strategy, max_epochs=1, limit_train_batches=1)
    trainer.fit(module := Module(), DataLoader(regression(12), batch_size=12))
    assert "log" not in vars(module.trainer.fit_loop.epoch_loop._results)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer, module


def test_weights_of_batches_are_lightnings_where_none_are_given() -> None:
    values = iter([1.0, 5.0])
    found, trainer, module = alone(lambda module, batch: module.log("value", next(values), on_epoch=True))
    assert found["value_epoch"] == found["value_step"] == pytest.approx((12 * 1.0 + 4 * 5.0) / 16)
    with pytest.raises(MisconfigurationException, match="doesn't support logging"):  # Lightning's own, in a prediction
        module.predict_step = lambda batch, batch_idx: module.log("value", 1.0)
        trainer.predict(module, DataLoader(regression(2)))


def test_what_is_discarded_is_not_logged() -> None:
    found, *_ = alone(lambda module, batch: module.log("value", 1.0), lambda logs: logs.discard())
    assert found == {}


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda module, batch: module.log("a", batch[0]), "single element"),
        (lambda module, batch: module.log("a", 1.0, reduce_fx=torch.median), "reduce_fx"),
        (lambda module, batch: [module.log("a", 1.0, on_epoch=e) for e in (True, False)], "twice in `training_step`"),
    ],
)
def test_lightnings_errors_stay(step: Any, reason: str) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=reason):
        alone(step)
