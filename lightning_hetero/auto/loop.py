"""What Lightning's loop takes around a training step, whatever the step is (layer L)."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.lightning_compat.patches import patched

_STEPS, _FIRST = 15, 5  # of the short fit, and how many of them do not count


class Nothing(LightningModule):
    """Has a step that computes next to nothing, and notes when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.began_s = nn.Parameter(torch.zeros(())), list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.began_s.append(time.perf_counter())
        return 1.0 * self.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loop_s() -> float:
    """Returns the median time of a step that computes next to nothing, of a short fit of its own on the CPU [s]."""
    module = Nothing()
    with patched(rank_zero_only, "rank", 1):  # so that it says nothing
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=_STEPS, plugins=[LightningEnvironment()], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(torch.zeros(_STEPS)))
    return median(b - a for a, b in pairwise(module.began_s[_FIRST:]))
