"""Handwritten digits (scikit-learn's copy of the UCI test set): a data module and a small CNN (layer A)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero.data.partition import partition_by_labels

__all__ = ["DigitsCNN", "DigitsClients", "DigitsData"]

TOTAL_SAMPLES = 1797
CLASSES = 10


class DigitsData(LightningDataModule):
    """1797 grey 8x8 images, split once and for all into training and validation.

    A batch is ``(images, labels)``: float32 ``(B, 1, 8, 8)`` in [0, 1] and int64 ``(B,)`` in [0, 10).

    Args:
        batch_size: samples per device; the global batch is this times the number of devices.
        val_samples: samples held out; the rest are trained on.
        split_seed: seed of the split, so that every rank and every run holds out the same images.
        num_workers: loader processes per device.

    Raises:
        ValueError: ``batch_size`` below 1, or ``val_samples`` leaves no sample on one of the two sides.
        ModuleNotFoundError: (in ``setup``) scikit-learn, which holds the images, is not installed.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        val_samples: int = 357,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1 (samples per device)")
        if not 1 <= val_samples < TOTAL_SAMPLES:
            raise ValueError(
                f"val_samples={val_samples} must be in [1, 1796] (digits has 1797 samples)"
            )
        self.batch_size = batch_size
        self.val_samples = val_samples
        self.split_seed = split_seed
        self.num_workers = num_workers
        self._train: TensorDataset | None = None
        self._val: TensorDataset | None = None

    def setup(self, stage: str) -> None:
        """Reads and splits the images once; every stage uses the same split."""
        del stage
        if self._train is not None:
            return
        images, labels = load_digits_tensors()
        order = torch.from_numpy(np.random.default_rng(self.split_seed).permutation(len(labels)))
        val, train = order[: self.val_samples], order[self.val_samples :]
        self._train = TensorDataset(images[train], labels[train])
        self._val = TensorDataset(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None, "call setup() first"
        return DataLoader(self._train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self._val is not None, "call setup() first"
        return DataLoader(self._val, self.batch_size, num_workers=self.num_workers)


class DigitsClients(DigitsData):
    """`DigitsData` whose training images are divided among the ranks for good: each trains on its own.

    Args:
        batch_size: samples per device.
        alpha: concentration of the Dirichlet distribution of labels; small: few digits per client, > 0.
        partition_seed: of the partition, the same for every run.
        val_samples, split_seed, num_workers: see `DigitsData`.

    Raises:
        ValueError, ModuleNotFoundError: see `DigitsData`; ``alpha`` is out of range (in ``train_dataloader``).
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        alpha: float = 0.3,
        partition_seed: int = 0,
        val_samples: int = 357,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size, val_samples=val_samples, split_seed=split_seed, num_workers=num_workers
        )
        self.alpha, self.partition_seed = alpha, partition_seed

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None and self.trainer is not None, "call setup() first"
        parts = partition_by_labels(
            self._train.tensors[1].tolist(),
            self.trainer.world_size,
            alpha=self.alpha,
            least=self.batch_size,
            seed=self.partition_seed,
        )
        mine = Subset(self._train, parts[self.trainer.global_rank])
        return DataLoader(mine, self.batch_size, shuffle=True, num_workers=self.num_workers)


class DigitsCNN(LightningModule):
    """Two convolutions and two linear layers; logs ``train_loss``, ``val_loss`` and ``val_acc``.

    There is no batch normalisation: its statistics would depend on how a global batch is divided, and the
    demo is to show the same mathematics under any division.

    Args:
        channels: channels of the first convolution; the second has twice as many. 16 gives 21,546 parameters.
        lr: Adam's learning rate.
    """

    def __init__(self, *, channels: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels={channels} must be >= 1")
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, 2 * channels),
            nn.ReLU(),
            nn.Linear(2 * channels, CLASSES),
        )
        self.val_acc = MulticlassAccuracy(num_classes=CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(B, 10)`` of images ``(B, 1, 8, 8)``."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        del batch_idx
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels)
        )
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        del batch_idx
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log(
            "val_loss", F.cross_entropy(logits, labels), sync_dist=True, batch_size=len(labels)
        )
        self.log("val_acc", self.val_acc, on_epoch=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def load_digits_tensors() -> tuple[Tensor, Tensor]:
    """Returns all images, float32 ``(1797, 1, 8, 8)`` in [0, 1], and labels, int64 ``(1797,)``.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; the message names the extra.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits demo reads its images from scikit-learn, which is not installed; "
            "run: pip install 'lightning-hetero[examples]' (or pip install scikit-learn)"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    return images, torch.as_tensor(labels, dtype=torch.int64)
