"""Clusters that change, fixed before anything is measured; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.joint.simulated.traces import Trace, degraded_links, diurnal_load, markov_speeds, merged
from lightning_hetero.types import AffineCost, Cluster, Device, LayerCost, Link, ModelCost

LAYERS, SAMPLES = 48, 128
STATE, PARAMS, OUTPUT = 16e6, 4e6, 1e5
DWELL = 150.0  # batches that a state of the whole cluster lasts on average
MOVE = 0.1  # batches that a layer takes to move
UNEVEN = (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25)
EQUAL4 = (1.0,) * 4


def model_of(layers: int = LAYERS) -> ModelCost:
    """Blocks of slightly different weight; per sample 0.18 s on a device of speed 1 in all, for 48."""
    free = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    ends = LayerCost(name="", forward=free, backward=free)
    work = np.random.default_rng(7).uniform(0.5e-3, 2e-3, layers)
    return ModelCost(
        layers=tuple(
            LayerCost(
                name=f"block{i}",
                forward=AffineCost(fixed_s=1e-4, per_sample_s=float(w)),
                backward=AffineCost(fixed_s=1e-4, per_sample_s=2.0 * float(w)),
                param_bytes=PARAMS,
                state_bytes=STATE,
                activation_bytes=OUTPUT,
                output_bytes=OUTPUT,
            )
            for i, w in enumerate(work)
        ),
        before=ends,
        head=ends,
    )


def cluster_of(speeds: tuple[float, ...], mem_bytes: float = math.inf) -> Cluster:
    """Links of 1 GB/s and 0.1 ms everywhere."""
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    devices = tuple(Device(name=f"device{i}", speed=s, mem_bytes=mem_bytes) for i, s in enumerate(speeds))
    return Cluster(devices=devices, links=((link,) * len(speeds),) * len(speeds))


@dataclass(frozen=True)
class Traced:
    """How a cluster changes; equal only to itself.

    Attributes:
        trace: by its length in batches and a seed.
        drawn: it depends on the seed.
    """

    trace: Callable[[int, int], Trace]
    drawn: bool = True


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One cluster and how it changes.

    Attributes:
        title: for tables.
        speeds: of the devices.
        traced: the changes.
        fitting: layers that fit a device; None: all.
        move: what a layer takes to move, in batches of the first plan.
        noise: of each measured time.
    """

    title: str
    speeds: tuple[float, ...]
    traced: Traced
    fitting: int | None = None
    move: float = MOVE
    noise: float = 0.0

    @property
    def cluster(self) -> Cluster:
        if self.fitting is None:
            return cluster_of(self.speeds)
        return cluster_of(self.speeds, self.fitting * STATE + 0.4 * SAMPLES * self.fitting * OUTPUT)


def _speeds(n: int, dwell: float = DWELL, odds: tuple[float, ...] = (0.6, 0.25, 0.15)) -> Traced:
    return Traced(
        lambda length, seed: markov_speeds(n, length, np.random.default_rng(seed), dwell=dwell * n, odds=odds)
    )


def _links(length: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    return merged(
        markov_speeds(8, length, rng, dwell=2 * DWELL * 8),
        degraded_links(8, length, rng, dwell=2 * DWELL * 8, factor=50.0),
    )


BASE, FAST = _speeds(8), _speeds(8, DWELL / 4)
HOURS = Traced(lambda length, _: diurnal_load(8, length, period=1200.0, most=4.0, steps=12), drawn=False)
SCENARIOS: dict[str, Scenario] = {
    "base": Scenario(title="base", speeds=UNEVEN, traced=BASE),
    "slow": Scenario(title="slow changes (dwell x 4)", speeds=UNEVEN, traced=_speeds(8, 4 * DWELL)),
    "fast": Scenario(title="fast changes (dwell / 4)", speeds=UNEVEN, traced=FAST),
    "capped": Scenario(title="memory: 16 of 48 layers fit", speeds=UNEVEN, traced=BASE, fitting=16),
    "capped9": Scenario(title="memory: 9 of 48 layers fit", speeds=UNEVEN, traced=BASE, fitting=9),
    "fast_capped": Scenario(title="16 fit, fast changes", speeds=UNEVEN, traced=FAST, fitting=16),
    "heavy": Scenario(title="16 fit, moving x 4", speeds=UNEVEN, traced=BASE, fitting=16, move=4 * MOVE),
    "heavier": Scenario(title="16 fit, moving x 13", speeds=UNEVEN, traced=BASE, fitting=16, move=13 * MOVE),
    "noisy": Scenario(title="16 fit, 5% noise", speeds=UNEVEN, traced=BASE, fitting=16, noise=0.05),
    "noisier": Scenario(title="16 fit, 15% noise", speeds=UNEVEN, traced=BASE, fitting=16, noise=0.15),
    "links": Scenario(title="16 fit, links degrade x 50", speeds=UNEVEN, traced=Traced(_links), fitting=16),
    "diurnal": Scenario(
        title="16 fit, load by the hour",
        speeds=UNEVEN,
        traced=HOURS,
        fitting=16,
    ),
    "equal": Scenario(
        title="4 equal, rarely slow",
        speeds=EQUAL4,
        traced=_speeds(4, odds=(0.9, 0.07, 0.03)),
    ),
}
