"""A model with everything that ownership, gradients and checkpoints must cope with, and plans to divide it by."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.types import GroupPlan, PipelinePlan

D = 6


def plan(*groups: tuple[tuple[int, ...], tuple[int, ...]]) -> PipelinePlan:
    """Returns a plan of (ranks, cuts) per group."""
    return PipelinePlan(
        groups=tuple(
            GroupPlan(ranks=ranks, cuts=cuts, samples=1, micro_batches=(1,), depths=(1,) * len(ranks))
            for ranks, cuts in groups
        )
    )


PLANS = {  # on four ranks
    "1x4": plan(((2, 0, 3, 1), (0, 1, 2, 4, 5))),
    "2x2": plan(((3, 1), (0, 2, 5)), ((0, 2), (0, 3, 5))),
    "1x2, rank 0 rests": plan(((3, 1), (0, 4, 5))),
    "1x1": plan(((0,), (0, 5))),
    "4x1": plan(((1,), (0, 5)), ((0,), (0, 5)), ((3,), (0, 5)), ((2,), (0, 5))),
    "1x2 and 1x1, rank 0 rests": plan(((1, 2), (0, 1, 5)), ((3,), (0, 5))),
}


class Counted(nn.Module):
    """A layer with a running count of its own kind, a state that is no tensor, and a mask shared by all layers."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("mask", mask)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.calls += 1
        return torch.tanh(self.norm(self.linear(x)) * self.mask)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "square": torch.tensor([float(self.seen) ** 2])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Model(nn.Module):
    """Head and embedding are tied; a frozen layer, a layer without parameters, an alias, an unused parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        mask = (torch.rand(D) < 0.7).double()
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.net = nn.Sequential(
            Counted(mask), nn.Linear(D, D, bias=False), nn.Tanh(), Counted(mask), nn.Linear(D, 2 * D)
        )
        self.net[1].requires_grad_(False)
        self.first = self.net[0]
        self.register_buffer("empty", torch.zeros(0))
        self.embed.bias.of_user = "kept"
        self.double()

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embed(x)).view(-1, 2, D).sum(1) @ self.head.weight + self.head.bias

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.cos()).square().sum()


def same(a: Any, b: Any) -> bool:
    """Whether two nests are equal, tensors bit by bit, with their dtypes."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def frozen(state: Any) -> Any:
    """Returns a copy that further training leaves alone."""
    return copy.deepcopy(state)
