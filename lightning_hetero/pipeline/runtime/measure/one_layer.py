"""One layer and one input, run any number of times without a trace: observed, timed, or counted (layer T).

The layer's parameters are exchanged for aliases, or for copies if the device is another one, and its buffers for copies
(`torch.func.functional_call`), so gradients and running statistics go there; inputs are fresh clones each time, so a
layer may change them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.memory import Kept, tensor_bytes
from lightning_hetero.pipeline.runtime.measure.residence import copied_to

__all__ = ["Call", "Observed", "Times", "Trial", "detached", "shape_of", "tensors_of"]

Call = Callable[[nn.Module, Any], Any]
Times = tuple[float, float]  # forward, backward [s]


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def shape_of(leaf: Any) -> Any:
    """Returns what tells one input from another of the same structure: shape, dtype, whether it has a gradient."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return [list(leaf.shape), str(leaf.dtype), leaf.requires_grad]


def detached(value: Any) -> Any:
    """Returns a nest with its tensors off their graph; ``requires_grad`` as it was."""

    def leaf(one: Any) -> Any:
        return one.detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one

    return tree_map(leaf, value)


@dataclass(frozen=True, slots=True)
class Observed:
    """What one forward pass showed.

    Attributes:
        value: the output, detached.
        held: those of its tensors which this layer, or one before, keeps for the backward pass.
        kept_bytes: what this layer keeps and none before does.
        output_bytes: of all tensors of the output.
    """

    value: Any
    held: list[Tensor]
    kept_bytes: int
    output_bytes: int


class _Bench(nn.Module):
    """Runs a job with the layer's own tensors exchanged by `functional_call`, once for all of its calls."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, job: Callable[[], Any]) -> Any:
        return job()


class Trial:
    """One layer and one input.

    Args:
        layer: not changed.
        value: its input; ``requires_grad`` of its tensors says where a gradient is wanted.
        call: how the layer is called.
        device: where it runs; parameters and buffers from elsewhere go there in copies. ``meta``: they are only
            described.
    """

    def __init__(self, layer: nn.Module, value: Any, call: Call, device: torch.device) -> None:
        self.layer, self.value, self._call = layer, value, call
        self._bench = _Bench(layer)

        parameters = {
            n: copied_to(p, device).requires_grad_(p.requires_grad) for n, p in self._bench.named_parameters()
        }
        self._parameters = list(parameters.values())
        self._tensors = parameters | {
            n: b.detach().clone() if b.device == device else copied_to(b, device)
            for n, b in self._bench.named_buffers()
        }
        self._output_bytes = 0
        self._gradients: list[Tensor | None] = []  # of the outputs; None where there is none

    @property
    def goes_back(self) -> bool:
        """Whether there is a backward pass; known once observed."""
        return any(g is not None for g in self._gradients)

    def observe(self, held: Sequence[Tensor]) -> Observed:
        """Runs forward once; comes before the other methods.

        Args:
            held: tensors of the input which layers before keep.
        """
        value = self._fresh()
        ids = {id(t) for t in held}
        known = [new for old, new in zip(tensors_of(self.value), tensors_of(value), strict=True) if id(old) in ids]
        kept = Kept(self._tensors.values())

        def job() -> Any:
            with kept:
                return self._call(self.layer, value)

        output = self._run(job)
        outputs = tensors_of(output)
        # Made before anything is timed, and dense: an expanded one would be slower or faster.
        self._gradients = [torch.ones_like(t) if t.requires_grad else None for t in outputs]
        self._output_bytes = tensor_bytes(outputs)
        new_bytes = kept.size_bytes(known)
        kept.add(known)
        handed_on = detached(output)
        still_held = [t for t in tensors_of(handed_on) if t in kept]
        return Observed(handed_on, still_held, new_bytes, self._output_bytes)

    def time(self, timer: Timer, repeats: int, warm_ups: int) -> Times:
        """Returns the medians of forward and backward [s].

        Gradients of parameters add up from run to run, as over the micro-batches of a step; nothing is waited for in
        between, so that on a GPU short operations are queued as they will be.
        """

        def once() -> tuple[Any, Any, Any]:
            value = self._fresh()
            start = timer.mark()
            output = self._call(self.layer, value)
            middle = timer.mark()
            self._backward(output)
            return start, middle, timer.mark() if self.goes_back else middle

        def job() -> list[tuple[Any, Any, Any]]:
            timer.warm_up(once)
            return [once() for _ in range(warm_ups + repeats)][warm_ups:]

        marks = self._run(job)
        forward = median(timer.seconds(start, middle) for start, middle, _ in marks)
        return forward, median(timer.seconds(middle, end) for _, middle, end in marks)

    def count_flops(self) -> tuple[int, int]:
        """Returns the FLOPs of forward and backward."""

        def job() -> tuple[int, int]:
            with FlopCounterMode(display=False) as forward:
                output = self._call(self.layer, self._fresh())
            with FlopCounterMode(display=False) as backward:
                self._backward(output)
            return forward.get_total_flops(), backward.get_total_flops()

        return self._run(job)

    def traffic_bytes(self) -> int:
        """Returns the size of input, output and parameters."""
        return tensor_bytes([*tensors_of(self.value), *self._parameters]) + self._output_bytes

    def _run(self, job: Callable[[], Any]) -> Any:
        return functional_call(self._bench, self._tensors, (job,))

    def _backward(self, output: Any) -> None:
        pairs = [(t, g) for t, g in zip(tensors_of(output), self._gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _fresh(self) -> Any:
        # A clone and no leaf: a leaf must not be changed in place.
        return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, detached(self.value))
