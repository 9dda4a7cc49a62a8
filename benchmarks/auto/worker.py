"""One rank of the benchmark of `AutoStrategy`; started by torchrun, writes the runs of rank 0 as JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.torchrun import as_rank
from lightning_hetero import (
    AutoStrategy,
    BoundedStalenessStrategy,
    LoadBalancedStrategy,
    Scenario,
    ThrottleCallback,
)
from lightning_hetero.lightning_compat import trainer_callbacks

ENGINES = {
    "DDP": DDPStrategy,
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "auto": AutoStrategy,
}
RANKS, BATCH = 4, 16
WORK: dict[str, Any] = {"sample_s": 1e-3, "step_s": 2e-3}  # a step of 16 samples takes 18 ms on a device of speed 1
SCENARIOS = {
    "equal": Scenario(**WORK),
    "1:1:1/2:1/4": Scenario(speeds=[1.0, 1.0, 0.5, 0.25], **WORK),
    "1:1:1:1/8": Scenario(speeds=[1.0, 1.0, 1.0, 0.125], **WORK),
    "jitter 20 %": Scenario(jitter=0.2, **WORK),
    "spells": Scenario(spells={"factor": 6.0, "steps": 4, "probability": 0.05}, **WORK),
    "reversed half-way": Scenario(speeds=[1.0, 1.0, 0.5, 0.25], **WORK),  # see `scenario_of`
}


def scenario_of(name: str, steps: int, seed: int) -> Scenario:
    """Returns a scenario with this seed."""
    scenario = SCENARIOS[name]
    given = {name: getattr(scenario, name) for name in ("speeds", "jitter", "spells", "sample_s", "step_s")}
    made = Scenario(**given, seed=seed)
    return made.change([0.25, 0.5, 1.0, 1.0], steps // 2) if name == "reversed half-way" else made


class Model(LightningModule):
    """A small network; its work is emulated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(Callback):
    """Times set-up and training on this rank."""

    def __init__(self) -> None:
        self.made_s = time.perf_counter()
        self.began_s = self.ended_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        dist.barrier()
        self.began_s = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended_s = time.perf_counter()


def train(engine: str, name: str, steps: int, seed: int) -> dict[str, Any]:
    """Runs one training; returns its times and who trained."""
    x = torch.randn(BATCH * RANKS * steps, 16, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=ENGINES[engine](process_group_backend="gloo"), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Watch(), ThrottleCallback(scenario_of(name, steps, seed))],
    )  # fmt: skip
    dist.barrier()
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH))
    watch = next(callback for callback in trainer_callbacks(trainer) if isinstance(callback, Watch))
    dist.barrier()
    return {
        "train_s": watch.ended_s - watch.began_s,
        "set_up_s": watch.began_s - watch.made_s,
        "took": getattr(trainer.strategy, "engine", "ddp"),
    }


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Returns the runs by scenario and engine, engines in turns."""
    train("auto", "equal", 20, 0)
    runs: dict[str, Any] = {name: {engine: [] for engine in ENGINES} for name in SCENARIOS}
    for repeat in range(repeats):
        for name, by_engine in runs.items():
            for engine, noted in by_engine.items():
                noted.append(train(engine, name, steps, repeat))
    return runs


if __name__ == "__main__":
    _path, _repeats, _steps = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(int(_repeats), int(_steps)))
