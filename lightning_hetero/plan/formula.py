"""What a model costs, from its sizes alone: for a model that is not written yet, or not here (layer P).

    {kind: transformer, layers: 24, width: 1024, window: 1024, vocabulary: 50257, flops_per_s: 60e12}
    {kind: layers, layers: 50, params: 25.6e6, flops_per_sample: 8.2e9, activation_bytes_per_sample: 90e6,
     output_bytes_per_sample: 3e6, flops_per_s: 10e12}

A transformer's layer of width d and window s has: parameters 12 d^2, FLOPs of a sample's forward 24 s d^2 + 4 s^2 d
(Narayanan et al., SC 2021), twice as many backward; activations s d (34 + 5 a s / d) bytes in 16 bits with a heads, no
recomputation (Korthikanti et al., MLSys 2023, eq. 1). State is 16 bytes per parameter: Adam in mixed precision
(Rajbhandari et al., SC 2020), or in 32 bits without.

``flops_per_s`` is what the device of speed 1 reaches in practice, not its data sheet's peak; ``step_s`` is what a step
costs whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning_hetero.checked import mapping, real
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

_SIZES = {  # by kind: those that are needed, and those that may be 0
    "transformer": (("layers", "width", "window", "flops_per_s"), ("vocabulary", "heads")),
    "layers": (("layers", "params", "flops_per_sample", "flops_per_s"),
               ("activation_bytes_per_sample", "output_bytes_per_sample")),
}
_COMMON = {"step_s": 0.0, "bytes_per_value": 2.0, "bytes_per_param": 16.0}


def model_from_formula(formula: Mapping[str, Any]) -> ModelCost:
    """Returns the costs of a model by its sizes; see the module for both kinds.

    Args:
        formula: plain values. Optional: ``step_s`` (0), ``bytes_per_value`` of activations and gradients on wires (2),
            ``bytes_per_param`` of parameters, gradients and optimizer state (16); of a transformer ``vocabulary`` (0)
            and ``heads`` (width / 64).

    Raises:
        TypeError: not a mapping.
        ValueError: an unknown or missing key, or a value out of its range.

    >>> small = {"kind": "layers", "layers": 2, "params": 1e6, "flops_per_sample": 1e6, "flops_per_s": 3e9}
    >>> model = model_from_formula(small)
    >>> [round(1e3 * (layer.forward.per_sample_s + layer.backward.per_sample_s), 3) for layer in model.layers]
    [0.5, 0.5]
    """
    if not isinstance(cast("object", formula), Mapping):
        raise TypeError(f"formula={formula!r} must be a mapping, e.g. {{kind: transformer, layers: 24, ...}}")
    kind = str(formula.get("kind", ""))
    if kind not in _SIZES:
        raise ValueError(f"formula.kind={kind!r} must be one of {', '.join(_SIZES)}")
    needed, optional = _SIZES[kind][0], dict.fromkeys(_SIZES[kind][1], 0.0) | _COMMON
    named = mapping(f"formula of kind={kind}", formula, ("kind", *needed, *optional), needed=needed)
    given = {n: real(f"formula.{n}", value, above=n in needed) for n, value in named.items() if n != "kind"}
    sizes = {**optional, **given}
    block, before, head = (_transformer if kind == "transformer" else _equal_layers)(sizes)
    return ModelCost(layers=(block,) * int(sizes["layers"]), before=before, head=head)


def _transformer(sizes: Mapping[str, float]) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns a block, the embedding and the head, which shares the embedding's weights."""
    d, s, vocabulary, values = (sizes[name] for name in ("width", "window", "vocabulary", "bytes_per_value"))
    attention = 5.0 * (sizes["heads"] or max(1.0, d / 64.0)) * s / d
    block = _layer(
        sizes, "block", params=12.0 * d * d, flops=24.0 * s * d * d + 4.0 * s * s * d,
        activation_bytes=s * d * (34.0 + attention) * values / 2.0, output_bytes=s * d * values,
        fixed_s=sizes["step_s"] / sizes["layers"],
    )  # fmt: skip
    embedding = _layer(sizes, "embedding", params=(vocabulary + s) * d, output_bytes=s * d * values)
    head_bytes = 2.0 * s * vocabulary * values
    return block, embedding, _layer(sizes, "head", flops=2.0 * s * d * vocabulary, activation_bytes=head_bytes)


def _equal_layers(sizes: Mapping[str, float]) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns one of equal layers, and nothing before and behind them."""
    layers = sizes["layers"]
    layer = _layer(
        sizes, "layer", params=sizes["params"] / layers, flops=sizes["flops_per_sample"] / layers,
        activation_bytes=sizes["activation_bytes_per_sample"] / layers, output_bytes=sizes["output_bytes_per_sample"],
        fixed_s=sizes["step_s"] / layers,
    )  # fmt: skip
    return layer, _layer(sizes, ""), _layer(sizes, "")


def _layer(
    sizes: Mapping[str, float], name: str, *, params: float = 0.0, flops: float = 0.0, activation_bytes: float = 0.0,
    output_bytes: float = 0.0, fixed_s: float = 0.0,
) -> LayerCost:  # fmt: skip
    """Returns a layer that takes a third of its time forward and two thirds backward."""
    forward = AffineCost(fixed_s=fixed_s / 3.0, per_sample_s=flops / sizes["flops_per_s"])
    return LayerCost(
        name=name, forward=forward, backward=forward.times(2.0), param_bytes=params * sizes["bytes_per_value"],
        state_bytes=params * sizes["bytes_per_param"], activation_bytes=activation_bytes, output_bytes=output_bytes,
    )  # fmt: skip
