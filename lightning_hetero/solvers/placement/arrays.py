"""What is to be planned, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.chain import DepthRule, DeviceChain, chain_of
from lightning_hetero.solvers.chain.layers import Floats, Layers, layers_of
from lightning_hetero.types import Cluster, LayerCost, ModelCost


class Pipe(NamedTuple):
    """Ranks in the order of stages, the leader first; stage s holds the layers [cuts[s], cuts[s + 1])."""

    ranks: tuple[int, ...]
    cuts: tuple[int, ...]


def fixed_and_per_sample(cost: LayerCost) -> tuple[float, float]:
    """Returns the fixed time and the time per sample, forward and backward."""
    forward, backward = cost.forward, cost.backward
    return forward.fixed_s + backward.fixed_s, forward.per_sample_s + backward.per_sample_s


class ProblemArrays:
    """What is to be planned, in arrays.

    Args:
        model, cluster: costs.
        samples: global batch.
        sizes: of full micro-batches that may be chosen, increasing.
        overlap, depth: as in `DeviceChain`.
        sync_overlap: part of the gradients' synchronisation that is hidden behind the last backward passes, 0 to 1.
    """

    def __init__(
        self,
        model: ModelCost,
        cluster: Cluster,
        samples: int,
        sizes: tuple[int, ...],
        *,
        overlap: bool = True,
        depth: DepthRule = "per_link",
        sync_overlap: float = 0.0,
    ) -> None:
        self.model, self.cluster, self.samples, self.sizes = model, cluster, samples, sizes
        self.overlap, self.sync_overlap = overlap, sync_overlap
        self.depth: DepthRule = depth
        self.n_layers, self.n_devices = len(model.layers), len(cluster.devices)
        self._layers: dict[int, Layers] = {}
        self._alike: dict[tuple[int, ...], bytes] = {}

    # ---- devices and links ----

    @cached_property
    def speeds(self) -> Floats:
        """[D] by device."""
        return np.array([d.speed for d in self.cluster.devices], dtype=np.float64)

    @cached_property
    def caps(self) -> Floats:
        """[D] memory by device [bytes]."""
        return np.array([d.mem_bytes for d in self.cluster.devices], dtype=np.float64)

    @cached_property
    def capped(self) -> bool:
        """Whether a device has a memory cap."""
        return bool(np.isfinite(self.caps).any())

    @cached_property
    def latency_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return np.array([[w.latency_s for w in row] for row in self.cluster.links], dtype=np.float64)

    @cached_property
    def per_byte_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return 1.0 / np.array([[w.bandwidth_bytes_per_s for w in row] for row in self.cluster.links], dtype=np.float64)

    @cached_property
    def per_byte_rows(self) -> list[list[float]]:
        """``per_byte_s``, to be asked for one number at a time."""
        return self.per_byte_s.tolist()

    # ---- layers ----

    @cached_property
    def work_s(self) -> Floats:
        """[2, L + 1] fixed time and time per sample of the layers in front of i [s]."""
        return np.array([_sums([fixed_and_per_sample(cost)[i] for cost in self.model.layers]) for i in (0, 1)])

    @cached_property
    def leader_s(self) -> Floats:
        """[2] fixed time and time per sample outside the backbone [s]."""
        return np.array(fixed_and_per_sample(self.model.before)) + np.array(fixed_and_per_sample(self.model.head))

    @cached_property
    def cut_bytes(self) -> Floats:
        """[L + 1] handed on per sample in front of layer i."""
        return np.array([cost.output_bytes for cost in (self.model.before, *self.model.layers)], dtype=np.float64)

    @cached_property
    def param_bytes(self) -> Floats:
        """[L + 1] of the layers in front of i."""
        return _sums([cost.param_bytes for cost in self.model.layers])

    @cached_property
    def state_bytes(self) -> Floats:
        """[L + 1] of the layers in front of i."""
        return _sums([cost.state_bytes for cost in self.model.layers])

    @cached_property
    def activation_bytes(self) -> Floats:
        """[L + 1] of the layers in front of i, per sample in flight."""
        return _sums([cost.activation_bytes for cost in self.model.layers])

    @property
    def leader_param_bytes(self) -> float:
        """Of what is outside the backbone."""
        return self.model.before.param_bytes + self.model.head.param_bytes

    @property
    def leader_state_bytes(self) -> float:
        """Of what is outside the backbone."""
        return self.model.before.state_bytes + self.model.head.state_bytes

    @property
    def leader_activation_bytes(self) -> float:
        """Of what is outside the backbone, per sample in flight."""
        return self.model.before.activation_bytes + self.model.head.activation_bytes

    # ---- pipelines ----

    def alike(self, ranks: tuple[int, ...]) -> bytes:
        """Returns what pipelines have in common whose devices and links are equal position by position."""
        found = self._alike.get(ranks)
        if found is None:
            r = np.array(ranks)
            rows = [self.speeds[r], self.caps[r]]
            if len(ranks) > 1:
                after = np.roll(r, -1)
                rows += [x[a, b] for x in (self.latency_s, self.per_byte_s) for a, b in ((r, after), (after, r))]
            found = self._alike[ranks] = np.array(rows).tobytes()
        return found

    def chain(self, ranks: tuple[int, ...], size: int, micro_batches: int) -> DeviceChain:
        """Returns the pipeline of ``ranks`` in this order for micro-batches of ``size`` samples."""
        layers = self._layers.get(size)
        if layers is None:
            layers = self._layers[size] = layers_of(self.model, size)
        return chain_of(
            layers, self.cluster, ranks, micro_batches=micro_batches, overlap=self.overlap, depth=self.depth
        )

    def part(self, ranks: Sequence[int]) -> int:
        """Returns how many samples these devices get in proportion to speed, one at least."""
        return max(1, round(self.samples * float(self.speeds[list(ranks)].sum()) / float(self.speeds.sum())))


def _sums(values: list[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])
