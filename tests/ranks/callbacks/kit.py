"""Short fits of a single-process Trainer, for callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    """One linear layer; `backwards` > 0: manual optimisation with as many backward passes per batch."""

    def __init__(self, backwards: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.automatic_optimization = backwards == 0
        self.backwards = backwards

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.layer(batch[0]).square().mean()
        optimizer: Any = self.optimizers()
        for _ in range(self.backwards):
            self.manual_backward(self.layer(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoBackward(Net):
    """Skips every batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return None


def fit(
    folder: Path, callbacks: list[Any], model: LightningModule | None = None, *,
    ckpt_path: str | None = None, **arguments: Any,
) -> Trainer:  # fmt: skip
    """Trains 2 epochs of batches of 4, 4 and 2 samples."""
    loader = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    settings: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, "logger": False} | arguments
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=callbacks, **settings, **quiet
    )
    trainer.fit(model or Net(), loader, loader, ckpt_path=ckpt_path)
    return trainer


WARNINGS = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*logging interval", "ignore:.*returned `None`"
)
