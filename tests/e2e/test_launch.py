"""Every way to start processes ends well, and a dying rank ends the job with the cause on the screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(300)

# One script for all: module, data, and one fit; every rank writes what it ended with.
SCRIPT = """
import json, os, signal, sys, warnings
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero import BalancePolicy, LoadBalancedStrategy

FOLDER = Path(__file__).parent


class Data(LightningDataModule):
    def train_dataloader(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(64, 4, generator=g, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1).double()

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fault(Callback):
    def __init__(self, rank, kind):
        self.rank, self.kind = rank, kind

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx, trainer.global_rank) == (1, 2, self.rank):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the cause: a flux compensator broke")


class Report(Callback):
    def on_train_end(self, trainer, pl_module):
        said = {
            "world": trainer.world_size,
            "steps": trainer.global_step,
            "strategy": type(trainer.strategy).__name__,
            "shares": trainer.strategy.shares,
            "weights": [p.detach().flatten().tolist() for p in pl_module.parameters()],
        }
        (FOLDER / f"rank{trainer.global_rank}.json").write_text(json.dumps(said))


def main(strategy, *fault):
    if strategy == "object":
        strategy = LoadBalancedStrategy(timeout=timedelta(seconds=20), dead_band=0.5)
    elif strategy == "object_spawn":
        policy = BalancePolicy(predictor="ewma")
        strategy = LoadBalancedStrategy(start_method="spawn", policy=policy, timeout=timedelta(seconds=20))
    callbacks = [Report(), *([Fault(int(fault[0]), fault[1])] if fault else [])]
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=callbacks,
                      logger=False, enable_checkpointing=False, enable_progress_bar=False)
    model = Model()
    trainer.fit(model, Data())
    ended = [p.detach().flatten().tolist() for p in model.parameters()]
    (FOLDER / f"parent{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""

CLI = """
import json, sys
from pathlib import Path
from lightning.pytorch.cli import LightningCLI
sys.argv[0] = "cli"
from script import Data, Model, Report

if __name__ == "__main__":
    cli = LightningCLI(Model, Data, trainer_defaults={"callbacks": [Report()], "enable_progress_bar": False})
    policy, settings = cli.trainer.strategy.policy, cli.trainer.strategy._settings
    said = {"dead_band": policy.dead_band, "predictor": type(policy.prototype).__name__}
    said["bounds"] = settings.bounds.upper
    Path("cli.json").write_text(json.dumps(said))
"""

LAUNCHER = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> Iterator[Path]:
    """The script in a folder of its own; whatever still works there afterwards has outlived its parent."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    yield path
    others = [p for p in psutil.process_iter(["cwd"]) if p.pid != os.getpid()]
    left = [p for p in others if p.info["cwd"] == str(tmp_path)]
    _, alive = psutil.wait_procs(left, timeout=5)
    for process in alive:
        process.kill()
    assert not alive


def run(folder: Path, *command: str, timeout_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Runs Python there as a user would, with one thread per process and nothing of a launcher's set."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "SLURM_", "TORCHELASTIC_"))}
    for name in LAUNCHER:
        environ.pop(name, None)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s)


def ended(folder: Path) -> list[dict[str, Any]]:
    """What both ranks ended with; the weights are those of one process trained on the same global batches."""
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
    for rank in ranks:
        assert (rank["world"], rank["strategy"], rank["steps"]) == (2, "LoadBalancedStrategy", 8)
        assert sum(rank["shares"]) == 16
    assert ranks[0]["weights"] == ranks[1]["weights"] and ranks[0]["shares"] == ranks[1]["shares"]
    for got, right in zip(ranks[0]["weights"], expected(), strict=True):
        assert got == pytest.approx(right, rel=1e-12, abs=1e-12)
    return ranks


def expected() -> list[list[float]]:
    """Plain SGD by hand: eight steps over the batches of `DistributedSampler`'s order."""
    import torch

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1).double()
    for epoch in range(2):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
        for t in range(4):
            batch = order[16 * t : 16 * t + 16]
            net.zero_grad()
            torch.nn.functional.mse_loss(net(x[batch]), y[batch]).backward()
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
    return [p.detach().flatten().tolist() for p in net.parameters()]


@pytest.mark.parametrize(
    "strategy",
    ["hetero_balanced", "hetero_balanced_fork", "hetero_balanced_forkserver", "object_spawn"],
)
def test_every_launcher_trains_to_the_same_weights(tmp_path: Path, strategy: str) -> None:
    done = run(tmp_path, "script.py", strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = ended(tmp_path)
    assert (
        json.loads((tmp_path / "parent0.json").read_text()) == ranks[0]["weights"]
    )  # they come back to the parent


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *torchrun, "script.py", "object")
    assert done.returncode == 0, done.stderr[-3000:]
    ended(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "rank", "kind"),
    [("object", 1, "kill"), ("object", 0, "kill"), ("object", 1, "exception"), ("object", 0, "exception"),
     ("object_spawn", 1, "exception")],
)  # fmt: skip
def test_a_dying_rank_ends_the_job_with_the_cause(
    tmp_path: Path, strategy: str, rank: int, kind: str
) -> None:
    """Within the strategy's timeout of 20 s: `run` fails the test otherwise."""
    done = run(tmp_path, "script.py", strategy, str(rank), kind, timeout_s=60.0)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert not (tmp_path / "parent0.json").exists() and not (tmp_path / f"rank{rank}.json").exists()
    if kind == "exception":
        assert "the cause: a flux compensator broke" in said
    elif rank == 1:
        assert "rank 0 lost contact with another rank, which has died" in said
    else:  # the user's own process was killed: the shell says so
        assert done.returncode == -9


def test_lightning_cli_takes_the_class_path_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(CLI)
    trainer = {
        "accelerator": "cpu", "devices": "1", "max_epochs": "1", "logger": "false",
        "enable_checkpointing": "false", "strategy": "lightning_hetero.LoadBalancedStrategy",
        "strategy.dead_band": "0.1", "strategy.predictor": "ewma", "strategy.max_samples": "[16]",
    }  # fmt: skip
    done = run(tmp_path, "main.py", "fit", *(f"--trainer.{k}={v}" for k, v in trainer.items()))
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "cli.json").read_text())
    assert said == {"dead_band": 0.1, "predictor": "Ewma", "bounds": [16]}
    assert json.loads((tmp_path / "rank0.json").read_text())["strategy"] == "LoadBalancedStrategy"
