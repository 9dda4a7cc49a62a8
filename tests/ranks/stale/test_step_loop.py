"""The stale engine inside Lightning's loop: counters, logged values, hooks and our own callbacks, with late ranks.

Lateness is scripted by versions, not by seconds: a late rank goes on when the server has made some more updates.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.stale.decide.policy import Bsp, Flexible
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, stale
from tests.ranks.logs_kit import Logs, near, values
from tests.ranks.stale.fits import Late

pytestmark = pytest.mark.ranks

TICKS = 8  # per epoch
EPOCHS = 2


# ---- counters: those of stock DDP, on all ranks -------------------------------------------------------------------


class Scheduled(Toy):
    """Trains with learning rates of 0 in effect: validation is constant, so that what stops and when is known."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval
        self.history: list[tuple[str, int, int, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-30)
        if self.interval == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}

    def note(self, where: str) -> None:
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.history.append((where, self.current_epoch, self.global_step, lr))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_train_epoch_end(self) -> None:
        self.note("epoch")


PLANS: dict[str, dict[str, Any]] = {
    "twice an epoch": {"interval": "step", "val_check_interval": 0.5},
    "across epochs": {"interval": "step", "val_check_interval": 7, "check_val_every_n_epoch": None},
    "max_steps": {"interval": "step", "max_steps": 11, "max_epochs": -1, "accumulate_grad_batches": 2},
    "stops early": {"interval": "plateau", "max_epochs": 9, "callbacks": [EarlyStopping("val", patience=2)]},
    "at least": {
        "interval": "epoch", "min_epochs": 3, "max_epochs": 4, "callbacks": [EarlyStopping("val", patience=1)],
    },
    "timed": {
        "interval": "epoch",
        "callbacks": [Timer({"minutes": 9}, interval="epoch"), GradientAccumulationScheduler({1: 5})],
    },
}


def plan(rank: int, world: int, name: str, engine: str) -> Any:
    """Returns what was noted, the files of checkpoints, the logged learning rates, empty ticks."""
    options = copy.deepcopy(PLANS[name])
    module = Scheduled(options.pop("interval"))
    folder = Path(f"{name} {engine}".replace(" ", "_"))
    late = [Late(int(engine[-1]), "middle", 2)] if engine.startswith("late") else []
    watch: list[Callback] = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_weights_only=True),
        LearningRateMonitor(),
        *options.pop("callbacks", []),
        *late,
    ]
    strategies: dict[str, Any] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "barrier": lambda: stale(policy=Bsp()),
    }
    trainer = rank_trainer(
        rank, world, strategies.get(engine, stale)(), callbacks=watch, logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=True, log_every_n_steps=3, **{"max_epochs": EPOCHS, **options},
    )  # fmt: skip
    data = DataLoader(regression(4 * TICKS), batch_size=2)
    trainer.fit(module, data, DataLoader(regression(8), batch_size=2))
    rows = _rates(folder / "metrics.csv") if rank == 0 else []
    files = sorted(p.name for p in folder.glob("*.ckpt"))
    done = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx)
    return module.history, done, files, rows, sum(one.passed for one in late)


def _rates(path: Path) -> list[tuple[str, str]]:
    with path.open() as file:
        return [(row["step"], row["lr-SGD"]) for row in csv.DictReader(file) if row.get("lr-SGD")]


def plans(rank: int, world: int, name: str) -> dict[str, Any]:
    return {engine: plan(rank, world, name, engine) for engine in ("ddp", "barrier", "late 0", "late 1")}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.short("across epochs", "stops early")
def test_counters_are_those_of_stock_ddp_on_all_ranks(name: str) -> None:
    ranks = run_ranks(2, plans, name)
    stock = ranks[0]["ddp"]
    assert len(stock[2]) >= 2 and len(stock[3]) >= 2
    for engine in ("barrier", "late 0", "late 1"):
        history, done, files, rows, _ = ranks[0][engine]
        assert history == stock[0]
        assert done == stock[1]
        assert files == stock[2]
        assert rows == stock[3]
        assert ranks[1][engine][:2] == (history, done)
        if engine != "barrier":
            assert ranks[int(engine[-1])][engine][-1] > 0, "it was not late"


# ---- logged values: means over the samples that were trained on ---------------------------------------------------


class EpochLogs(Logs):
    """Keeps the values of its own samples, the logged numbers and the server's version, per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.of_epoch: list[list[float]] = []
        self.rows: list[dict[str, float]] = []
        self.dummies = 0

    def on_train_epoch_start(self) -> None:
        self.note()
        self.of_epoch.append([])

    def note(self) -> None:
        if self.of_epoch:
            self.rows.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    def on_train_end(self) -> None:
        self.note()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.of_epoch[-1] += self.mine[-1]
        self.dummies += not self.mine[-1]
        return loss


LATENESS: dict[str, tuple[int, Callback | None]] = {
    "barrier": (86, None),
    "late at the start": (86, Late(2, "start", 2)),
    "late for the whole epoch": (86, Late(2, "start", 6, patience_s=60.0)),
    "late in the middle": (86, Late(2, "middle", 3)),
    "too few samples": (2, None),
}


def logged(rank: int, world: int, name: str) -> Any:
    samples, late = LATENESS[name]
    module = EpochLogs()
    policy = Flexible() if late else Bsp()
    callbacks = [late] if late else []
    trainer = rank_trainer(rank, world, stale(policy=policy), max_epochs=EPOCHS, callbacks=callbacks)
    valid = DataLoader(TensorDataset(values()[:50]), batch_size=4)
    trainer.fit(module, DataLoader(TensorDataset(values()[:samples]), batch_size=5), valid)
    return module.of_epoch, module.rows, module.dummies, trainer.global_step, getattr(late, "passed", 0)


@pytest.mark.parametrize("name", LATENESS)
@pytest.mark.short("barrier", "late in the middle")
def test_values_of_an_epoch_are_those_of_its_samples(name: str) -> None:
    ranks = run_ranks(3, logged, name)
    samples = LATENESS[name][0]
    padded = torch.cat([values()[:50], values()[:1]])
    for epoch in range(EPOCHS):
        x = torch.tensor([v for one in ranks for v in one[0][epoch]], dtype=torch.float64)
        assert set(x.tolist()) == set(values()[:samples].tolist())
        x = values()[:samples]  # each counts once, also where a rank has trained on it in vain
        called, positive = x.abs() > 0.5, x > 0
        mean, total = float(x.mean()), float(x.sum())
        for _, rows, *_ in ranks:
            row = rows[epoch]
            for key in ("mean_epoch", "sized_epoch", "plain", "cat_mean", "weighted"):
                assert row[key] == near(mean), key
            assert row["sum_epoch"] == pytest.approx(total, abs=2e-5)
            assert row["total"] == pytest.approx(total, abs=2e-5)
            assert (row["count_epoch"], row["cat_size"]) == (len(x), len(x))
            assert (row["max_epoch"], row["min_epoch"]) == (near(float(x.max())), near(float(x.min())))
            assert row["BinaryAccuracy"] == near(float((positive == called).double().mean()))
            assert row["at_end"] == near(1.0)  # the plain mean over ranks
            assert row["val_epoch"] == near(float(padded.mean()))
    assert {one[3] for one in ranks} == {EPOCHS * -(-samples // 15)}
    assert (ranks[2][4] > 0) == name.startswith("late")
    if name in ("late for the whole epoch", "too few samples"):
        assert ranks[2][2] == EPOCHS and ranks[2][0] == [[]] * EPOCHS  # one dummy in each epoch, which counts nothing


class Differs(Toy):
    """Logs under a name that depends on the rank."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.where == "step":
            self.log(f"mine{self.global_rank}", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.where == "epoch" and self.global_rank == 1:
            self.log("extra1", 1.0, sync_dist=True)
        self.log("both", 1.0, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            self.log(f"mine{self.global_rank}", self.loss(batch), sync_dist=True)


def differing(rank: int, world: int, where: str) -> str:
    trainer = rank_trainer(rank, world, stale(), max_epochs=1)
    data = DataLoader(regression(24), batch_size=2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Differs(where), data, DataLoader(regression(8), batch_size=2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "names"),
    [("step", ("training_step.mine0", "training_step.mine1")), ("epoch", ("on_train_epoch_end.extra1", "{0: ")),
     ("validation", ("validation_step.mine0", "validation_step.mine1"))],
)  # fmt: skip
def test_values_that_not_all_ranks_log_are_an_error_naming_them(where: str, names: Sequence[str]) -> None:
    for said in run_ranks(2, differing, where):
        assert "ranks meet for different reasons" in said
        assert all(name in said for name in names), said
