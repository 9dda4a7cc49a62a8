"""Ranks whose memory ends, for tests."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks.kit import Weights, rank_trainer, regression

SAMPLES, BATCH, EPOCHS = 104, 16, 1  # 6 full global batches and one of 8
EXACT = 1e-12

Limits = Mapping[int, int]  # samples by rank


class _Wall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wall: Wall) -> Tensor:
        ctx.wall, ctx.rows = wall, len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.wall.check(ctx.rows)
        return grad, None


class Wall:
    """Behind the activation of a `Toy`: memory for so many rows, in its forward or in its backward pass."""

    def __init__(self, module: Any, where: str, limit: int | None) -> None:
        self.limit, self.failures = limit, 0
        self.lack = getattr(module, "lack", torch.OutOfMemoryError)
        assert where in ("forward", "backward")
        forward, wall = where == "forward", self

        def hook(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            if not forward:
                return _Wall.apply(output, wall)  # type: ignore[no-any-return]
            wall.check(len(output))
            return output

        module.net[1].register_forward_hook(hook)

    def check(self, rows: int) -> None:
        if self.limit is not None and rows > self.limit:
            self.failures += 1
            raise self.lack(f"no room for {rows} rows")


Outcome = tuple[Weights, list[int], int, list[str], Mapping[str, float]]
"""Weights, samples per batch, failures, warnings, logged values."""


class Count(Callback):
    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(trainer.strategy.current_samples())


def fitted(
    rank: int, world: int, module: Any, strategy: Any, data: Any = None, callbacks: Any = (), **trainer: Any
) -> tuple[Any, list[int], list[str]]:
    count = Count()
    trainer = {"max_epochs": EPOCHS, **trainer}
    fit = rank_trainer(rank, world, strategy, callbacks=[count, *callbacks], **trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module, DataLoader(data or regression(SAMPLES), batch_size=BATCH // world, shuffle=True))
    told = [str(w.message) for w in caught if "out of memory" in str(w.message)]
    return fit, count.samples, told
