"""A `ModelCost` as plain values, for caches, broadcasts and planning elsewhere (layer P)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.types import AffineCost, Cluster, Event, LayerCost, ModelCost

__all__ = ["layer_from_plain", "layer_to_plain", "model_from_plain", "model_to_plain", "recorded"]

_TIMES = ("forward", "backward")
_BYTES = tuple(f.name for f in fields(LayerCost) if f.name.endswith("_bytes"))


def layer_to_plain(layer: LayerCost) -> dict[str, Any]:
    """Returns strict JSON values: ``{"name": "0", "forward": [fixed_s, per_sample_s], ..., "param_bytes": 8.0}``."""
    times = {name: [cost.fixed_s, cost.per_sample_s] for name in _TIMES for cost in [getattr(layer, name)]}
    return {"name": layer.name, **times, **{name: float(getattr(layer, name)) for name in _BYTES}}


def layer_from_plain(plain: Mapping[str, Any]) -> LayerCost:
    """Returns what `layer_to_plain` was given.

    Raises:
        TypeError: not a mapping.
        ValueError: a key is missing or unknown, or a value out of its range.
    """
    _check_mapping("a layer of the profile", plain)
    wanted = {"name", *_TIMES, *_BYTES}
    if set(plain) != wanted:
        message = f"a layer has the keys {sorted(plain)}, expected {sorted(wanted)}"
        raise ValueError(f"{message}: was it written by another version?")
    forward, backward = (AffineCost(fixed_s=plain[name][0], per_sample_s=plain[name][1]) for name in _TIMES)
    sizes = {name: float(plain[name]) for name in _BYTES}
    return LayerCost(name=plain["name"], forward=forward, backward=backward, **sizes)


def model_to_plain(model: ModelCost) -> dict[str, Any]:
    """Returns strict JSON values which `model_from_plain` reads back as an equal cost."""
    return {
        "layers": [layer_to_plain(layer) for layer in model.layers],
        "before": layer_to_plain(model.before),
        "head": layer_to_plain(model.head),
    }


def model_from_plain(plain: Mapping[str, Any] | ModelCost) -> ModelCost:
    """Returns what `model_to_plain` was given; a `ModelCost` as it is.

    Raises:
        TypeError: not a mapping.
        ValueError: a key is missing, or a value out of its range.
    """
    if isinstance(plain, ModelCost):
        return plain
    _check_mapping("profile", plain)
    if missing := {"layers", "before", "head"} - set(plain):
        raise ValueError(f"a model's cost lacks {sorted(missing)}: was it written by another version?")
    return ModelCost(
        layers=tuple(layer_from_plain(layer) for layer in plain["layers"]),
        before=layer_from_plain(plain["before"]),
        head=layer_from_plain(plain["head"]),
    )


def _check_mapping(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what}={value!r} must be a mapping as model_to_plain writes it, or a ModelCost")


def recorded(events: Iterable[Event]) -> tuple[Cluster, ModelCost | None] | None:
    """Returns the cluster and the costs of the last plan in a trace; None if it holds no plan."""
    found = None
    for event in events:
        if event.kind == "plan":
            found = event.data
    if found is None:
        return None
    profile = found.get("profile")
    return cluster_from_plain(found["cluster"]), None if profile is None else model_from_plain(profile)
