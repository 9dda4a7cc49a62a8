"""What a model costs, from its sizes alone: for a model that is not written yet, or not here (layer P).

    {kind: transformer, layers: 24, width: 1024, window: 1024, vocabulary: 50257, flops_per_s: 60e12}
    {kind: layers, layers: 50, params: 25.6e6, flops_per_sample: 8.2e9, activation_bytes_per_sample: 90e6,
     output_bytes_per_sample: 3e6, flops_per_s: 10e12}

Of a transformer, per layer of width d and window s: parameters 12 d^2, FLOPs of a sample's forward 24 s d^2 + 4 s^2 d
(Narayanan et al., SC 2021), twice as many backward; activations s d (34 + 5 a s / d) bytes in 16 bits with a heads, no
recomputation (Korthikanti et al., MLSys 2023, eq. 1). State is 16 bytes per parameter: Adam in mixed precision
(Rajbhandari et al., SC 2020), or in 32 bits without.

``flops_per_s`` is what the device of speed 1 reaches in practice, not its data sheet's peak; ``step_s`` is what a step
costs whatever its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_hetero.cluster.units import as_number
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

__all__ = ["model_from_formula"]

_COMMON = {
    "kind": "",
    "layers": 0.0,
    "flops_per_s": 0.0,
    "step_s": 0.0,
    "bytes_per_value": 2.0,
    "bytes_per_param": 16.0,
}
_KINDS: dict[str, tuple[str, ...]] = {
    "transformer": ("width", "window", "vocabulary", "heads"),
    "layers": ("params", "flops_per_sample", "activation_bytes_per_sample", "output_bytes_per_sample"),
}
_NEEDED = {
    "transformer": ("layers", "width", "window", "flops_per_s"),
    "layers": ("layers", "params", "flops_per_sample", "flops_per_s"),
}


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
    _check_mapping(formula)
    kind = str(formula.get("kind", ""))
    if kind not in _KINDS:
        raise ValueError(f"formula.kind={kind!r} must be one of {', '.join(_KINDS)}")
    known = {*_COMMON, *_KINDS[kind]}
    if unknown := sorted(set(formula) - known):
        raise ValueError(f"formula has unknown keys {unknown}: kind={kind} takes {', '.join(sorted(known))}")
    if missing := [name for name in _NEEDED[kind] if name not in formula]:
        raise ValueError(f"formula lacks {missing}, which kind={kind} needs")
    values = {name: as_number(f"formula.{name}", formula[name]) for name in formula if name != "kind"}
    for name in _NEEDED[kind]:
        as_number(f"formula.{name}", formula[name], above=True)
    given = {name: value for name, value in _COMMON.items() if isinstance(value, float)} | values
    return _transformer(given) if kind == "transformer" else _layers(given)


def _check_mapping(formula: object) -> None:
    if not isinstance(formula, Mapping):
        raise TypeError(f"formula={formula!r} must be a mapping, e.g. {{kind: transformer, layers: 24, ...}}")


def _transformer(given: Mapping[str, float]) -> ModelCost:
    count, d, s = int(given["layers"]), given["width"], given["window"]
    heads, vocabulary = given.get("heads") or max(1.0, d / 64.0), given.get("vocabulary", 0.0)
    values = given["bytes_per_value"]
    layer = _layer(
        given,
        name="block",
        params=12.0 * d * d,
        forward_flops=24.0 * s * d * d + 4.0 * s * s * d,
        activation_bytes=s * d * (34.0 + 5.0 * heads * s / d) * values / 2.0,
        output_bytes=s * d * values,
        parts=count,
    )
    before = _layer(
        given,
        name="embedding",
        params=(vocabulary + s) * d,
        forward_flops=0.0,
        activation_bytes=0.0,
        output_bytes=s * d * values,
    )
    head = _layer(  # shares the embedding's weights
        given,
        name="head",
        params=0.0,
        forward_flops=2.0 * s * d * vocabulary,
        activation_bytes=2.0 * s * vocabulary * values,
        output_bytes=0.0,
    )
    return ModelCost(layers=(layer,) * count, before=before, head=head)


def _layers(given: Mapping[str, float]) -> ModelCost:
    count = int(given["layers"])
    layer = _layer(
        given,
        name="layer",
        params=given["params"] / count,
        forward_flops=given["flops_per_sample"] / count,
        activation_bytes=given.get("activation_bytes_per_sample", 0.0) / count,
        output_bytes=given.get("output_bytes_per_sample", 0.0),
        parts=count,
    )
    nothing = _layer(given, name="", params=0.0, forward_flops=0.0, activation_bytes=0.0, output_bytes=0.0)
    return ModelCost(layers=(layer,) * count, before=nothing, head=nothing)


def _layer(
    given: Mapping[str, float],
    *,
    name: str,
    params: float,
    forward_flops: float,
    activation_bytes: float,
    output_bytes: float,
    parts: int = 0,
) -> LayerCost:
    """Returns one layer; the step's fixed time is divided among ``parts`` alike, 0: it has none of it."""
    fixed_s = given["step_s"] / parts / 3.0 if parts else 0.0
    seconds = forward_flops / given["flops_per_s"]
    return LayerCost(
        name=name,
        forward=AffineCost(fixed_s=fixed_s, per_sample_s=seconds),
        backward=AffineCost(fixed_s=2.0 * fixed_s, per_sample_s=2.0 * seconds),
        param_bytes=params * given["bytes_per_value"],
        state_bytes=params * given["bytes_per_param"],
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )
