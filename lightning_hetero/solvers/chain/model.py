"""The model of the time and memory of one pipeline in a given order of devices (layer P).

The model is ours (the paper behind the pipeline engine is known by its abstract only). A micro-batch goes through the
stages in order, back from the last stage to the first device (*the leader*), which computes the head and the loss, and
the gradients return the same way:

    stage    (sum of its layers) / speed;  the leader's device also runs the code before the backbone, and the head
    link     latency + bytes at the cut / bandwidth, each direction on its own; the *loop* is the last -> leader link
    bottleneck = the longest of all stages and all directions of links
    fill       = all stages + both directions of all links                      (one micro-batch on its own)
    total      = fill + (micro_batches - 1) * period,   period >= bottleneck

Between two devices the loop has no separate wire: each direction of the link carries the loop's messages as well.

**In flight.** To sustain a period P, stage i must hold ``depth_i`` micro-batches between forward and backward. Links
and the head count as separate stages in flight (textbook 1F1B forgets them), with t_i the link's round trip:

    per_link    L_i = L_(i+1) + 1 + ceil(t_i / P),              L_S = 1 for the head, t_(S-1) of the loop
    low_memory  min(L_i, C_i), C_i = max(ceil(R_i / P) + 1, C_(i+1) + 1), C_S = 1, R_i from stage i to the end and back

at most ``micro_batches``, and 1 where there is a single stage. Memory of a stage = its state + depth * (its activations
and its input); the input of the first stage is an output of the code before the backbone, which keeps it.

**Period and bottleneck.** Memory depends on the depth and the depth on the period. A split whose activations do not
fit at the pace of its bottleneck fits, perhaps, at a slower pace with fewer micro-batches in flight. So *the period of
a split is the least P >= bottleneck at which every stage fits its device*: that is the fixed point, it is unique
because depths only fall as P grows, and equal to the bottleneck unless memory is short.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.chain import TINY_S, DeviceChain, Floats, Ints
from lightning_hetero.types import Status

# A round trip of exactly k periods takes k, and bytes that fill a device exactly fit, whatever the last bits say.
_PERIOD_SNAP = 1.0 - 1e-9
ROOM_SNAP = 1.0 - 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainPlan:
    """Contiguous stages, and what the model says of them.

    Attributes:
        cuts: stage s holds the layers [cuts[s], cuts[s + 1]); empty if infeasible.
        bottleneck_s: the longest stage or link per micro-batch.
        period_s: time between micro-batches: the bottleneck, or longer where memory allows fewer in flight.
        fill_s: one micro-batch on its own.
        total_s: ``fill_s + (micro_batches - 1) * period_s``; ``inf`` if infeasible.
        depths: most micro-batches in flight, per stage.
        memory_bytes: per stage.
        status: whether there is a valid split.
        reason: which constraint cannot be met and what would help, in words; empty if there is a split.
    """

    cuts: tuple[int, ...]
    bottleneck_s: float = math.inf
    period_s: float = math.inf
    fill_s: float = math.inf
    total_s: float = math.inf
    depths: tuple[int, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    status: Status = Status.OPTIMAL
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OPTIMAL


class Times(NamedTuple):
    """Of n splits at once.

    Attributes:
        bottleneck_s, fill_s: [n].
        trips_s: [n, S] round trip of the link behind each stage, the loop's at last.
        rests_s: [n, S] from the stage to the end and back, its own time included.
    """

    bottleneck_s: Floats
    fill_s: Floats
    trips_s: Floats
    rests_s: Floats


def times(chain: DeviceChain, cuts: Ints) -> Times:
    """Returns the modelled times of ``cuts`` [n, S + 1]; the cuts are not checked."""
    layers, (before_s, head_s) = chain.layers, chain.leader_s
    work = layers.work_to[cuts]
    stages: Floats = (work[:, 1:] - work[:, :-1]) / chain.speeds
    ahead, back = chain.crossing_s(slice(None), layers.cut_sizes[cuts[:, 1:]])
    trips = ahead + back
    ahead[:, 0] += chain.beside_s[0]
    back[:, 0] += chain.beside_s[1]
    busy: Floats = np.maximum(ahead, back)
    busy[:, 0] = np.maximum(busy[:, 0], stages[:, 0] + (before_s + head_s))
    busy[:, 1:] = np.maximum(busy[:, 1:], stages[:, 1:])
    stages[:, 0] += before_s
    rests = np.cumsum((stages + trips)[:, ::-1], axis=1)[:, ::-1] + head_s
    return Times(np.max(busy, axis=1), rests[:, 0], trips, rests)


def depths(chain: DeviceChain, split: Times, period_s: Floats) -> Ints:
    """Returns how many micro-batches each stage holds [n, S] at the periods [n]."""
    s, most = len(chain), chain.micro_batches
    if s == 1:
        return np.ones((len(period_s), 1), dtype=np.int64)
    per = period_s[:, None]
    held = 1.0 + np.cumsum((1.0 + periods(split.trips_s, per))[:, ::-1], axis=1)[:, ::-1]
    if chain.depth == "low_memory":
        place = np.arange(s)
        from_here = np.maximum(1.0 + periods(split.rests_s, per), 2.0) + place
        held = np.minimum(held, np.maximum.accumulate(from_here[:, ::-1], axis=1)[:, ::-1] - place)
    return np.minimum(held, most).astype(np.int64)


def periods(spans_s: Floats | float, period_s: Floats) -> Floats:
    """Returns how many periods begin within spans of time: ``ceil(span / period)``, and 0 of any length within 0 s."""
    return np.ceil(spans_s / np.maximum(period_s, TINY_S) * _PERIOD_SNAP)


def room(state_bytes: Floats, activation_bytes: Floats, mem_bytes: Floats | float) -> Floats:
    """Returns how many micro-batches in flight fit in addition to the state: a real number, < 1 if not one does."""
    with np.errstate(divide="ignore", invalid="ignore"):
        fit = (mem_bytes - state_bytes) / activation_bytes / ROOM_SNAP
    bare = np.where(state_bytes <= mem_bytes / ROOM_SNAP, np.inf, -np.inf)
    return np.where(activation_bytes > 0.0, fit, bare)


def stage_bytes(chain: DeviceChain, cuts: Ints) -> tuple[Floats, Floats]:
    """Returns the state, and the activations and the input of one micro-batch, of each stage [n, S]."""
    layers = chain.layers
    state = layers.state_to[cuts]
    state = state[:, 1:] - state[:, :-1]
    activations: Floats = layers.activation_to[cuts[:, 1:]] - layers.kept_to[cuts[:, :-1]]
    state[:, 0] += layers.leader_state_bytes
    activations[:, 0] += layers.leader_activation_bytes
    return state, activations


def fitting_periods(chain: DeviceChain, cuts: Ints, split: Times) -> Floats:
    """Returns the period of each split [n]: the least that is not below its bottleneck and fits; inf if none does."""
    period: Floats = np.array(split.bottleneck_s)
    if not chain.capped:
        return period
    space = room(*stage_bytes(chain, cuts), chain.mem_bytes)
    for i in np.flatnonzero((depths(chain, split, period) > space).any(axis=1)):
        period[i] = _least_period(chain, Times(*(part[i : i + 1] for part in split)), space[i])
    return period


def _least_period(chain: DeviceChain, split: Times, space: Floats) -> float:
    """Returns the least period above its bottleneck at which a single split fits; inf if none is long enough.

    Depths only change where a round trip takes a whole number of periods.
    """
    bottleneck_s = float(split.bottleneck_s[0])
    spans_s = np.concatenate([split.trips_s, split.rests_s] if chain.depth == "low_memory" else [split.trips_s])
    counts = np.arange(1.0, float(spans_s.max()) / max(bottleneck_s, TINY_S) + 1.0)
    paces_s = np.unique(spans_s.ravel()[:, None] / counts)
    paces_s = paces_s[paces_s > bottleneck_s]
    place = bisect_left(
        range(len(paces_s)), True, key=lambda i: bool((depths(chain, split, paces_s[i : i + 1]) <= space).all())
    )
    return float(paces_s[place]) if place < len(paces_s) else math.inf


def evaluate(chain: DeviceChain, cuts: Sequence[int]) -> ChainPlan:
    """Returns what the model says of one split.

    Infeasible if a stage exceeds its device's memory at any pace; the reason names the first one.

    Raises:
        ValueError: ``cuts`` are not S + 1 strictly increasing numbers from 0 to L.

    >>> from lightning_hetero.solvers.chain.chain import Layers
    >>> from lightning_hetero.types import Device, Link
    >>> layers = Layers(work_s=[1.0, 2.0, 1.0], cut_bytes=[0.0, 3.0, 3.0, 3.0])
    >>> devices = [Device(name="fast", speed=2.0), Device(name="slow")]
    >>> links = [Link(bandwidth_bytes_per_s=6.0), Link()]
    >>> chain = DeviceChain(layers=layers, devices=devices, links=links, back=links, micro_batches=8)
    >>> plan = evaluate(chain, (0, 2, 3))
    >>> plan.bottleneck_s, plan.fill_s, plan.total_s, plan.depths
    (1.5, 3.5, 14.0, (4, 2))
    """
    ends = tuple(int(c) for c in cuts)
    assert len(ends) == len(chain) + 1 and (ends[0], ends[-1]) == (0, len(chain.layers)), ends
    assert all(a < b for a, b in pairwise(ends)), ends
    array = np.array([ends], dtype=np.int64)
    split = times(chain, array)
    period = fitting_periods(chain, array, split)
    state, activations = stage_bytes(chain, array)
    period_s, bottleneck_s, fill_s = float(period[0]), float(split.bottleneck_s[0]), float(split.fill_s[0])
    if math.isinf(period_s):
        held = depths(chain, split, np.array([chain.slowest_s]))
        reason = _overfull(chain, ends, state + held * activations)
        return ChainPlan(cuts=(), status=Status.INFEASIBLE, reason=reason)
    held = depths(chain, split, period)
    return ChainPlan(
        cuts=ends, bottleneck_s=bottleneck_s, period_s=period_s, fill_s=fill_s,
        total_s=fill_s + (chain.micro_batches - 1) * period_s, depths=tuple(held[0].tolist()),
        memory_bytes=tuple((state + held * activations)[0].tolist()),
    )  # fmt: skip


def _overfull(chain: DeviceChain, cuts: tuple[int, ...], need: Floats) -> str:
    i = int(np.argmax(need[0] > chain.mem_bytes))
    device = chain.devices[i]
    return (
        f"stage {i}, layers {cuts[i]} to {cuts[i + 1] - 1}, needs {size(float(need[0, i]))} at least,"
        f" against {size(device.mem_bytes)} of {device.name!r}"
    )


def size(n_bytes: float) -> str:
    """Returns ``3.1 GiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0 if n_bytes < 1024.0 else min(int(math.log(n_bytes, 1024.0)), len(units) - 1)
    value = n_bytes / 1024.0**power
    return f"{value:.1f} {units[power]}"
