"""Layers that must stay on one device, planned as if they were one (layer P)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_hetero.types import AffineCost, LayerCost, ModelCost, PipelinePlan

Span = tuple[int, int]
"""First and last layer that belong together, both included."""


def join_layers(model: ModelCost, spans: Sequence[Span]) -> tuple[ModelCost, tuple[int, ...]]:
    """Returns the costs with each span as one layer, and where the new layers begin in the old ones, plus the end.

    Spans that overlap become one. What they share counts for each of them: memory is not underestimated.

    Args:
        model: costs by layer.
        spans: see `Span`.
    """
    inside = {layer for first, last in spans for layer in range(first + 1, last + 1)}
    starts = [layer for layer in range(len(model.layers)) if layer not in inside]
    bounds = (*starts, len(model.layers))
    layers = tuple(joined(model.layers[a:b]) for a, b in pairwise(bounds))
    return replace(model, layers=layers), bounds


def split_again(plan: PipelinePlan, bounds: Sequence[int]) -> PipelinePlan:
    """Returns a plan for joined layers as one for the layers themselves."""
    groups = tuple(replace(group, cuts=tuple(bounds[cut] for cut in group.cuts)) for group in plan.groups)
    return replace(plan, groups=groups)


def joined(layers: Sequence[LayerCost]) -> LayerCost:
    """Returns layers as one: times and bytes add up, and the output is the last one's."""
    if len(layers) == 1:
        return layers[0]

    def added(costs: Sequence[AffineCost]) -> AffineCost:
        return AffineCost(fixed_s=sum(c.fixed_s for c in costs), per_sample_s=sum(c.per_sample_s for c in costs))

    return LayerCost(
        name=f"{layers[0].name}..{layers[-1].name}", forward=added([layer.forward for layer in layers]),
        backward=added([layer.backward for layer in layers]),
        param_bytes=sum(layer.param_bytes for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers), output_bytes=layers[-1].output_bytes,
    )  # fmt: skip
