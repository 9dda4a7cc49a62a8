"""What is to be planned, in arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.chain import DepthRule, DeviceChain, chain_of
from lightning_hetero.solvers.chain.layers import Floats, Layers, fixed_and_per_sample, layers_of
from lightning_hetero.solvers.tied_layers import joined
from lightning_hetero.types import Cluster, Link, ModelCost


class Pipe(NamedTuple):
    """Ranks in the order of stages, the leader first; stage s holds the layers [cuts[s], cuts[s + 1])."""

    ranks: tuple[int, ...]
    cuts: tuple[int, ...]


class ProblemArrays:
    """What is to be planned, in arrays.

    Args:
        model, cluster: costs.
        samples: global batch.
        sizes: of full micro-batches that may be chosen, increasing.
        depth: as in `DeviceChain`.

    Attributes:
        outside: what the leader computes and holds besides layers, before and behind the backbone, as one layer.
        outside_s: [2] its fixed time and time per sample [s].
        one: the backbone for micro-batches of one sample.
        work_s: [2, L + 1] fixed time and time per sample of the layers in front of i [s].
        speeds: [D] by device.
        caps: [D] memory by device [bytes].
        capped: whether a device has a memory cap.
    """

    def __init__(
        self, model: ModelCost, cluster: Cluster, samples: int, sizes: tuple[int, ...], *,
        depth: DepthRule = "per_link",
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.samples, self.sizes = model, cluster, samples, sizes
        self.depth: DepthRule = depth
        self.n_layers, self.n_devices = len(model.layers), len(cluster.devices)
        self.outside, self.one = joined([model.before, model.head]), layers_of(model, 1)
        self.outside_s: Floats = np.array(fixed_and_per_sample(self.outside))
        self.work_s: Floats = np.zeros((2, self.n_layers + 1))
        for layer, cost in enumerate(model.layers):
            self.work_s[:, layer + 1] = self.work_s[:, layer] + fixed_and_per_sample(cost)
        self.speeds: Floats = np.array([d.speed for d in cluster.devices], dtype=np.float64)
        self.caps: Floats = np.array([d.mem_bytes for d in cluster.devices], dtype=np.float64)
        self.capped = bool(np.isfinite(self.caps).any())
        self._layers: dict[int, Layers] = {}

    @cached_property
    def latency_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return self._by_link(lambda link: link.latency_s)

    @cached_property
    def per_byte_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return 1.0 / self._by_link(lambda link: link.bandwidth_bytes_per_s)

    @cached_property
    def per_byte_rows(self) -> list[list[float]]:
        """``per_byte_s``, to be asked for one number at a time."""
        return self.per_byte_s.tolist()

    @cached_property
    def param_bytes(self) -> Floats:
        """[L + 1] of the layers in front of i."""
        return np.concatenate([[0.0], np.cumsum([cost.param_bytes for cost in self.model.layers])])

    def _by_link(self, number: Callable[[Link], float]) -> Floats:
        return np.array([[number(link) for link in row] for row in self.cluster.links], dtype=np.float64)

    def chain(self, ranks: tuple[int, ...], size: int, micro_batches: int) -> DeviceChain:
        """Returns the pipeline of ``ranks`` in this order for micro-batches of ``size`` samples."""
        if size not in self._layers:
            self._layers[size] = layers_of(self.model, size)
        return chain_of(self._layers[size], self.cluster, ranks, micro_batches=micro_batches, depth=self.depth)

    def part(self, ranks: Sequence[int]) -> int:
        """Returns how many samples these devices get in proportion to speed, one at least."""
        return max(1, round(self.samples * float(self.speeds[list(ranks)].sum()) / float(self.speeds.sum())))
