"""Whatever a user counts in batches means DDP's batches, also where `max_samples` is less than a rank's part of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.strangers import kit

SMALL = {"balanced": {"max_samples": [3, 2]}}  # parts of 16 in all, in up to four pieces


class Counting(LightningModule):
    """Counts what it sees; its training step computes on the pieces, its hooks see whole parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1).double()
        self.facts: dict[str, list[Any]] = {"batches": [], "samples": [], "validated": [], "rates": []}
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.facts["batches"].append(batch_idx)
        self.facts["samples"].append(sum(kit.everyone(len(batch[0]))))
        self.facts["rates"].append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.facts["validated"].append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.planned = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.planned + 1)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Later(Callback):
    """Accumulates from the second epoch on, as PL#12205 does."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.accumulate_grad_batches = 2


class Steps(ModelCheckpoint):
    def __init__(self) -> None:
        super().__init__(every_n_train_steps=2, save_top_k=-1, dirpath=".", filename="{step}")
        self.saved: list[int] = []

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self.saved.append(trainer.global_step)


class Bar(TQDMProgressBar):
    total: Any = None

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.total = (self.total_train_batches, self.trainer.fit_loop.total_batch_idx + 1)


class Logger(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if trainer._logger_connector.should_update_logs:
            self.steps.append(trainer.global_step)


def arguments(name: str) -> dict[str, Any]:
    """Of the Trainer, and with them what the situation counts."""
    given: dict[str, dict[str, Any]] = {
        "limit of 4, validation every 2": {"limit_train_batches": 4, "val_check_interval": 2},
        "limit of 5, accumulated by 2": {"limit_train_batches": 5, "accumulate_grad_batches": 2},
        "validation across epochs": {
            "val_check_interval": 4, "check_val_every_n_epoch": None, "limit_train_batches": 0.5,
            "log_every_n_steps": 2,
        },
        "overfit": {"overfit_batches": 2},
        "fast_dev_run": {"fast_dev_run": 2},
        "scheduled": {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 3})]},
        "written in mid-run": {"callbacks": [Later()]},
        "saved every 2": {"callbacks": [Steps()], "enable_checkpointing": True},
        "max_steps": {"max_steps": 3, "accumulate_grad_batches": 2, "max_epochs": -1},
    }  # fmt: skip
    return {"max_epochs": 2, **given[name]}


NAMES = [
    "limit of 4, validation every 2", "limit of 5, accumulated by 2", "validation across epochs",
    "overfit", "fast_dev_run", "scheduled", "written in mid-run", "saved every 2", "max_steps",
]  # fmt: skip


def counted(rank: int, world: int, engine: str) -> list[Any]:
    """PL#12205, PL#15595, PL#17207, PL#3205: limits and intervals in batches, and accumulation that changes."""
    found = []
    for name in NAMES:
        kwargs = arguments(name)
        bar, logger = Bar(), Logger()
        callbacks = kwargs.pop("callbacks", [])
        steps = next((c for c in callbacks if isinstance(c, Steps)), None)
        module = Counting()
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(96, 3).double(), torch.randn(96, 1).double())
        trainer = kit.trainer(
            rank, world, engine, SMALL, callbacks=[*callbacks, bar, logger], enable_progress_bar=True, **kwargs
        )
        trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=48))
        facts = {**module.facts}
        facts |= {"steps": trainer.global_step, "planned": module.planned, "bar": bar.total, "logged": logger.steps}
        facts |= {"saved": None if steps is None else steps.saved, "accumulation": trainer.accumulate_grad_batches}
        mean = float(trainer.callback_metrics["loss_epoch"])
        found.append((facts, module.net.weight.detach().clone(), module.sizes, mean))
    return found


@pytest.mark.stock_ddp("limit_batches", "overfit_batches", "fast_dev_run", "val_check_interval", "balanced")
def test_what_is_counted_in_batches_is_as_under_stock_ddp() -> None:
    (ours, other), (stock, _) = kit.ends(counted, "balanced"), kit.ends(counted, "ddp")
    for name, mine, theirs, want in zip(NAMES, ours, other, stock, strict=True):
        assert mine[0] == want[0], name
        assert theirs[0] == want[0], name
        torch.testing.assert_close(mine[1], want[1], rtol=0, atol=1e-12, msg=name)
        assert mine[3] == pytest.approx(want[3], abs=1e-9), name
        assert max(mine[2]) <= 3 and max(theirs[2]) <= 2, name


class Transposed(LightningModule):
    """Sequences of as many steps as a part has samples, time first: PL#10093."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch) == 8 and batch.shape[1] <= 4
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TransposedBySelf(Transposed):
    def split_batch(self, batch: Tensor, sizes: list[int]) -> Any:
        return batch.split(sizes, dim=1)


def time_major(samples: list[Any]) -> Tensor:
    return torch.stack([sample[0] for sample in samples], dim=1)


def both_ways(samples: list[Any]) -> Tensor:
    return torch.randn(len(samples), len(samples), 2)


def transposed(rank: int, world: int, engine: str, by_self: bool, collate: Any = time_major) -> int:
    """PL#10093, PL#655: the batch is the second dimension, and the first one has its size."""
    data = DataLoader(TensorDataset(torch.randn(32, 8, 2)), batch_size=8, collate_fn=collate)
    trainer = kit.trainer(rank, world, engine, {"balanced": {"max_samples": 4}})
    trainer.fit(TransposedBySelf() if by_self else Transposed(), data)
    return trainer.global_step


def test_pieces_are_never_cut_along_another_dimension() -> None:
    assert kit.ends(transposed, "balanced", True) == kit.ends(transposed, "balanced", False) == [2, 2]
    said = kit.refusal(transposed, "balanced", False, both_ways)
    assert "max_samples is less than a rank's part" in said and "split_batch(batch, sizes)" in said


class Talking(LightningModule):
    """Communicates in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sums.append(float(torch.as_tensor(self.all_gather(torch.tensor(1.0))).sum()))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def together(rank: int, world: int, engine: str) -> list[float]:
    """PL#6200: every rank gathers as often as the others, whatever the number of its samples."""
    module = Talking()
    trainer = kit.trainer(rank, world, engine, {"balanced": {"max_samples": [8, 1], "min_samples": [0, 1]}})
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(40, 1)), batch_size=8))
    return module.sums


def test_ranks_meet_in_what_the_pieces_communicate() -> None:
    one, other = kit.ends(together, "balanced")
    assert one == other and set(one) == {2.0}
