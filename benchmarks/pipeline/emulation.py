"""Emulated time inside a part of a model, for engines that know of no emulation (layer T).

Our strategy lets a rank sleep after each computation (`lightning_hetero.pipeline.runtime.execute.emulated_pace`). A
part that sleeps by itself, at the end of its forward and of its backward pass, takes the same time under any engine.
Either way an emulated time includes the real work, and a sleep that took too long is made up for by the next ones.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.types import AffineCost

__all__ = ["Sleeping"]


class Sleeping(nn.Module):
    """A part of a model that takes an emulated device's time. Used by one thread.

    Args:
        part: does the work.
        forward_cost, backward_cost: emulated times of a micro-batch, by its samples [s].
    """

    def __init__(self, part: nn.Module, forward_cost: AffineCost, backward_cost: AffineCost) -> None:
        super().__init__()
        self.part, self.forward_cost, self.backward_cost = part, forward_cost, backward_cost
        self.began_s = 0.0
        self._overslept_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        start_s = time.perf_counter()
        backward_s = self.backward_cost.seconds(len(x))
        goes_on = x.requires_grad  # else nothing is called at the end of the backward pass
        y = self.part(_Enter.apply(x, self, backward_s) if goes_on else x)
        if y.requires_grad:
            y = _Leave.apply(y, self, None if goes_on else backward_s)
        self.sleep(start_s, self.forward_cost.seconds(len(x)))
        return y

    def sleep(self, start_s: float, wanted_s: float) -> None:
        """Sleeps until ``wanted_s`` have passed since ``start_s`` [s, time.perf_counter]."""
        before_s = time.perf_counter()
        pause_s = wanted_s - (before_s - start_s) - self._overslept_s
        if pause_s > 0.0:
            time.sleep(pause_s)
        self._overslept_s = min(wanted_s, max(0.0, time.perf_counter() - before_s - pause_s))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Sleeping, backward_s: float) -> Tensor:
        ctx.owner, ctx.backward_s = owner, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.owner.sleep(ctx.owner.began_s, ctx.backward_s)
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
            ctx.owner.sleep(ctx.owner.began_s, ctx.backward_s)
        return grads[0], None, None
