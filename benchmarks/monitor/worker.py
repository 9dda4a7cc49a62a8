"""One rank of the monitor's benchmark; started by torchrun, writes the steps of rank 0 as JSON."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import (
    BoundedStalenessStrategy,
    LoadBalancedStrategy,
    Scenario,
    StragglerMonitor,
    ThrottleCallback,
)

ENGINES = {"stock DDP": DDPStrategy, "balanced": LoadBalancedStrategy, "stale": BoundedStalenessStrategy}
RANKS, STEP_S, BATCH, WARM_UP = 4, 0.020, 8, 10


class Model(LightningModule):
    """A small network that logs one value, as most do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stopwatch(Callback):
    """Duration of each step on this rank, from the start of a batch to the start of the next."""

    def __init__(self) -> None:
        self._starts_s: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._starts_s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        steps_s = [b - a for a, b in zip(self._starts_s, self._starts_s[1:], strict=False)]
        return steps_s[WARM_UP:]


class Timed(StragglerMonitor):
    """Notes how long its own hooks take in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks_s: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        began_s = time.perf_counter()
        super().on_train_batch_start(*args)
        self.hooks_s.append(time.perf_counter() - began_s)

    def on_train_batch_end(self, *args: Any) -> None:
        began_s = time.perf_counter()
        super().on_train_batch_end(*args)
        self.hooks_s[-1] += time.perf_counter() - began_s


def train(engine: str, steps: int, folder: str, *, monitored: bool) -> tuple[list[float], list[float]]:
    """Runs one training; returns this rank's steps, and what a monitor's hooks took of them [s]."""
    samples = BATCH * RANKS * steps
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    watch, monitor, logs = Stopwatch(), Timed(), Path(folder) / "logs"
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=ENGINES[engine](process_group_backend="gloo"), max_epochs=1,
        log_every_n_steps=1, logger=CSVLogger(logs, name="", version="run"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            watch, ThrottleCallback(Scenario(speeds=[1.0] * RANKS, step_s=STEP_S)),
            *([monitor] if monitored else []),
        ],
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(logs)
    dist.barrier()
    return watch.steps_s(), monitor.hooks_s[WARM_UP:]


def main() -> None:
    repeats, steps, folder, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # Lightning keeps an existing group
    kinds = {"without": False, "with": True, "without again": False}
    names = (*kinds, "hooks")
    result: dict[str, dict[str, list[list[float]]]] = {engine: {name: [] for name in names} for engine in ENGINES}
    for repeat in range(repeats):
        for engine, runs in result.items():
            for kind in list(kinds)[:: -1 if repeat % 2 else 1]:
                steps_s, hooks_s = train(engine, steps, folder, monitored=kinds[kind])
                runs[kind].append([round(s, 6) for s in steps_s])
                if hooks_s:
                    runs["hooks"].append([round(s, 7) for s in hooks_s])
        if dist.get_rank() == 0:
            path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
