"""``lightning-hetero-doctor`` as a user runs it, and gradients of real engines on real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.cli.machine import compare_gradients
from tests import warm
from tests.e2e.programs import environ, left_in, run, warm_torchrun

pytestmark = pytest.mark.timeout(300)
MODELS = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(4, 6)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def train_dataloader(self):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.head(self.model(self.before(batch[0]))), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Sum(Mean):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * len(batch[0])
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's in the present folder, where commands find it."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "my_models"


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks are started by torchrun, but in warm Pythons."""

    def started(command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> Any:
        words = command[1:]
        if words[:2] == ["-m", "torch.distributed.run"]:
            words = [warm_torchrun(tmp_path), *words[2:]]
        return warm.run(words, tmp_path, environ(**env), timeout)

    monkeypatch.setattr("lightning_hetero.cli.ranks.subprocess.run", started)


@pytest.mark.long
def test_ranks_are_started_as_users_start_them(models: str) -> None:
    (found,) = compare_gradients(f"{models}:Mean", None, engines=("balanced",))[1:]
    assert found.error <= 1e-9


def test_a_loss_that_is_a_sum_has_not_the_gradients_of_one_process(models: str, warm_ranks: None) -> None:
    alone, balanced = compare_gradients(f"{models}:Sum", None, engines=("balanced",))
    assert alone.error <= 1e-9 and balanced.error > 1e-3


def test_every_engine_has_the_gradients_of_one_process(models: str, warm_ranks: None) -> None:
    found = {one.engine: one for one in compare_gradients(f"{models}:Mean", None)}
    assert list(found) == ["one process", "ddp", "balanced", "stale", "pipeline"]
    for one in found.values():
        assert not one.problem and one.error <= 1e-9, one


def test_the_command_says_what_it_found_and_fails_where_training_would(tmp_path: Path) -> None:
    command = ["-m", "lightning_hetero.cli.doctor", "--accelerator", "cpu", "--no-probe", "--json"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    checks = {one["check"] for one in found["findings"]}
    assert {"versions", "device order", "shared memory", "backends", "rendezvous", "world size"} <= checks
    assert all(one["advice"] for one in found["findings"] if one["level"] != "ok") and found["level"] in (
        "ok",
        "warn",
    )
    (tmp_path / "broken.py").write_text(BROKEN)
    failed = run(["broken.py"], tmp_path)
    assert failed.returncode == 1 and "fail  rendezvous: MASTER_ADDR=no-such-host.invalid" in failed.stdout
    assert left_in(tmp_path) == []


BROKEN = """
import os, sys
os.environ["MASTER_ADDR"] = "no-such-host.invalid"
from lightning_hetero.cli.doctor import main
sys.exit(main(["--accelerator", "cpu", "--no-probe"]))
"""
