"""Validation, test and prediction through a pipeline, and whatever looks at logged values: as in a single process."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric

from lightning_hetero.transport import failures
from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, regression, weights
from tests.ranks.pipeline.kit import Deep, fit, pipeline

# Rank 0 rests: it leads nothing and holds nothing, but it is where the loggers are.
RESTS = {
    "groups": [
        {"ranks": [3, 2], "cuts": [0, 2, 6], "samples": 11, "micro_samples": 3},
        {"ranks": [1], "cuts": [0, 6], "samples": 5, "micro_samples": 5},
    ]
}
SEEN = ("val", "plain", "stepped", "largest", "mae", "all")


class Watched(Deep):
    """Logs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mae, self.val_mae, self.all = MeanAbsoluteError(), MeanAbsoluteError(), CatMetric()
        self.mean = MeanMetric()
        self.example_input_array = torch.zeros(2, 6, dtype=torch.float64)
        self.ends: list[tuple[str, bool]] = []  # outputs that hooks saw: None or not

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(self.before(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.train_mae(out, y)
        self.log("mae_train", self.train_mae, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("low", out.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.log("val", loss, sync_dist=True, prog_bar=True)
        self.log("plain", loss)
        self.log("stepped", loss, on_step=True, on_epoch=True)
        self.log("largest", out.max(), reduce_fx="max")
        if dataloader_idx == 0:
            self.val_mae.update(out, y)
            self.all.update(out)
            self.log("mae", self.val_mae, add_dataloader_idx=False)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("all", self.all.compute().flatten().sort().values[-3:].sum())
        self.all.reset()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        again = self(x) + self.head(self.model(self.before(x.sin())))  # called twice, unlike in training
        self.mean(again.sum(1))
        self.log("test", F.mse_loss(again, y))
        self.log("mean", self.mean)
        return {"x": x, "again": again}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return {"x": batch[0], "out": self(batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.ends.append(("validation", outputs is None))


class Outputs(Callback):
    """Keeps what a callback sees of a test."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(outputs)


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.shown = dict(self.get_metrics(trainer, pl_module))
        super().on_train_epoch_end(trainer, pl_module)


def data(samples: int) -> DataLoader:
    return DataLoader(regression(samples, seed=9), batch_size=5)


def val_loaders() -> list[DataLoader]:
    return [data(20), DataLoader(regression(12, seed=10), batch_size=3)]


def plain(values: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in values.items()}


def table(folder: Path) -> list[dict[str, float]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    # Each group validates a part of the batches: steps of it are fewer than in one process.
    return [row for row in rows if not any(k.startswith("stepped_step") for k in row)]


def train(make_trainer: Any, train_loader: DataLoader, folder: Path) -> dict[str, Any]:
    """One fit with all callbacks, then the other entry points with the same Trainer."""
    module, bar = Watched(), Bar()
    saved = ModelCheckpoint(folder / "saved", "{epoch}", monitor="val/dataloader_idx_0", auto_insert_metric_name=False)
    stop = EarlyStopping("plain/dataloader_idx_1", patience=1, mode="max")  # it falls: ends after two epochs
    trainer = make_trainer(
        max_epochs=5, num_sanity_val_steps=1, log_every_n_steps=1, enable_checkpointing=True,
        enable_progress_bar=True, enable_model_summary=True, logger=CSVLogger(folder), default_root_dir=folder,
        callbacks=[saved, stop, LearningRateMonitor(), bar, ModelSummary(2)],
    )  # fmt: skip
    trainer.fit(module, train_loader, val_loaders())
    found = {
        "weights": weights(module),
        "epochs": trainer.current_epoch,
        "metrics": plain(trainer.callback_metrics),
        "bar": {k: v for k, v in plain(bar.shown).items() if k != "v_num"},
        "best": (float(saved.best_model_score), Path(saved.best_model_path).name),  # type: ignore[arg-type]
        "example kept": module.example_input_array is not None,
        "ends": set(module.ends),
    }
    outputs = Outputs()
    trainer.callbacks.append(outputs)  # type: ignore[attr-defined]
    found["validated"] = [plain(values) for values in trainer.validate(module, val_loaders(), verbose=False)]
    found["tested"] = [plain(v) for v in trainer.test(module, data(20), verbose=False)]
    found["outputs"] = outputs.seen
    found["predicted"] = trainer.predict(module, data(20))
    return found


class Alone(Watched):
    """What it validates with is one per phase: never the backbone, and twice."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        if batch_idx == 0:
            self.log("never", F.mse_loss(self.head(self.before(x)), y))
        else:
            h = self.model(self.before(x))
            self.log("twice", F.mse_loss(self.head(self.model(h)), y))
        self.log("grad", float(torch.is_inference_mode_enabled()))

    def on_validation_epoch_end(self) -> None:
        pass


def evaluations(make_trainer: Any) -> list[Any]:
    """Without a fit before."""
    found: list[Any] = []
    for inference in (True, False):
        trainer = make_trainer(inference_mode=inference)
        loader = data(40)
        # Lightning gives up inference mode where the default group is gloo's; with NCCL it would not.
        with patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
            found.append(plain(trainer.validate(Alone(), loader, verbose=False)[0]))
    module = Watched()
    found.append([plain(v) for v in make_trainer().test(module, data(20), verbose=False)])
    found.append([p.device.type for p in module.parameters()])
    return found


def predictions(rank: int, world: int, make: Any) -> list[list[Any]]:
    """Of a pipeline and of stock DDP: sizes that divide evenly or not, one sample for each rank, two loaders."""
    cases: list[Any] = [data(40), data(21), data(4), [data(11), DataLoader(regression(9), batch_size=2)]]
    found = []
    for strategy in (make, lambda **options: rank_trainer(rank, world, DDPStrategy(), **options)):
        module = Watched()
        found.append([strategy().predict(module, loaders) for loaders in cases])
    return found


def job(rank: int, world: int) -> dict[str, Any]:
    def make(plan: Any = RESTS, **options: Any) -> Any:
        return rank_trainer(rank, world, pipeline(plan), **options)

    found = train(make, DataLoader(regression(32), batch_size=4, shuffle=True), Path.cwd())
    found["as stock"] = predictions(rank, world, make)
    found["alone"] = evaluations(make)
    found["replicas"] = evaluations(lambda **options: make(None, **options))
    if rank == 0:
        found["table"] = table(Path.cwd())
    return found


@pytest.mark.stock_ddp("entry_points", "pipeline")
def test_what_is_measured_in_a_run_is_what_one_process_measures(tmp_path: Path) -> None:
    ranks = run_ranks(4, job, timeout_s=150.0)

    def single(**options: Any) -> Any:
        return quiet_trainer(devices=1, **options)

    samples = regression(32)
    sampler = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True, seed=0)
    expected = train(single, DataLoader(samples, batch_size=16, sampler=sampler), tmp_path)
    first = evaluations(single)
    for rank, found in enumerate(ranks):
        assert found["weights"].distance(expected["weights"]) <= 1e-12
        assert found["epochs"] == expected["epochs"] == 2
        for name in ("metrics", "bar"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), (rank, name)
        assert found["best"][0] == pytest.approx(expected["best"][0]) and found["best"][1] == expected["best"][1]
        assert found["example kept"]
        assert found["ends"] == {("validation", False)}  # all ranks have their batches' outputs
        ours, stock = found["as stock"]
        assert_close(ours, stock, rtol=1e-12, atol=1e-12)
        for name in ("validated", "tested"):
            assert len(found[name]) == len(expected[name])
            for values, wanted in zip(found[name], expected[name], strict=True):
                assert values == pytest.approx(wanted, rel=1e-6), (rank, name)
        # Without a fit: the plan's two groups, or four replicas; the mean over samples is the same.
        for name in ("alone", "replicas"):
            inference, no_grad, tested, devices = found[name]
            assert (inference["grad"], no_grad["grad"]) == (1.0, 0.0) and set(devices) == {"cpu"}
            assert inference.keys() == first[0].keys()
            assert tested[0] == pytest.approx(first[2][0], rel=1e-6)
    rows, wanted_rows = ranks[0]["table"], table(tmp_path)
    assert len(rows) == len(wanted_rows) > 5
    for row, wanted in zip(rows, wanted_rows, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    for name in ("predicted", "outputs"):
        parts = [part for rank in ranks for part in rank[name]]
        for key in parts[0]:
            found_rows = torch.cat([part[key] for part in parts])
            all_rows = torch.cat([part[key] for part in expected[name]])
            order, other = (torch.argsort(torch.cat([p["x"] for p in x])[:, 0]) for x in (parts, expected[name]))
            assert_close(found_rows[order], all_rows[other], rtol=1e-12, atol=1e-12)


class Unhurried(Deep):
    """Its steps take longer than the others wait between two looks for failures."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)
        super().validation_step(batch, batch_idx)


def unhurried(rank: int, world: int) -> float:
    check_s, failures.LOOK_S = failures.LOOK_S, 0.1
    try:
        trainer = fit(rank, world, Unhurried(), pipeline("1x2"), max_epochs=1, limit_val_batches=2, validate=True)[1]
    finally:
        failures.LOOK_S = check_s
    return float(trainer.callback_metrics["val"])


def test_a_step_may_take_longer_than_others_wait_without_a_look() -> None:
    first, second = run_ranks(2, unhurried)
    assert first == second
