"""Emulated devices, and what is trained on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import Scenario
from lightning_hetero.plan.estimate import EngineName

PER_RANK, STEPS = 16, 28
WIDTH, LAYERS = 64, 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices.

    Attributes:
        name: for people.
        scenario: that emulates them.
        engines: to train with.
        holds: part of the model's state and of the activations of a global batch that each device holds; None: all.
    """

    name: str
    scenario: Scenario
    engines: tuple[EngineName, ...] = ("ddp", "balanced", "pipeline", "stale")
    holds: float | None = None


def _mix(*speeds: float, jitter: float = 0.0) -> Scenario:
    return Scenario(speeds=speeds, sample_s=0.009, step_s=0.018, jitter=jitter)


CASES = (
    Case(name="2 fast, 1 half, 1 quarter", scenario=_mix(1.0, 1.0, 0.5, 0.25)),
    Case(name="4 equal", scenario=_mix(1.0, 1.0, 1.0, 1.0)),
    Case(
        name="2 + 2, half as fast, no device holds the model", scenario=_mix(1.0, 1.0, 0.5, 0.5), engines=("pipeline",),
        holds=0.45,
    ),
)  # fmt: skip


class Net(LightningModule):
    """Layers of equal work; small, for its real work must stay below what is emulated."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
            self.model, self.head = nn.Sequential(*(Whole(block) for block in blocks)), nn.Linear(width, 1)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.model(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Whole(nn.Module):
    """A block that is one layer: a plain Sequential would be opened."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def loader(
    ranks: int, per_rank: int = PER_RANK, steps: int = STEPS, width: int = WIDTH
) -> DataLoader[tuple[Tensor, ...]]:
    """Returns the data of a whole training, the same on all ranks."""
    x = torch.randn(per_rank * ranks * steps, width, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=per_rank)
