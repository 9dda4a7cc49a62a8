"""Emulated time inside a part of a model, for engines that know of no emulation (layer T).

Our strategy lets a rank sleep after each computation (`EmulatedPace`). A
part that sleeps by itself, at the end of its forward and of its backward pass, takes the same time under any engine.
Either way a `Pacer` lets it take an emulated device's time, real work included.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.emulate.throttle import Pacer
from lightning_hetero.types import AffineCost


class Sleeping(nn.Module):
    """A part of a model that takes an emulated device's time. Used by one thread.

    Args:
        part: does the work.
        forward_cost, backward_cost: emulated times of a micro-batch, by its samples [s].
        pacer: of the device; all its parts share it.
    """

    def __init__(
        self, part: nn.Module, forward_cost: AffineCost, backward_cost: AffineCost, pacer: Pacer
    ) -> None:
        super().__init__()
        self.part, self.forward_cost, self.backward_cost = part, forward_cost, backward_cost
        self.began_s = 0.0
        self.pacer = pacer

    def forward(self, x: Tensor) -> Tensor:
        start_s = time.perf_counter()
        backward_s = self.backward_cost.seconds(len(x))
        goes_on = x.requires_grad  # else nothing is called at the end of the backward pass
        y = self.part(_Enter.apply(x, self, backward_s) if goes_on else x)
        if y.requires_grad:
            y = _Leave.apply(y, self, None if goes_on else backward_s)
        self.pacer.pace(self.forward_cost.seconds(len(x)), time.perf_counter() - start_s)
        return y


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Sleeping, backward_s: float) -> Tensor:
        ctx.owner, ctx.backward_s = owner, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.owner.pacer.pace(ctx.backward_s, time.perf_counter() - ctx.owner.began_s)
        return grads[0], None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, owner: Sleeping, backward_s: float | None) -> Tensor:
        ctx.owner, ctx.backward_s = owner, backward_s
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.owner.began_s = time.perf_counter()
        if ctx.backward_s is not None:
            ctx.owner.pacer.pace(ctx.backward_s, 0.0)
        return grads[0], None, None
