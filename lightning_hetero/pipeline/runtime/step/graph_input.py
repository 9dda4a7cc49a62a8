"""The receiving end of a cut in an autograd graph: tensors from elsewhere, whose gradients go back there (layer T)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GraphInput:
    """Puts tensors that come from elsewhere at the beginning of a graph, and collects their gradients.

    Not as leaves: what a leaf forbids, such as ``nn.ReLU(inplace=True)`` right behind the cut, must go on working.

    Args:
        tensors: what came; shares their memory, but no graph.
        requires_grad: which of them get a gradient; only floating point and complex ones can.
    """

    def __init__(self, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> None:
        self._wanted = [
            want and (tensor.is_floating_point() or tensor.is_complex())
            for tensor, want in zip(tensors, requires_grad, strict=True)
        ]
        self._grads: list[Tensor | None] = [None] * sum(self._wanted)
        self._taken = False
        with torch.enable_grad():
            come = [tensor for tensor, wanted in zip(tensors, self._wanted, strict=True) if wanted]
            placed = iter(_Enter.apply(torch.empty(0, requires_grad=True), self, *map(Tensor.detach, come)))
        self._tensors: list[Tensor] | None = [
            next(placed) if wanted else tensor.detach() for tensor, wanted in zip(tensors, self._wanted, strict=True)
        ]

    def take(self) -> list[Tensor]:
        """Returns the tensors to compute on; once, they are not kept."""
        if self._tensors is None:
            raise RuntimeError("the tensors of this graph input have been taken before")
        tensors, self._tensors = self._tensors, None
        return tensors

    def take_grads(self) -> list[Tensor | None]:
        """Returns the gradients collected so far, one per tensor: None where there is none. Once, they are not kept."""
        if self._taken:
            raise RuntimeError("the gradients of this graph input have been taken before")
        self._taken = True
        grads = iter(self._grads)
        self._grads = []
        return [next(grads) if wanted else None for wanted in self._wanted]

    def _collect(self, grads: Sequence[Tensor | None]) -> None:
        if self._taken:
            raise RuntimeError(
                "a gradient of the backbone's output comes after it has been sent on: of several calls in one"
                " step, the last must go back first"
            )
        for i, grad in enumerate(grads):
            if grad is not None:
                before = self._grads[i]
                # A copy: autograd may have made the memory of this gradient a parameter's `.grad`, to which the next
                # backward pass adds in place (as it does for x + p.unsqueeze(0) with one row in x).
                self._grads[i] = grad.detach().clone() if before is None else before + grad.detach()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph_input: GraphInput, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Without the anchor nothing would need a gradient, and there would be no node.
        ctx.graph_input = graph_input
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.graph_input._collect(grads)
        return (None,) * (2 + len(grads))
