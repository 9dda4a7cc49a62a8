"""What a rank of each engine holds at most; started by torchrun, once per engine, as a peak is a process's."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

from benchmarks.balanced.worker import gathered
from benchmarks.sharded.worker import ShardedModel, dataset
from benchmarks.torchrun import as_rank
from lightning_hetero import ShardedBalancedStrategy

WIDTH, STEPS = 1024, 6  # 50 million parameters in float32


class _Adam(ShardedModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is gathered."""


def measure(rank: int, engine: str) -> dict[str, Any]:
    """Returns each rank's peak of resident memory above what it had before the model [bytes]."""
    if engine == "ours":
        strategy: Any = ShardedBalancedStrategy(rebalance=False, process_group_backend="gloo")
    else:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, strategy=strategy,
    )  # fmt: skip
    data = dataset(64 * STEPS, WIDTH, torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.fit(_Adam(width=WIDTH, dtype=torch.float32), DataLoader(data, batch_size=32))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"bytes": [1024 * kb for kb in gathered(peak)]}


if __name__ == "__main__":
    _path, _engine = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(rank, _engine))
