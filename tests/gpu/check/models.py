"""Models of a real size, in torch alone: a ResNet-50, and a GPT-2 of the small size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset


class _Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(outer, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = stride == 1 and outer == width
        self.way = nn.Identity() if same else nn.Conv2d(outer, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.way(x)).relu()


def resnet50(depths: tuple[int, ...] = (3, 4, 6, 3), inner: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, inner, 7, 2, 3, bias=False), nn.BatchNorm2d(inner), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = inner
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if block == 0 and stage else 1
            layers.append(_Bottleneck(inner << stage, width, stride, 4 * inner << stage))
            width = 4 * inner << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class Gpt(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, words: int = 50257, length: int = 256) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = self.words(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=h.dtype)
        return self.head(self.blocks(h, mask=mask, is_causal=True))


class Synthetic(Dataset):
    """Samples that are made from their index."""

    def __init__(self, make: Callable[[int], tuple[Tensor, Tensor]], samples: int) -> None:
        self.make, self.samples = make, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.make(index)


def images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    image = torch.randn(3, side, side, generator=torch.Generator().manual_seed(0))
    return lambda index: (image, torch.tensor(index % 1000))


def texts(length: int, words: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    text = torch.randint(words, (length,), generator=torch.Generator().manual_seed(0))
    return lambda index: (text, text)


class Trained(LightningModule):
    """Any of them, with cross entropy and SGD."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
