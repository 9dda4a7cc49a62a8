"""Random models and clusters to plan for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.types import AffineCost, Cluster, Device, LayerCost, Link, ModelCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a planner is asked.

    Attributes:
        model, cluster: costs.
        samples: global batch.
    """

    model: ModelCost
    cluster: Cluster
    samples: int


def _cost(fixed_s: float, per_sample_s: float) -> AffineCost:
    return AffineCost(fixed_s=fixed_s, per_sample_s=per_sample_s)


def small_case(
    rng: np.random.Generator,
    devices: int,
    layers: int,
    *,
    sync: float,
    capped: bool = False,
    samples: int | None = None,
) -> Case:
    """Draws a case that can be solved by trying everything.

    Speeds from 1 to 1/4, up to two islands with links up to 20 times slower between them, with or without fixed costs
    and latencies, 6 to 12 samples.

    Args:
        rng: drawn from.
        devices, layers: how many.
        sync: weight of the gradients: time of all parameters over a typical slow link / time of the batch with all
            devices at full speed.
        capped: devices have memory for 0.3 to 1.2 of the model and two samples in flight.
        samples: global batch; None: drawn.
    """
    speeds = rng.choice([1.0, 0.7, 0.5, 0.25], devices).tolist()
    island = rng.integers(0, 2, devices).tolist()
    apart = float(rng.choice([1.0, 0.2, 0.05]))
    bandwidth, latency_s = float(rng.choice([3e7, 1e8, 1e9])), float(rng.choice([0.0, 1e-5, 1e-3]))
    fixed_s = float(rng.choice([0.0, 2e-4]))
    if samples is None:
        samples = int(rng.integers(6, 13))
    forward = [_cost(fixed_s, v) for v in rng.uniform(3e-4, 2e-3, layers).tolist()]
    backward = [_cost(0.0, v) for v in rng.uniform(6e-4, 4e-3, layers).tolist()]
    work_s = sum(c.seconds(samples) for c in (*forward, *backward)) / sum(speeds)
    param_bytes = sync * work_s * bandwidth * apart
    parts = rng.uniform(0.2, 2.0, layers)
    parts /= parts.sum()
    costs = tuple(
        LayerCost(
            name=f"layer{i}",
            forward=forward[i],
            backward=backward[i],
            param_bytes=param_bytes * float(parts[i]),
            state_bytes=float(rng.uniform(1e6, 4e6)),
            activation_bytes=float(rng.uniform(1e4, 1e5)),
            output_bytes=float(rng.uniform(2e4, 2e5)),
        )
        for i in range(layers)
    )
    ends = [_cost(0.0, v) for v in rng.uniform(0.0, 1e-3, 2).tolist()]
    before = LayerCost(
        name="before", forward=ends[0], backward=ends[0], param_bytes=0.05 * param_bytes, output_bytes=1e5
    )
    head = LayerCost(name="head", forward=ends[1], backward=ends[1], param_bytes=0.1 * param_bytes)
    mem_bytes = [math.inf] * devices
    if capped:
        need = sum(c.state_bytes + 2 * c.activation_bytes for c in costs)
        mem_bytes = (need * rng.uniform(0.3, 1.2, devices)).tolist()
    links = tuple(
        tuple(
            Link(
                bandwidth_bytes_per_s=bandwidth
                * (1.0 if island[a] == island[b] else apart)
                * float(rng.uniform(0.7, 1.3)),
                latency_s=latency_s,
            )
            for b in range(devices)
        )
        for a in range(devices)
    )
    machines = tuple(
        Device(name=f"d{i}", speed=s, mem_bytes=m)
        for i, (s, m) in enumerate(zip(speeds, mem_bytes, strict=True))
    )
    model = ModelCost(layers=costs, before=before, head=head)
    return Case(model=model, cluster=Cluster(devices=machines, links=links), samples=samples)


def large_case(rng: np.random.Generator, devices: int, layers: int, *, fits: float = math.inf) -> Case:
    """Draws a cluster of islands of 8 devices and a deep model; 16 samples per device.

    Speeds of 1, 1/2 and 1/4 of 20 TFLOP/s, all measured with 5 % noise; 50 GB/s inside an island, 3 GB/s between them.

    Args:
        rng: drawn from.
        devices, layers: how many.
        fits: part of the model's parameters, gradients and optimizer state that a device's memory holds; 1/4 of
            that again is there for activations.
    """
    speeds = (rng.choice([1.0, 0.5, 0.25], devices) * rng.uniform(0.95, 1.05, devices)).tolist()
    width = rng.uniform(0.5, 2.0, layers)
    costs = tuple(
        LayerCost(
            name=f"layer{i}",
            forward=_cost(2e-5, 1e-4 * float(w)),
            backward=_cost(4e-5, 2e-4 * float(w)),
            param_bytes=2e6 * float(w),
            state_bytes=1.6e7 * float(w),
            activation_bytes=2e5 * float(w),
            output_bytes=float(rng.uniform(0.5, 1.0)) * 1e6,
        )
        for i, w in enumerate(width)
    )
    before = LayerCost(
        name="before", forward=_cost(0.0, 1e-4), backward=_cost(0.0, 1e-4), param_bytes=1e7, output_bytes=1e6
    )
    head = LayerCost(name="head", forward=_cost(0.0, 3e-4), backward=_cost(0.0, 6e-4), param_bytes=1e7)
    need = sum(c.state_bytes for c in costs)
    mem_bytes = math.inf if math.isinf(fits) else 1.25 * fits * need
    noise = rng.uniform(0.95, 1.05, (devices, devices))
    near, far = (
        Link(bandwidth_bytes_per_s=5e10, latency_s=5e-6),
        Link(bandwidth_bytes_per_s=3e9, latency_s=2e-5),
    )
    links = tuple(
        tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * float(noise[a, b]))
            for b in range(devices)
            for link in [near if a // 8 == b // 8 else far]
        )
        for a in range(devices)
    )
    machines = tuple(Device(name=f"d{i}", speed=s, mem_bytes=mem_bytes) for i, s in enumerate(speeds))
    model = ModelCost(layers=costs, before=before, head=head)
    return Case(model=model, cluster=Cluster(devices=machines, links=links), samples=16 * devices)
