"""The backbone of a pipeline for one size of micro-batch, in arrays that all orders of devices share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.types import LayerCost, ModelCost

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The backbone for one size of micro-batch, and what stays with the leader: shared by all orders of devices.

    Attributes:
        work_s: [L] forward and backward of one micro-batch on a device of speed 1.
        cut_bytes: [L + 1] handed on in front of layer i; [0] enters the backbone, [L] leaves it; gradients too.
        before_s: the training step up to the backbone, forward and backward, on a device of speed 1.
        head_s: likewise behind the backbone, loss included.
        state_bytes: [L] parameters, gradients and optimizer state; empty: nothing.
        activation_bytes: [L] kept per micro-batch in flight; empty: nothing. A stage that starts at layer i > 0 keeps
            its input besides, ``cut_bytes[i]``; the backbone's own input is the leader's.
        leader_state_bytes: what the leader holds besides layers.
        leader_activation_bytes: what it keeps besides layers per micro-batch in flight.
        names: [L] for messages; empty: none.
    """

    work_s: Sequence[float]
    cut_bytes: Sequence[float]
    before_s: float = 0.0
    head_s: float = 0.0
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    leader_state_bytes: float = 0.0
    leader_activation_bytes: float = 0.0
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.work_s)

    @cached_property
    def work_to(self) -> Floats:
        """[L + 1] work of the layers in front of i [s]."""
        return _sums(self.work_s, len(self))

    @cached_property
    def state_to(self) -> Floats:
        """[L + 1] state of the layers in front of i [bytes]."""
        return _sums(self.state_bytes, len(self))

    @cached_property
    def activation_to(self) -> Floats:
        """[L + 1] activations of the layers in front of i, per micro-batch in flight [bytes]."""
        return _sums(self.activation_bytes, len(self))

    @cached_property
    def kept_to(self) -> Floats:
        """[L + 1] ``activation_to`` less the input of a stage that starts at i: [i, b) keeps activation_to[b] - it."""
        inputs: Floats = np.array(self.cut_sizes)
        inputs[0] = 0.0
        return self.activation_to - inputs

    @cached_property
    def cut_sizes(self) -> Floats:
        """[L + 1] ``cut_bytes``."""
        return np.asarray(self.cut_bytes, dtype=np.float64)

    @cached_property
    def cut_range_bytes(self) -> tuple[float, float]:
        """The least and the most that a cut between two layers hands on [bytes]; zeros where there is no such cut."""
        inner = self.cut_sizes[1 : len(self)]
        return (float(inner.min()), float(inner.max())) if inner.size else (0.0, 0.0)

    def name(self, layer: int) -> str:
        """Returns ``layer 7 ('blocks.7')`` for messages."""
        return f"layer {layer}" + (f" ({self.names[layer]!r})" if self.names else "")


def _sums(values: Sequence[float], n: int) -> Floats:
    sums = np.zeros(n + 1)
    if len(values):
        np.cumsum(values, out=sums[1:])
    return sums


def layers_of(model: ModelCost, samples: int) -> Layers:
    """Returns the backbone's costs for micro-batches of ``samples`` samples.

    The head keeps no activations in flight: its backward follows its forward, so one micro-batch counts as state.
    """
    outputs = [cost.output_bytes for cost in (model.before, *model.layers)]
    head_bytes = model.head.state_bytes + samples * model.head.activation_bytes
    return Layers(
        work_s=[_both_s(layer, samples) for layer in model.layers], cut_bytes=[samples * v for v in outputs],
        before_s=_both_s(model.before, samples), head_s=_both_s(model.head, samples),
        state_bytes=[layer.state_bytes for layer in model.layers],
        activation_bytes=[samples * layer.activation_bytes for layer in model.layers],
        leader_state_bytes=model.before.state_bytes + head_bytes,
        leader_activation_bytes=samples * model.before.activation_bytes,
        names=[layer.name for layer in model.layers],
    )  # fmt: skip


def fixed_and_per_sample(cost: LayerCost) -> tuple[float, float]:
    """Returns the fixed time and the time per sample, forward and backward [s]."""
    forward, backward = cost.forward, cost.backward
    return forward.fixed_s + backward.fixed_s, forward.per_sample_s + backward.per_sample_s


def _both_s(cost: LayerCost, samples: int) -> float:
    fixed_s, per_sample_s = fixed_and_per_sample(cost)
    return fixed_s + per_sample_s * samples
