"""Every way to start processes ends well, and a dying rank ends the job with the cause on the screen."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.programs import left_in, run, two_at_a_time

pytestmark = pytest.mark.timeout(500)

# One script for all: module, data, and one fit; every rank writes what it ended with.
SCRIPT = """
import gc

gc.disable()  # imports make no garbage, and are a fifth faster
import json, os, signal, sys, warnings
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero import BalancePolicy, LoadBalancedStrategy

gc.enable()
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
    policy, settings = cli.trainer.strategy.policy, cli.trainer.strategy.settings
    said = {"dead_band": policy.dead_band, "predictor": type(policy.prototype).__name__}
    said["bounds"] = settings.bounds.upper
    said["shared"] = cli.trainer.strategy.global_batch_size
    said["ddp"] = cli.trainer.strategy._ddp_kwargs["find_unused_parameters"]
    Path("cli.json").write_text(json.dumps(said))
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Cold: new Pythons throughout.
WAYS: dict[str, list[str]] = {
    **{s: [s] for s in ("hetero_balanced_fork", "hetero_balanced_forkserver", "object_spawn")},
    "cold": ["hetero_balanced"], "cold torchrun": ["object"], "cold spawn": ["object_spawn"],
}  # fmt: skip
FAULTS = [
    ("object", 1, "kill"), ("object", 0, "kill"), ("object", 1, "exception"), ("object", 0, "exception"),
    ("object_spawn", 1, "exception"),
]  # fmt: skip
LONG = ("hetero_balanced_forkserver", "cold torchrun", "cold spawn", ("object", 0, "exception"))

Runs = dict[Any, tuple[Path, Future[subprocess.CompletedProcess[str]]]]


def marks(name: Any) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] * (name in LONG)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """All runs of the script that this session's tests look at, each in a folder of its own."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    jobs = {}
    for way, strategy in WAYS.items():
        options = TORCHRUN if way == "cold torchrun" else ()
        jobs[way] = ([*options, "script.py", *strategy], {"cold": way.startswith("cold"), "timeout_s": 300.0})
    for strategy, rank, kind in FAULTS:
        jobs[strategy, rank, kind] = (["script.py", strategy, str(rank), kind], {"timeout_s": 60.0})
    jobs = {name: job for name, job in jobs.items() if name in wanted}
    folders = {name: tmp_path_factory.mktemp("run") for name in jobs}
    for folder in folders.values():
        (folder / "script.py").write_text(SCRIPT)
    done = two_at_a_time({n: partial(run, command, folders[n], **how) for n, (command, how) in jobs.items()})
    return {name: (folders[name], done[name]) for name in jobs}


def outcome(runs: Runs, name: Any) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Returns a run's folder and what it ended with; whatever still works there has outlived its parent."""
    folder, done = runs[name]
    assert left_in(folder, grace_s=5.0) == []
    return folder, done.result()


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


@pytest.mark.stock_ddp("spawn", "balanced")
@pytest.mark.parametrize("name", [pytest.param(way, marks=marks(way)) for way in WAYS])
def test_every_launcher_trains_to_the_same_weights(runs: Runs, name: str) -> None:
    folder, done = outcome(runs, name)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = ended(folder)
    # they come back to the process that called fit
    assert json.loads((folder / "parent0.json").read_text()) == ranks[0]["weights"]


@pytest.mark.parametrize("name", [pytest.param(fault, marks=marks(fault), id=str(fault)) for fault in FAULTS])
def test_a_dying_rank_ends_the_job_with_the_cause(runs: Runs, name: tuple[str, int, str]) -> None:
    """Within the strategy's timeout of 20 s: `run` fails the test otherwise."""
    _, rank, kind = name
    folder, done = outcome(runs, name)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert not (folder / "parent0.json").exists() and not (folder / f"rank{rank}.json").exists()
    if kind == "exception":
        assert "the cause: a flux compensator broke" in said
    elif rank == 1:
        assert "rank 0 lost contact with another rank: rank 1 is gone without a word" in said
    else:  # the user's own process was killed: the shell says so
        assert done.returncode == -9


def test_lightning_cli_takes_the_class_path_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "main.py").write_text(CLI)
    trainer = {
        "accelerator": "cpu", "devices": "1", "max_epochs": "1", "logger": "false",
        "enable_checkpointing": "false", "strategy": "lightning_hetero.LoadBalancedStrategy",
        "strategy.dead_band": "0.1", "strategy.predictor": "ewma", "strategy.max_samples": "[16]",
        "strategy.global_batch_size": "64", "strategy.find_unused_parameters": "true",
    }  # fmt: skip
    done = run(["main.py", "fit", *(f"--trainer.{k}={v}" for k, v in trainer.items())], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "cli.json").read_text())
    assert said == {"dead_band": 0.1, "predictor": "Ewma", "bounds": [16], "shared": 64, "ddp": True}
    assert json.loads((tmp_path / "rank0.json").read_text())["strategy"] == "LoadBalancedStrategy"
    assert left_in(tmp_path, grace_s=5.0) == []
