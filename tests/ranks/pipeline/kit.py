"""Models, plans and runs for the tests of the pipeline engine; the oracle is a single-process Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import HeteroPipelineStrategy
from tests.ranks.kit import FEATURES, Toy, Weights, rank_trainer, regression, weights

WIDTH, LAYERS = 8, 6
SAMPLES = 208  # 13 global batches of 16

PLANS: dict[str, dict[str, Any]] = {
    "1x1": {"groups": [{"ranks": [0], "cuts": [0, 6], "samples": 16, "micro_samples": 4}]},
    "1x2": {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "samples": 16, "micro_samples": 6, "depths": [3, 3]}]},
    "1x4": {"groups": [{"ranks": [0, 2, 1, 3], "cuts": [0, 1, 3, 5, 6], "samples": 16, "micro_samples": 6}]},
    "2x2": {
        "groups": [
            {"ranks": [2, 0], "cuts": [0, 2, 6], "samples": 11, "micro_samples": 4},
            {"ranks": [1, 3], "cuts": [0, 4, 6], "samples": 5, "micro_samples": 3},
        ]
    },
    "2x1": {"groups": [{"ranks": [0], "cuts": [0, 6], "samples": 11, "micro_samples": 11},
                       {"ranks": [1], "cuts": [0, 6], "samples": 5, "micro_samples": 2}]},
    "resting": {"groups": [{"ranks": [2, 0], "cuts": [0, 3, 6], "samples": 16, "micro_samples": 8}]},
}  # fmt: skip
WORLD = {"1x1": 1, "1x2": 2, "1x4": 4, "2x2": 4, "2x1": 2, "resting": 4}


class Block(nn.Module):
    """A layer with a nonlinearity, of which a pipeline does not look inside."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).tanh())


class Deep(Toy):
    """A layer before the backbone, six in it, a head behind it; float64."""

    def __init__(self, dtype: torch.dtype = torch.float64, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(dtype, lr)
        del self.net
        g = torch.Generator().manual_seed(1)
        self.before = nn.Linear(FEATURES, WIDTH).to(dtype)
        self.model = self.backbone(**options).to(dtype)
        self.head = nn.Linear(WIDTH, 1).to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * 0.3)

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(LAYERS)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.model(self.before(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def pipeline(plan: Any, **kwargs: Any) -> HeteroPipelineStrategy:
    kwargs.setdefault("process_group_backend", "gloo")
    kwargs.setdefault("backbone", "model")
    kwargs.setdefault("monitor", False)
    return HeteroPipelineStrategy(plan=PLANS[plan] if isinstance(plan, str) else plan, **kwargs)


def loaders(data: Dataset | None, batch: int, validate: bool = False) -> list[DataLoader]:
    data = data if data is not None else regression(SAMPLES)
    found = [DataLoader(data, batch_size=batch, shuffle=True)]
    return found + [DataLoader(regression(40, seed=9), batch_size=5)] * validate


def fit(
    rank: int,
    world: int,
    module: Toy,
    strategy: Any,
    *,
    batch: int = 16,
    data: Dataset | None = None,
    validate: bool = False,
    **options: Any,
) -> tuple[Weights, Trainer]:
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": 3, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a `validation_step`")
        trainer.fit(module, *loaders(data, batch // world, validate))
    return weights(module), trainer


def held_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if not t.is_meta)
