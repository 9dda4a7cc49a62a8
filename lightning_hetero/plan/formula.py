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

import inspect
from collections.abc import Mapping
from typing import Any, cast

from lightning_hetero.cluster.units import as_number
from lightning_hetero.types import AffineCost, LayerCost, ModelCost


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
    if kind not in _KINDS:
        raise ValueError(f"formula.kind={kind!r} must be one of {', '.join(_KINDS)}")
    known = inspect.signature(_KINDS[kind]).parameters
    if unknown := sorted(set(formula) - {"kind", *known, *_OPTIONAL}):
        takes = ", ".join(sorted({"kind", *known, *_OPTIONAL} - {"common"}))
        raise ValueError(f"formula has unknown keys {unknown}: kind={kind} takes {takes}")
    needed = [name for name, one in known.items() if one.default is one.empty and one.kind is one.KEYWORD_ONLY]
    if missing := [name for name in needed if name not in formula]:
        raise ValueError(f"formula lacks {missing}, which kind={kind} needs")
    named = {name: value for name, value in formula.items() if name != "kind"}
    given = {name: as_number(f"formula.{name}", value, above=name in needed) for name, value in named.items()}
    layers = int(given["layers"])
    block, before, head = _KINDS[kind](**given)
    return ModelCost(layers=(block,) * layers, before=before, head=head)


def _transformer(
    *,
    layers: float,
    width: float,
    window: float,
    flops_per_s: float,
    vocabulary: float = 0.0,
    heads: float = 0.0,
    bytes_per_value: float = 2.0,
    **common: float,
) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns a block, the embedding and the head, which shares the embedding's weights."""
    d, s, values = width, window, bytes_per_value
    attention = 5.0 * (heads or max(1.0, d / 64.0)) * s / d
    common |= {"flops_per_s": flops_per_s, "bytes_per_value": values}
    return (
        _layer(
            name="block",
            params=12.0 * d * d,
            flops=24.0 * s * d * d + 4.0 * s * s * d,
            activation_bytes=s * d * (34.0 + attention) * values / 2.0,
            output_bytes=s * d * values,
            parts=layers,
            **common,
        ),
        _layer(name="embedding", params=(vocabulary + s) * d, output_bytes=s * d * values, **common),
        _layer(name="head", flops=2.0 * s * d * vocabulary, activation_bytes=2.0 * s * vocabulary * values, **common),
    )


def _layers(
    *,
    layers: float,
    params: float,
    flops_per_sample: float,
    flops_per_s: float,
    activation_bytes_per_sample: float = 0.0,
    output_bytes_per_sample: float = 0.0,
    **common: float,
) -> tuple[LayerCost, LayerCost, LayerCost]:
    """Returns one of equal layers, and nothing before and behind them."""
    common["flops_per_s"] = flops_per_s
    layer = _layer(
        name="layer",
        params=params / layers,
        flops=flops_per_sample / layers,
        activation_bytes=activation_bytes_per_sample / layers,
        output_bytes=output_bytes_per_sample,
        parts=layers,
        **common,
    )
    return layer, _layer(name="", **common), _layer(name="", **common)


_KINDS = {"transformer": _transformer, "layers": _layers}
_OPTIONAL = ("step_s", "bytes_per_value", "bytes_per_param")


def _layer(
    *,
    name: str,
    flops_per_s: float,
    params: float = 0.0,
    flops: float = 0.0,
    activation_bytes: float = 0.0,
    output_bytes: float = 0.0,
    parts: float = 0.0,
    step_s: float = 0.0,
    bytes_per_value: float = 2.0,
    bytes_per_param: float = 16.0,
) -> LayerCost:
    """Returns one layer; the step's fixed time is divided among ``parts`` alike, 0: it has none of it."""
    fixed_s = step_s / parts / 3.0 if parts else 0.0
    seconds = flops / flops_per_s
    return LayerCost(
        name=name,
        forward=AffineCost(fixed_s=fixed_s, per_sample_s=seconds),
        backward=AffineCost(fixed_s=2.0 * fixed_s, per_sample_s=2.0 * seconds),
        param_bytes=params * bytes_per_value,
        state_bytes=params * bytes_per_param,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )
