"""Set-ups for the planner's tests."""

from __future__ import annotations

from typing import Any

from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster, override_cluster
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
MIX = (1.0, 1.0, 0.5, 0.25)


def model(layers: int = 4, *, sample_s: float = 3e-3, step_s: float = 0.0, **sizes: float) -> ModelCost:
    """Equal layers, which take so long together; sizes are each layer's."""
    third = AffineCost(fixed_s=step_s / layers / 3, per_sample_s=sample_s / layers / 3)
    twice = AffineCost(fixed_s=2 * third.fixed_s, per_sample_s=2 * third.per_sample_s)
    one = LayerCost(name="layer", forward=third, backward=twice, **sizes)
    ends = LayerCost(name="ends", forward=FREE, backward=FREE)
    return ModelCost(layers=(one,) * layers, before=ends, head=ends)


def lines(speeds: tuple[float, ...] = MIX, *, fixed_s: float = 0.0, sample_s: float = 3e-3, **more: Any) -> Setup:
    """Devices of which only a line each is known."""
    costs = tuple(AffineCost(fixed_s=fixed_s / v, per_sample_s=sample_s / v) for v in speeds)
    cluster = override_cluster(equal_cluster(len(speeds)), speeds=speeds)
    return Setup(**{"cluster": cluster, "costs": costs, "exchange_s": 0.0, "global_batch": 16 * len(speeds), **more})


def layered(devices: list[dict[str, Any]], link: dict[str, Any] | None = None, **more: Any) -> Setup:
    """Devices and a model of four layers."""
    spec = {"devices": devices, **({} if link is None else {"link": link})}
    cluster = cluster_from_plain(spec)
    return Setup(**{"cluster": cluster, "model": model(), "global_batch": 16 * len(cluster.devices), **more})
