"""`HeteroTrace`: which events of a fit are written, by whom, and where."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_hetero
from lightning_hetero.callbacks import trace as trace_module
from lightning_hetero.callbacks.reporting import EventSource, Reporting
from lightning_hetero.callbacks.trace import HeteroTrace
from lightning_hetero.record import read_events
from lightning_hetero.types import Event
from tests.full_disk import full_at
from tests.ranks.callbacks.kit import WARNINGS, Net, fit
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression


@WARNINGS
def test_stock_strategies_are_traced_with_batch_times(tmp_path: Path) -> None:
    trace = HeteroTrace(str(tmp_path / "mine"))
    fit(tmp_path, [trace])
    run, *steps = read_events(tmp_path / "mine")
    assert (run.kind, run.data["world_size"], run.data["strategy"]) == ("run", 1, "SingleDeviceStrategy")
    assert abs(run.data["unix_s"] - time.time()) < 600 and "engine" not in run.data
    assert [(e.epoch, e.step, e.data["samples"]) for e in steps] == [
        (0, 0, 4), (0, 1, 4), (0, 2, 2), (1, 0, 4), (1, 1, 4), (1, 2, 2)
    ]
    assert all(e.data["step_s"] > 0 and set(e.data) == {"samples", "step_s"} for e in steps)
    fit(tmp_path, [trace])  # another Trainer: another run
    with pytest.warns(UserWarning, match="mine holds 2 runs; this is the last"):
        assert [e.kind for e in read_events(tmp_path / "mine")].count("run") == 1


class Logging(Net):
    """Logs losses per step, per epoch and in validation, something else, and what is no number."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("train_loss", float(batch_idx), on_step=True, on_epoch=True, batch_size=1)
        self.log("acc", 0.5)
        return super().training_step(batch, batch_idx)  # type: ignore[return-value]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/Loss", 10.0 * (1 + self.current_epoch))


@WARNINGS
def test_the_first_line_says_what_ran_and_rank_0_notes_what_is_logged(tmp_path: Path) -> None:
    """Losses every second step, and the rest when an epoch is over; what has not changed is not written again."""
    fit(tmp_path, [HeteroTrace()], Logging(lr=0.1), log_every_n_steps=2)
    run, *events = read_events(tmp_path / "hetero")
    assert run.data["versions"] == {
        "python": platform.python_version(), "torch": torch.__version__, "lightning": lightning.__version__,
        "lightning-hetero": lightning_hetero.__version__,
    }  # fmt: skip
    assert run.data["hparams"] == {"lr": "0.1"} and run.data["trainer"]["max_epochs"] == 2
    found = [(e.epoch, e.step, dict(e.data)) for e in events if e.kind == "metrics"]
    assert found == [
        (0, 1, {"train_loss": 1.0, "train_loss_step": 1.0}),
        (0, 2, {"train_loss": 2.0, "train_loss_step": 2.0, "acc": 0.5, "val/Loss": 10.0}),
        (0, 2, {"train_loss": 1.0, "train_loss_epoch": 1.0}),
        (1, 0, {"train_loss": 0.0, "train_loss_step": 0.0}),
        (1, 2, {"train_loss": 2.0, "train_loss_step": 2.0}),
        (1, 2, {"val/Loss": 20.0}),
        (1, 2, {"train_loss": 1.0}),
    ]


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit" not in trace_module.origin()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    assert re.fullmatch(r"[0-9a-f]{12}", trace_module.origin()["commit"])
    monkeypatch.setenv("PATH", "")
    assert "commit" not in trace_module.origin()


def runs_in(folder: Path, rank: int = 0) -> list[str]:
    """The ids of the run lines in the order written."""
    rows = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
    return [row["run"] for row in rows if row["kind"] == "run"]


@WARNINGS
def test_a_resumed_run_and_one_that_goes_on_keep_their_id(tmp_path: Path) -> None:
    trace = HeteroTrace()
    trainer = fit(tmp_path, [trace], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, trainer.train_dataloader, trainer.val_dataloaders)
    fit(tmp_path, [HeteroTrace()], max_epochs=3, ckpt_path=str(tmp_path / "last.ckpt"))
    first, *others = runs_in(tmp_path / "hetero")
    assert others == [first, first] and len(first) == 8
    assert [e.kind for e in read_events(tmp_path / "hetero")].count("run") == 3
    fit(tmp_path, [HeteroTrace(str(tmp_path / "other"))], max_epochs=2, ckpt_path=str(tmp_path / "last.ckpt"))
    fit(tmp_path, [HeteroTrace()], max_epochs=1)
    assert first not in [*runs_in(tmp_path / "other"), runs_in(tmp_path / "hetero")[-1]]


def traced(rank: int, world: int, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = rank_trainer(rank, world, strategy, callbacks=[HeteroTrace(folder)], max_epochs=1)
        trainer.fit(Toy(), DataLoader(regression(16), batch_size=4))


def test_ranks_agree_on_the_runs_id(tmp_path: Path) -> None:
    run_ranks(2, traced, str(tmp_path))
    assert runs_in(tmp_path, 0) == runs_in(tmp_path, 1) != [""]


@WARNINGS
def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"rank0\.jsonl is not written any more: .*File too large"), full_at(900):
        trainer = fit(tmp_path, [HeteroTrace()], max_epochs=20)
    assert trainer.global_step == 60
    run, *steps = read_events(tmp_path / "hetero")
    assert run.kind == "run" and len(steps) < 60


@WARNINGS
def test_a_place_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "hetero").write_text("a file")
    with pytest.warns(UserWarning, match="is not written any more: .*File exists"):
        assert fit(tmp_path, [HeteroTrace()]).global_step == 6


def _source(trainer_steps: list[int]) -> Callable[[Any], list[Event]]:
    def step_events(self: Any) -> list[Event]:
        n = len(trainer_steps)
        trainer_steps.append(n)
        kinds = ("step", "decision")
        return [Event(kind=k, rank=0, epoch=0, step=n, t_s=0.0, data={"call": n}) for k in kinds]

    return step_events


@WARNINGS
def test_what_the_strategy_measured_is_drained(tmp_path: Path) -> None:
    calls: list[int] = []
    strategy = type("Measuring", (Reporting, SingleDeviceStrategy), {"step_events": _source(calls)})("cpu")
    fit(tmp_path, [HeteroTrace()], max_epochs=1, strategy=strategy)
    rows = [(e.kind, e.step) for e in read_events(tmp_path / "hetero")[1:]]
    assert len(calls) >= 4  # three batches, and what was left at the end
    assert [s for k, s in rows if k == "decision"] == calls
    assert [s for k, s in rows if k == "step"] == calls
    assert all(e.data.keys() <= {"call"} for e in read_events(tmp_path / "hetero")[1:])


@WARNINGS
def test_a_callback_that_measures_is_used_under_stock_strategies(tmp_path: Path) -> None:

    calls: list[int] = []
    meter = type("Meter", (Callback, EventSource), {"step_events": _source(calls)})()
    fit(tmp_path, [HeteroTrace(), meter], max_epochs=1)
    assert {e.kind for e in read_events(tmp_path / "hetero")} == {"run", "step", "decision"}
    assert all("call" in e.data for e in read_events(tmp_path / "hetero")[1:])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="local folder"):
        HeteroTrace("s3://bucket/run")
