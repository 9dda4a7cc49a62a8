"""Models of a size that a step of them is real work: an MLP, a CNN and a GPT, each small and large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_hetero.demo import VOCABULARY, CausalBlock

CLASSES = 10


class Net(LightningModule):
    """``head(layers(before(x)))`` and cross-entropy; ``layers`` is the backbone."""

    def __init__(self, before: nn.Module, layers: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.before, self.layers, self.head = before, nn.Sequential(*layers), head

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self.head(self.layers(self.before(inputs)))
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Convolution(nn.Module):
    """A convolution, normalised by group; the image gets half as large where channels get more."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=1 if inputs == outputs else 2, padding=1)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and its data.

    Attributes:
        name: for people.
        model: makes it.
        inputs: makes so many samples and their targets.
        per_rank: samples of a rank's batch.
    """

    name: str
    model: Callable[[], Net]
    inputs: Callable[[int], tuple[Tensor, Tensor]]
    per_rank: int

    def dataset(self, samples: int) -> TensorDataset:
        """Returns random samples, the same on all ranks: how well they are learnt is not asked here."""
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            return TensorDataset(*self.inputs(samples))

    def make(self) -> Net:
        """Returns the model, the same on all ranks."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.model()


def _mlp(name: str, width: int, layers: int, per_rank: int) -> Model:
    def make() -> Net:
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        return Net(nn.Identity(), blocks, nn.Linear(width, CLASSES))

    def inputs(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, width), torch.randint(0, CLASSES, (samples,))

    return Model(name=name, model=make, inputs=inputs, per_rank=per_rank)


def _cnn(name: str, channels: tuple[int, ...], side: int, per_rank: int) -> Model:
    def make() -> Net:
        blocks: list[nn.Module] = [Convolution(a, b) for a, b in pairwise(channels)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES))
        return Net(nn.Conv2d(3, channels[0], 3, padding=1), blocks, head)

    def inputs(samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(samples, 3, side, side), torch.randint(0, CLASSES, (samples,))

    return Model(name=name, model=make, inputs=inputs, per_rank=per_rank)


def _gpt(name: str, width: int, blocks: int, window: int, per_rank: int) -> Model:
    def make() -> Net:
        layers: list[nn.Module] = [CausalBlock(width, 4) for _ in range(blocks)]
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        return Net(nn.Embedding(VOCABULARY, width), layers, head)

    def inputs(samples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, VOCABULARY, (2, samples, window))
        return ids[0], ids[1]

    return Model(name=name, model=make, inputs=inputs, per_rank=per_rank)


MODELS = (
    _mlp("mlp, small", 512, 8, 64), _mlp("mlp, large", 1024, 8, 64),
    _cnn("cnn, small", (16, 16, 32, 32, 64, 64), 32, 16), _cnn("cnn, large", (32, 32, 64, 64, 128, 128), 32, 16),
    _gpt("gpt, small", 64, 4, 32, 8), _gpt("gpt, large", 128, 6, 64, 8),
)  # fmt: skip
