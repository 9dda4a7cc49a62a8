"""One rank of the healing part; started by torchrun, rank 0 writes the steps of all ranks as JSON.

Sixteen layers sleep in the user's own code, in proportion to samples, longer on some ranks; no probe can see it, and
nothing is told to a strategy. The ranks' speeds are reversed in the middle of the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.torchrun import as_rank
from lightning_hetero import HeteroPipelineStrategy, LoadBalancedStrategy

SPEEDS = (1.0, 1.0, 0.5, 0.25)
RANKS, LAYERS, WIDTH, FEATURES = len(SPEEDS), 16, 32, 16
SAMPLES, SAMPLE_S = 64, 2.5e-4  # per batch; per sample and layer on a rank of speed 1 [s]
TURN, BATCHES = 20, 40
IDEAL_S = LAYERS * SAMPLES * SAMPLE_S / sum(SPEEDS)
ENGINES: dict[str, Any] = {
    "ours": HeteroPipelineStrategy,
    "ours, first plan kept": lambda **options: HeteroPipelineStrategy(controller=None, **options),
    "balanced": LoadBalancedStrategy,
    "stock DDP": DDPStrategy,
    "stock DDP on equal devices, each of the mean speed": DDPStrategy,
}


class Sleepy(nn.Linear):
    """A layer whose forward pass takes as long as its rank is slow."""

    batch = 0
    alike = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            speeds = SPEEDS if Sleepy.batch < TURN else SPEEDS[::-1]
            speed = sum(SPEEDS) / RANKS if Sleepy.alike else speeds[dist.get_rank()]
            time.sleep(SAMPLE_S * len(x) / speed)
        return super().forward(x).tanh()


class Model(LightningModule):
    """A layer before the sixteen, a head behind them; notes how long its batches take, and the processor for them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.Sequential(*(Sleepy(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 1)
        self.steps_s: list[float] = []
        self.used_s: list[float] = []
        self._began_s = self._used_s = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps_s.append(time.perf_counter() - self._began_s)
        used_s, self._used_s = self._used_s, time.process_time()
        self.used_s.append(self._used_s - used_s)
        Sleepy.batch += 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.layers(self.before(batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(engine: str) -> tuple[list[float], list[float]]:
    """Runs one training; returns each batch's time on the slowest rank, and the processor's for it on the average rank,
    other work since the batch before included [s]."""
    Sleepy.batch, Sleepy.alike = 0, engine.endswith("mean speed")
    x = torch.randn(SAMPLES * BATCHES, FEATURES, generator=torch.Generator().manual_seed(1))
    module = Model()
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=ENGINES[engine](process_group_backend="gloo"), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=SAMPLES // RANKS))
    steps_s, used_s = (torch.tensor(spans, dtype=torch.float64) for spans in (module.steps_s, module.used_s))
    dist.all_reduce(steps_s, op=dist.ReduceOp.MAX)
    dist.all_reduce(used_s)
    return steps_s.tolist(), (used_s / RANKS).tolist()


def measure(repeats: int) -> dict[str, dict[str, list[list[float]]]]:
    """Returns of all runs, by engine, the steps and the processor's times [s]."""
    found: dict[str, dict[str, list[list[float]]]] = {engine: {"steps_s": [], "used_s": []} for engine in ENGINES}
    for _ in range(repeats):
        for engine, runs in found.items():
            steps_s, used_s = train(engine)
            runs["steps_s"].append(steps_s)
            runs["used_s"].append(used_s)
    return found



if __name__ == "__main__":
    _path, _repeats = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(int(_repeats)))
