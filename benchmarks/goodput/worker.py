"""One rank of the goodput benchmark: trains until it is killed, and notes how far it has come."""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BoundedStalenessStrategy, Scenario, ThrottleCallback

__all__ = ["BATCH", "CHECKPOINTS", "EPOCH_STEPS", "RANKS", "STEP_S", "newest_checkpoint", "train"]

RANKS, BATCH, EPOCH_STEPS = 4, 8, 10  # samples per rank and step
STEP_S = 0.25  # of a rank with its batch
CHECKPOINTS = "checkpoints"


class Model(LightningModule):
    """A small network; its work is emulated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Progress(Callback):
    """Notes the time [s, monotonic] and the global step that the model has, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _note(self, trainer: Trainer) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.monotonic()} {trainer.global_step}\n")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(trainer)


def newest_checkpoint(folder: Path) -> tuple[int, Path | None]:
    """Returns the global step of the newest checkpoint, and the file; 0 and None before the first."""
    found = [(int(path.stem.split("=")[1]), path) for path in (folder / CHECKPOINTS).glob("step=*.ckpt")]
    return max(found, default=(0, None))


def train(
    rank: int, folder: str, engine: str, checkpoint_epochs: int, port: int, start_s: float, progress: str, said: str
) -> None:
    """The process of one rank, until somebody kills it.

    Args:
        rank: global rank.
        folder: of the job; the newest checkpoint in it is resumed from.
        engine: ``"DDP"`` or ``"stale"``.
        checkpoint_epochs: epochs between two checkpoints.
        port: where the ranks meet.
        start_s: what it takes a process to start, import and reach its devices [s]; emulated.
        progress: file for what it notes.
        said: file for its output.
    """
    screen = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(screen, number)
    time.sleep(start_s)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0",
        "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = (
        DDPStrategy(process_group_backend="gloo")
        if engine == "DDP"
        else BoundedStalenessStrategy(process_group_backend="gloo", transport="pairs", monitor=False)
    )
    saving = ModelCheckpoint(
        Path(folder) / CHECKPOINTS, "{step}", every_n_epochs=checkpoint_epochs, save_on_train_epoch_end=True
    )
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=-1, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ThrottleCallback(Scenario(sample_s=STEP_S / BATCH)), Progress(Path(progress)), saving,
        ],
    )  # fmt: skip
    x = torch.randn(RANKS * BATCH * EPOCH_STEPS, 16, generator=torch.Generator().manual_seed(1))
    _, resume = newest_checkpoint(Path(folder))
    trainer.fit(
        Model(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True), ckpt_path=resume
    )
