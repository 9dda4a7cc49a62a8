"""Characters of Python's help topics: a data module and a small GPT (layer A); nothing to download."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.text import Perplexity

__all__ = ["CharTransformer", "TopicsText"]

# Fixed, not collected from the text: the text differs between Python versions, a checkpoint must not.
ALPHABET = "\n" + string.printable[:95]
VOCABULARY = len(ALPHABET) + 1  # the last id stands for every other character


class TopicsText(LightningDataModule):
    """Windows of the text of ``pydoc_data.topics`` (about 465 thousand characters in Python 3.11).

    A batch is ``(inputs, targets)``, both int64 ``(B, L)``: ``targets`` are ``inputs`` one character later.
    The last tenth of the text is held out; windows do not overlap.

    Args:
        batch_size: windows per device; the global batch is this times the number of devices.
        block_size: characters per window, L.
        max_train_windows: use only the first so many training windows; None for all.
        num_workers: loader processes per device.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        block_size: int = 64,
        max_train_windows: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        if max_train_windows is not None and max_train_windows < 1:
            raise ValueError(
                f"max_train_windows={max_train_windows} must be >= 1, or None for all windows"
            )
        self.batch_size = batch_size
        self.block_size = block_size
        self.max_train_windows = max_train_windows
        self.num_workers = num_workers
        self._train: Windows | None = None
        self._val: Windows | None = None

    def setup(self, stage: str) -> None:
        """Encodes and splits the text once; every stage uses the same split."""
        del stage
        if self._train is not None:
            return
        ids = encode(topics_text())
        cut = len(ids) * 9 // 10
        self._train = Windows(ids[:cut], self.block_size, self.max_train_windows)
        self._val = Windows(ids[cut:], self.block_size)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None, "call setup() first"
        return DataLoader(self._train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self._val is not None, "call setup() first"
        return DataLoader(self._val, self.batch_size, num_workers=self.num_workers)


class CharTransformer(LightningModule):
    """A decoder-only transformer over characters; logs ``train_loss``, ``val_loss`` and ``val_perplexity``.

    The layers to divide between devices are ``self.blocks``.

    Args:
        block_size: the longest input, L; keep it equal to the data's.
        width: size of the residual stream, a multiple of ``heads``.
        heads: attention heads per layer.
        layers: number of blocks.
        lr: AdamW's learning rate.

    Raises:
        ValueError: ``width`` is not a multiple of ``heads``, or a size is below 1.
    """

    def __init__(
        self,
        *,
        block_size: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        lr: float = 3e-3,
    ) -> None:
        super().__init__()
        sizes = {"block_size": block_size, "width": width, "heads": heads, "layers": layers}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        if width % heads:
            raise ValueError(f"width={width} must be a multiple of heads={heads}")
        self.save_hyperparameters()
        self.block_size = block_size
        self.lr = lr
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.val_perplexity = Perplexity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits ``(B, L, 97)`` of characters ``(B, L)``; position t sees characters 0..t.

        Raises:
            ValueError: the input is longer than ``block_size``.
        """
        length = inputs.shape[1]
        if length > self.block_size:
            raise ValueError(
                f"got {length} characters, block_size={self.block_size} is the longest; raise block_size"
            )
        x = self.tokens(inputs) + self.positions(torch.arange(length, device=inputs.device))
        return self.head(self.norm(self.blocks(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        del batch_idx
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs)
        )
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        del batch_idx
        inputs, targets = batch
        logits = self(inputs)
        self.val_perplexity(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, sync_dist=True, batch_size=len(inputs))
        self.log("val_perplexity", self.val_perplexity, on_epoch=True, batch_size=len(inputs))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Block(nn.Module):
    """Pre-norm causal self-attention and a two-layer perceptron; ``(B, L, width)`` to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        q, k, v = (
            part.view(b, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, width))
        return x + self.mlp(self.norm_2(x))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of ids ``(N,)``: item i is ``ids[iL : iL+L]`` and the same one id later.

    Raises:
        ValueError: the text is too short for one window.
    """

    def __init__(self, ids: Tensor, block_size: int, limit: int | None = None) -> None:
        count = (len(ids) - 1) // block_size
        if count < 1:
            raise ValueError(
                f"block_size={block_size} needs {block_size + 1} characters, the text has {len(ids)}"
            )
        self.ids = ids
        self.block_size = block_size
        self.count = count if limit is None else min(limit, count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} is outside [0, {self.count})")
        start = index * self.block_size
        window = self.ids[start : start + self.block_size + 1]
        return window[:-1], window[1:]


@cache
def topics_text() -> str:
    """Returns all of Python's help topics, in the order of their names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> Tensor:
    """Returns the ids of a text's characters, int64 ``(len(text),)`` in [0, 97)."""
    table = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor(
        [table.get(character, VOCABULARY - 1) for character in text], dtype=torch.int64
    )
