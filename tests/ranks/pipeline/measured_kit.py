"""Profiles of a few layers, measured once, or estimated on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.layers import estimate_on_meta, profile_on_device
from lightning_hetero.types import ModelCost

D = 6  # features
F4 = 4  # bytes of a float32
BYTES = F4 * (D * D + D)  # of nn.Linear(D, D)
CPU = torch.device("cpu")


def profile(layers: Sequence[nn.Module], example: Any, **settings: Any) -> ModelCost:
    return profile_on_device(layers, example, **{"repeats": 1, "warm_ups": 0, **settings})


def on_meta(layers: Sequence[nn.Module], example: Any, **settings: Any) -> ModelCost:
    return estimate_on_meta(layers, example, **{"flops_per_s": 1e9, **settings})


def kept(cost: ModelCost) -> list[float]:
    return [layer.activation_bytes for layer in cost.layers]


def rows(n: int = 4, d: int = D) -> Tensor:
    return torch.randn(n, d, requires_grad=True)


class Function(nn.Module):
    """A module from a plain function of this file."""

    def __init__(self, function: Callable[..., Any], *inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Sequential(*inner)

    def forward(self, value: Any) -> Any:
        return self.function(self.inner, value)


class Counting(Timer):
    """Says that every sample of every call takes a second, and counts the calls that were timed."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.marks, self.now = 0, 0.0

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start
