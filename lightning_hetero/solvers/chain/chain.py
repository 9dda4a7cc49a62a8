"""One pipeline in a given order of devices: what it is made of (layer P).

What it takes is in `lightning_hetero.solvers.chain.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats, Layers, layers_of
from lightning_hetero.types import Cluster, Device, Link, ModelCost

DepthRule: TypeAlias = Literal["per_link", "low_memory"]

TINY_S = 1e-290
"""Stands for a period of 0 s."""


@dataclass(frozen=True, kw_only=True)
class DeviceChain:
    """One pipeline: layers, devices in the order of stages, and the links between them.

    Attributes:
        layers: the backbone for the size of micro-batch at hand.
        devices: [S] by position; the first is the leader.
        links: [S] from position i to i + 1: activations. The last one, from the last position to the leader (*the
            loop*): the backbone's output. Not used with a single stage.
        back: [S] the other way around: gradients.
        micro_batches: of one step.
        depth: how many micro-batches are kept in flight; ``low_memory`` holds fewer where links are slow.
    """

    layers: Layers
    devices: Sequence[Device]
    links: Sequence[Link]
    back: Sequence[Link]
    micro_batches: int = 1
    depth: DepthRule = "per_link"

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def speeds(self) -> Floats:
        """[S] by position."""
        return np.array([d.speed for d in self.devices], dtype=np.float64)

    @cached_property
    def mem_bytes(self) -> Floats:
        """[S] by position."""
        return np.array([d.mem_bytes for d in self.devices], dtype=np.float64)

    @cached_property
    def capped(self) -> bool:
        """Whether a device has a memory cap."""
        return bool(np.isfinite(self.mem_bytes).any())

    @cached_property
    def wires(self) -> Floats:
        """[4, S] latency and bandwidth forwards, latency and bandwidth backwards; of the loop in the last column."""
        ahead, back = (self.links, self.back) if len(self) > 1 else ([Link()], [Link()])
        rows = [[link.latency_s for link in ahead], [link.bandwidth_bytes_per_s for link in ahead]]
        rows += [[link.latency_s for link in back], [link.bandwidth_bytes_per_s for link in back]]
        return np.array(rows, dtype=np.float64)

    @cached_property
    def leader_s(self) -> tuple[float, float]:
        """Time of the code before the backbone and of the head, on the leader [s]."""
        return self.layers.before_s / self.devices[0].speed, self.layers.head_s / self.devices[0].speed

    @cached_property
    def beside_s(self) -> tuple[float, float]:
        """What the first link carries besides its own, forwards and backwards [s]: between two devices, the loop."""
        if len(self) != 2:
            return 0.0, 0.0
        ahead, back = self.crossing_s(1, self.layers.cut_sizes[-1:])
        return float(back[0]), float(ahead[0])

    @cached_property
    def slowest_s(self) -> float:
        """A period that is long enough for every split, and at which every depth is the least [s]."""
        _, most = self.layers.cut_range_bytes
        sizes = np.full(len(self), most)
        sizes[-1] = self.layers.cut_sizes[-1]
        ahead, back = self.crossing_s(slice(None), sizes)
        work = float(self.layers.work_to[-1]) / float(self.speeds.min())
        return max(1.001 * (work + sum(self.leader_s) + float((ahead + back).sum())), TINY_S)

    def crossing_s(self, position: int | slice, sizes: Floats) -> tuple[Floats, Floats]:
        """Returns the time of ``sizes`` [bytes] over the link behind ``position``, forwards and backwards [s]."""
        ahead_s, ahead, back_s, back = self.wires[:, position]
        return ahead_s + sizes / ahead, back_s + sizes / back


def chain_of(
    model: ModelCost | Layers, cluster: Cluster, ranks: Sequence[int], *, micro_samples: int = 1,
    micro_batches: int = 1, depth: DepthRule = "per_link",
) -> DeviceChain:  # fmt: skip
    """Returns the pipeline of ``ranks`` in this order.

    Args:
        model: costs by layer, or `layers_of` it, which is worth it for many chains of the same micro-batch.
        cluster: where devices and links are taken from.
        ranks: of the cluster, in the order of stages; the first is the leader.
        micro_samples: samples of a micro-batch; not used where ``model`` is `Layers`.
        micro_batches, depth: as in `DeviceChain`.
    """
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    return DeviceChain(
        layers=model if isinstance(model, Layers) else layers_of(model, micro_samples),
        devices=[cluster.devices[r] for r in ranks], links=[cluster.links[a][b] for a, b in pairs],
        back=[cluster.links[b][a] for a, b in pairs], micro_batches=micro_batches, depth=depth,
    )  # fmt: skip
