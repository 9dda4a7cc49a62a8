"""One pipeline in a given order of devices: what it is made of (layer P).

What it takes is in `lightning_hetero.solvers.chain.model`.

The backbone of a pipeline for one size of micro-batch, in arrays that all orders of devices share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.types import Cluster, Device, LayerCost, Link, ModelCost

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The backbone for one size of micro-batch, and what stays with the leader: shared by all orders of devices.

    Attributes:
        work_s: [L] forward and backward of one micro-batch on a device of speed 1.
        cut_bytes: [L + 1] handed on in front of layer i; [0] enters the backbone, [L] leaves it; gradients too.
        before_s: the training step up to the backbone, forward and backward, on a device of speed 1.
        head_s: likewise behind the backbone, loss included.
        state_bytes: [L] parameters, gradients and optimizer state; empty: nothing.
        activation_bytes: [L] kept per micro-batch in flight; empty: nothing. A stage that starts at layer i > 0 keeps
            its input besides, ``cut_bytes[i]``; the backbone's own input is the leader's.
        leader_state_bytes: what the leader holds besides layers.
        leader_activation_bytes: what it keeps besides layers per micro-batch in flight.
        names: [L] for messages; empty: none.
    """

    work_s: Sequence[float]
    cut_bytes: Sequence[float]
    before_s: float = 0.0
    head_s: float = 0.0
    state_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    leader_state_bytes: float = 0.0
    leader_activation_bytes: float = 0.0
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.work_s)

    @cached_property
    def work_to(self) -> Floats:
        """[L + 1] work of the layers in front of i [s]."""
        return _sums(self.work_s, len(self))

    @cached_property
    def state_to(self) -> Floats:
        """[L + 1] state of the layers in front of i [bytes]."""
        return _sums(self.state_bytes, len(self))

    @cached_property
    def activation_to(self) -> Floats:
        """[L + 1] activations of the layers in front of i, per micro-batch in flight [bytes]."""
        return _sums(self.activation_bytes, len(self))

    @cached_property
    def kept_to(self) -> Floats:
        """[L + 1] ``activation_to`` less the input of a stage that starts at i: [i, b) keeps activation_to[b] - it."""
        inputs: Floats = np.array(self.cut_sizes)
        inputs[0] = 0.0
        return self.activation_to - inputs

    @cached_property
    def cut_sizes(self) -> Floats:
        """[L + 1] ``cut_bytes``."""
        return np.asarray(self.cut_bytes, dtype=np.float64)

    @cached_property
    def cut_range_bytes(self) -> tuple[float, float]:
        """The least and the most that a cut between two layers hands on [bytes]; zeros where there is no such cut."""
        inner = self.cut_sizes[1 : len(self)]
        return (float(inner.min()), float(inner.max())) if inner.size else (0.0, 0.0)

    def name(self, layer: int) -> str:
        """Returns ``layer 7 ('blocks.7')`` for messages."""
        return f"layer {layer}" + (f" ({self.names[layer]!r})" if self.names else "")


def _sums(values: Sequence[float], n: int) -> Floats:
    sums = np.zeros(n + 1)
    if len(values):
        np.cumsum(values, out=sums[1:])
    return sums


def layers_of(model: ModelCost, samples: int) -> Layers:
    """Returns the backbone's costs for micro-batches of ``samples`` samples.

    The head keeps no activations in flight: its backward follows its forward, so one micro-batch counts as state.
    """
    outputs = [cost.output_bytes for cost in (model.before, *model.layers)]
    head_bytes = model.head.state_bytes + samples * model.head.activation_bytes
    return Layers(
        work_s=[_both_s(layer, samples) for layer in model.layers], cut_bytes=[samples * v for v in outputs],
        before_s=_both_s(model.before, samples), head_s=_both_s(model.head, samples),
        state_bytes=[layer.state_bytes for layer in model.layers],
        activation_bytes=[samples * layer.activation_bytes for layer in model.layers],
        leader_state_bytes=model.before.state_bytes + head_bytes,
        leader_activation_bytes=samples * model.before.activation_bytes,
        names=[layer.name for layer in model.layers],
    )  # fmt: skip


def fixed_and_per_sample(cost: LayerCost) -> tuple[float, float]:
    """Returns the fixed time and the time per sample, forward and backward [s]."""
    forward, backward = cost.forward, cost.backward
    return forward.fixed_s + backward.fixed_s, forward.per_sample_s + backward.per_sample_s


def _both_s(cost: LayerCost, samples: int) -> float:
    fixed_s, per_sample_s = fixed_and_per_sample(cost)
    return fixed_s + per_sample_s * samples


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
