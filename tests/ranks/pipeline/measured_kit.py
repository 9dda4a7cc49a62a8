"""Profiles of a few layers, measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure import layers as measured
from lightning_hetero.pipeline.runtime.step.layer_calls.route import PLAIN
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

D = 6  # features
F4 = 4  # bytes of a float32
BYTES = F4 * (D * D + D)  # of nn.Linear(D, D)
CPU = torch.device("cpu")


NONE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
AROUND = LayerCost(name="around", forward=NONE, backward=NONE)


def profile(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    sizes: Sequence[int] = (2, 4),
    timer: Timer | None = None,
) -> ModelCost:
    """Measures layers on an example, cut or repeated to each size."""
    rows = len(next(leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)))

    def resized(leaf: Any, samples: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != rows:
            return leaf
        return leaf.detach()[torch.arange(samples) % rows].requires_grad_(leaf.requires_grad)

    examples = {n: (PLAIN, tree_map(lambda leaf, n=n: resized(leaf, n), example)) for n in sizes}
    names = list(map(str, range(len(layers))))
    with ExitStack() as stack:
        for name, value in {"_REPEATS": 1, "_WARM_UPS": 0, "Timer": lambda _: timer or Timer(CPU)}.items():
            stack.enter_context(patch.object(measured, name, value))
        return measured.profile_on_device(
            layers, examples, names=names, device=CPU, copies={}, before=AROUND, head=AROUND
        )


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
