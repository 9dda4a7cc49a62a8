"""Small, real training tasks that need no download (layer A): for the command line, examples and tests.

    DigitsData, DigitsCNN         8x8 handwritten digits (scikit-learn's copy of the UCI test set), 21,546 parameters
    DigitsClients                 the same digits, divided among the ranks for good
    TopicsText, CharTransformer   characters of Python's own help topics, a small GPT
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from lightning_hetero.data.partition import partition_by_labels

TOTAL_SAMPLES = 1797
# Fixed, not collected from the text: the text differs between Python versions, a checkpoint must not.
ALPHABET = "\n" + string.printable[:95]
VOCABULARY = len(ALPHABET) + 1  # the last id stands for every other character


class _TensorData(LightningDataModule):
    """Loaders of two datasets of tensors, which ``setup`` makes once."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1 (samples per device)")
        self.batch_size = batch_size
        self.train: TensorDataset | None = None
        self.val: TensorDataset | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.train is not None, "call setup() first"
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.val is not None, "call setup() first"
        return DataLoader(self.val, self.batch_size)


class DigitsData(_TensorData):
    """1797 grey 8x8 images, split once and for all into training and validation.

    A batch is ``(images, labels)``: float32 ``(B, 1, 8, 8)`` in [0, 1] and int64 ``(B,)`` in [0, 10).

    Args:
        batch_size: samples per device; the global batch is this times the number of devices.
        val_samples: images held out for validation, in [1, 1796].

    Raises:
        ValueError: an argument is out of range.
        ModuleNotFoundError: (in ``setup``) scikit-learn, which holds the images, is not installed.
    """

    def __init__(self, *, batch_size: int = 16, val_samples: int = 357) -> None:
        super().__init__(batch_size)
        if not 1 <= val_samples < TOTAL_SAMPLES:
            raise ValueError(f"val_samples={val_samples} must be in [1, 1796] (digits has 1797 samples)")
        self.val_samples = val_samples

    def setup(self, stage: str) -> None:
        if self.train is None:
            images, labels = load_digits_tensors()
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
            val, train = order[: self.val_samples], order[self.val_samples :]
            self.train = TensorDataset(images[train], labels[train])
            self.val = TensorDataset(images[val], labels[val])


class DigitsClients(DigitsData):
    """`DigitsData` whose training images are divided among the ranks for good: each trains on its own.

    Args:
        alpha: concentration of the Dirichlet distribution of labels; small: few digits per client, > 0.
        batch_size, val_samples: see `DigitsData`.
    """

    def __init__(self, *, batch_size: int = 16, alpha: float = 0.3, val_samples: int = 357) -> None:
        super().__init__(batch_size=batch_size, val_samples=val_samples)
        self.alpha = alpha

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.train is not None and self.trainer is not None, "call setup() first"
        labels, world = self.train.tensors[1].tolist(), self.trainer.world_size
        parts = partition_by_labels(labels, world, alpha=self.alpha, least=self.batch_size, seed=0)
        return DataLoader(Subset(self.train, parts[self.trainer.global_rank]), self.batch_size, shuffle=True)


class _Classifier(LightningModule):
    """Cross-entropy over classes; logs ``train_loss``, ``val_loss`` and its attribute that ``metric`` names."""

    metric: str

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = _loss(self(inputs), targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        (inputs, targets), metric = batch, getattr(self, self.metric)
        logits = self(inputs)
        metric(logits, targets)
        self.log("val_loss", _loss(logits, targets), sync_dist=True, batch_size=len(inputs))
        self.log(self.metric, metric, on_epoch=True, batch_size=len(inputs))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class DigitsCNN(_Classifier):
    """Two convolutions and two linear layers; logs ``train_loss``, ``val_loss`` and ``val_acc``.

    There is no batch normalisation: its statistics would depend on how a global batch is divided, and the
    demo is to show the same mathematics under any division.

    Args:
        channels: channels of the first convolution; the second has twice as many. 16 gives 21,546 parameters.
        lr: Adam's learning rate.
    """

    metric = "val_acc"

    def __init__(self, *, channels: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2 * channels * 16, 2 * channels), nn.ReLU(),
            nn.Linear(2 * channels, 10),
        )  # fmt: skip
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits ``(B, 10)`` of images ``(B, 1, 8, 8)``."""
        return self.net(images)

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
            "the digits demo reads its images from scikit-learn, which is not installed: pip install scikit-learn, or"
            " in the checkout pip install -e '.[examples]'; python -m lightning_hetero needs nothing more"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    return images, torch.as_tensor(labels, dtype=torch.int64)


# ---- text -----------------------------------------------------------------------------------------------------------


class TopicsText(_TensorData):
    """Windows of the text of ``pydoc_data.topics`` (about 465 thousand characters in Python 3.11).

    A batch is ``(inputs, targets)``, both int64 ``(B, L)``: ``targets`` are ``inputs`` one character later.
    The last tenth of the text is held out; windows do not overlap.

    Args:
        batch_size: windows per device; the global batch is this times the number of devices.
        block_size: characters per window, L.
        max_train_windows: use only the first so many training windows; None for all.
    """

    def __init__(self, *, batch_size: int = 8, block_size: int = 64, max_train_windows: int | None = None) -> None:
        super().__init__(batch_size)
        self.block_size, self.max_train_windows = block_size, max_train_windows

    def setup(self, stage: str) -> None:
        if self.train is None:
            ids = encode(topics_text())
            cut = len(ids) * 9 // 10
            self.train = windows(ids[:cut], self.block_size, self.max_train_windows)
            self.val = windows(ids[cut:], self.block_size)


def windows(ids: Tensor, block_size: int, limit: int | None = None) -> TensorDataset:
    """Returns non-overlapping windows of ids ``(N,)``: item i is ``ids[iL : iL+L]`` and the same one id later."""
    rows = ids.unfold(0, block_size + 1, block_size)[:limit]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def topics_text() -> str:
    """Returns all of Python's help topics, in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> Tensor:
    """Returns the ids of a text's characters, int64 ``(len(text),)`` in [0, 97)."""
    table = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([table.get(character, VOCABULARY - 1) for character in text], dtype=torch.int64)


class CharTransformer(_Classifier):
    """A decoder-only transformer over characters; logs ``train_loss``, ``val_loss`` and ``val_perplexity``.

    The layers to divide between devices are ``self.blocks``.

    Args:
        block_size: the longest input, L; keep it equal to the data's.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per layer.
        layers: number of blocks.
        lr: AdamW's learning rate.
    """

    metric = "val_perplexity"

    def __init__(
        self, *, block_size: int = 64, width: int = 64, heads: int = 4, layers: int = 2, lr: float = 3e-3
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.save_hyperparameters()
        self.lr = lr
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.val_perplexity = Perplexity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits ``(B, L, 97)`` of characters ``(B, L)``; position t sees characters 0..t."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        return self.head(self.norm(self.blocks(self.tokens(inputs) + self.positions(places))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class CausalBlock(nn.Module):
    """Pre-norm causal self-attention and a two-layer perceptron; ``(B, L, width)`` to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(b, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, width))
        return x + self.mlp(self.norm_2(x))
