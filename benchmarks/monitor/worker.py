"""One rank of the monitor's benchmark; started by torchrun, writes the steps of rank 0 as JSON."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.torchrun import as_rank
from lightning_hetero import (
    BoundedStalenessStrategy,
    LoadBalancedStrategy,
    Scenario,
    StragglerMonitor,
    ThrottleCallback,
)

ENGINES = {"stock DDP": DDPStrategy, "balanced": LoadBalancedStrategy, "stale": BoundedStalenessStrategy}
RANKS, STEP_S, BATCH = 4, 0.020, 8
KINDS = ("without", "with", "without again")
BLOCK = 8  # steps


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


class Switched(StragglerMonitor):
    """A monitor that is off, on and off again for `BLOCK` steps at a time; notes every step and its own part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._starts_s: dict[int, float] = {}  # by batch: under stale some go by without this rank
        self._hooks_s: dict[int, float] = {}
        self._on = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        began_s = time.perf_counter()
        self._starts_s[batch_idx] = began_s
        self._on = KINDS[batch_idx // BLOCK % len(KINDS)] == "with"
        if self._on:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._hooks_s[batch_idx] = time.perf_counter() - began_s

    def on_before_backward(self, *args: Any) -> None:
        if self._on:
            super().on_before_backward(*args)

    def on_after_backward(self, *args: Any) -> None:
        if self._on:
            super().on_after_backward(*args)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        began_s = time.perf_counter()
        if self._on:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if batch_idx in self._hooks_s:
            self._hooks_s[batch_idx] += time.perf_counter() - began_s

    def cycles(self) -> dict[str, list[list[float]]]:
        """Steps [s] by kind and cycle, without the first cycle and the first step of a block; and the hooks'."""
        starts_s, length = self._starts_s, BLOCK * len(KINDS)
        steps_s = {i: starts_s[i + 1] - s for i, s in starts_s.items() if i + 1 in starts_s}
        found: dict[str, list[list[float]]] = {kind: [] for kind in (*KINDS, "hooks")}
        for first in range(length, max(starts_s) - length + 1, length):
            blocks = [
                [i for i in range(first + k * BLOCK + 1, first + (k + 1) * BLOCK) if i in steps_s]
                for k in range(len(KINDS))
            ]
            if min(map(len, blocks)) < BLOCK // 2:
                continue
            for kind, block in zip(KINDS, blocks, strict=True):
                found[kind].append([round(steps_s[i], 6) for i in block])
            found["hooks"].append([round(self._hooks_s[i], 7) for i in blocks[KINDS.index("with")]])
        return found


def train(engine: str, cycles: int, folder: str) -> dict[str, list[list[float]]]:
    """Runs one training; returns what this rank's monitor has noted."""
    steps = (cycles + 1) * BLOCK * len(KINDS) + 1
    samples = BATCH * RANKS * steps
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    monitor, logs = Switched(), Path(folder) / "logs"
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=ENGINES[engine](process_group_backend="gloo"), max_epochs=1,
        log_every_n_steps=1, logger=CSVLogger(logs, name="", version="run"), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[monitor, ThrottleCallback(Scenario(speeds=[1.0] * RANKS, step_s=STEP_S))],
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(logs)
    dist.barrier()
    return monitor.cycles()


def measure(repeats: int, cycles: int, folder: str) -> dict[str, dict[str, list[list[float]]]]:
    """Returns the steps [s] by engine, kind of block and cycle."""
    result: dict[str, dict[str, list[list[float]]]] = {engine: {} for engine in ENGINES}
    for _ in range(repeats):
        for engine, noted in result.items():
            for kind, blocks in train(engine, cycles, folder).items():
                noted.setdefault(kind, []).extend(blocks)
    return result



if __name__ == "__main__":
    _path, _repeats, _cycles = sys.argv[1:]
    # Loggers write beside the result.
    as_rank(Path(_path), lambda rank: measure(int(_repeats), int(_cycles), str(Path(_path).parent)))
