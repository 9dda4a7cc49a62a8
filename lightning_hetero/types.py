"""Vocabulary shared by every layer: what is measured, what is decided, what is recorded.

Pure data (layer P): frozen dataclasses and plain functions, no torch, no clock, no environment.
Units stand in the names: ``_s`` seconds, ``_bytes`` bytes, ``samples_per_s`` samples per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

LossReduction = Literal["mean", "sum"]
"""What ``training_step`` returns of its batch's losses."""


class Status(str, Enum):
    """How a solver ended. Failure is a value, never a wrong answer."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"


@runtime_checkable
class Cost(Protocol):
    """Seconds one rank needs for a number of samples; non-decreasing in ``samples``."""

    def seconds(self, samples: float) -> float:
        """Returns the modelled compute time [s] of ``samples`` samples."""
        ...

    def most_samples(self, deadline_s: float) -> float:
        """Returns the largest (real) number of samples whose time is at most ``deadline_s``.

        ``-inf`` if even zero samples take longer; ``inf`` if no number of samples does.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AffineCost:
    """``T(b) = fixed_s + per_sample_s * b``: what a device costs, both below and above saturation.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    fixed_s: float
    per_sample_s: float

    def __post_init__(self) -> None:
        _check_seconds(self, "fixed_s", "per_sample_s")

    def seconds(self, samples: float) -> float:
        return self.fixed_s + self.per_sample_s * samples

    def most_samples(self, deadline_s: float) -> float:
        if deadline_s < self.fixed_s:
            return -math.inf
        if self.per_sample_s == 0.0:
            return math.inf
        return (deadline_s - self.fixed_s) / self.per_sample_s

    def times(self, factor: float) -> AffineCost:
        """Returns the cost of a device that takes ``factor`` times as long."""
        return AffineCost(fixed_s=self.fixed_s * factor, per_sample_s=self.per_sample_s * factor)


def _check_seconds(cost: AffineCost, *names: str) -> None:
    for name in names:
        value = getattr(cost, name)
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{type(cost).__name__}.{name}={value!r} must be a finite number >= 0 (seconds)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedSample:
    """One rank's measurement of one step.

    Attributes:
        rank: global rank.
        step: batch index inside the epoch the time was taken on.
        samples: samples this rank computed on.
        compute_s: seconds of own work; never any waiting for peers.
        wait_s: seconds between the end of own work and the end of the gradient exchange.
        work: of these samples, as the user's ``batch_cost`` counts it, e.g. in tokens; NaN: as many as samples.
        free_cpu, free_mem: part of the host's processors and memory that others left free; NaN: not known.
        most_samples: the most samples that the rank says it can hold; None: not known.
    """

    rank: int
    step: int
    samples: int
    compute_s: float
    wait_s: float = 0.0
    work: float = math.nan
    free_cpu: float = math.nan
    free_mem: float = math.nan
    most_samples: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What is known of all ranks' work, of one step or as means over the steps since the report before.

    Attributes:
        epoch, step: the step, or where the run is.
        records: per rank, samples, own work and waiting of a step.
        predicted_s: per rank, predicted own work for its share of a batch [s]; NaN where unknown.
    """

    epoch: int
    step: int
    records: tuple[SpeedSample, ...]
    predicted_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Integer shares of one global batch.

    Attributes:
        shares: samples per rank; sums to the requested total when ``status`` is optimal, else empty.
        status: whether the shares solve the problem.
        makespan_s: modelled time of the slowest rank [s]; ``inf`` if infeasible.
        lower_bound_s: no split, not even a fractional one, is faster than this [s].
        reason: which constraint cannot be met, in words; empty when optimal.
    """

    shares: tuple[int, ...]
    status: Status = Status.OPTIMAL
    makespan_s: float = math.inf
    lower_bound_s: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status is Status.OPTIMAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of a trace; the same schema for real and for simulated runs.

    Attributes:
        kind: ``run``, ``step``, ``decision``, ``fault``, ...; readers skip kinds they do not know.
        rank: rank that wrote the line.
        epoch: epoch, from 0.
        step: batch index inside the epoch.
        t_s: seconds since the trace was opened on this rank, when it was over (passed in; pure code reads no clock).
        data: plain JSON values; units in the keys.
    """

    kind: str
    rank: int
    epoch: int
    step: int
    t_s: float
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


# ---- what a pipeline is planned from, and the plan -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one process on a CPU.

    Attributes:
        name: for people, e.g. ``node0:cuda:1``.
        speed: relative to the device that layers were profiled on; their times are divided by it.
        mem_bytes: what training may use; ``inf``: no cap.

    Raises:
        ValueError: a speed or a memory that is not positive.
    """

    name: str
    speed: float = 1.0
    mem_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0.0):
            raise ValueError(f"Device.speed={self.speed!r} of {self.name!r} must be a finite number > 0")
        if not self.mem_bytes > 0.0:
            raise ValueError(f"Device.mem_bytes={self.mem_bytes!r} of {self.name!r} must be > 0 (bytes)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction between two devices; the other direction is another link (full duplex).

    Raises:
        ValueError: a bandwidth that is not positive, or a negative latency.
    """

    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0.0:
            raise ValueError(f"Link.bandwidth_bytes_per_s={self.bandwidth_bytes_per_s!r} must be > 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0.0):
            raise ValueError(f"Link.latency_s={self.latency_s!r} must be a finite number >= 0 (seconds)")

    def seconds(self, size_bytes: float) -> float:
        """Returns how long a message of ``size_bytes`` takes [s]."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Devices by rank, and the links between them.

    Attributes:
        devices: by rank.
        links: ``links[a][b]``: from rank a to rank b; what stands on the diagonal is not used.

    Raises:
        ValueError: no device, or links that are not a square of the devices' number.
    """

    devices: tuple[Device, ...]
    links: tuple[tuple[Link, ...], ...]

    def __post_init__(self) -> None:
        n = len(self.devices)
        if n < 1:
            raise ValueError("Cluster.devices is empty: name at least one device")
        if len(self.links) != n or any(len(row) != n for row in self.links):
            rows = [len(row) for row in self.links]
            raise ValueError(f"Cluster.links has rows of {rows} links; {n} devices need {n} rows of {n}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """What a layer, or the code before or behind the layers, costs on a device of speed 1.

    Attributes:
        name: as in the model.
        forward, backward: time of one micro-batch by its samples [s].
        param_bytes: of its trainable parameters, and of no others: their gradients are synchronised between groups.
        state_bytes: parameters, trainable or not, gradients and optimizer state together.
        activation_bytes: kept from forward to backward, per sample; a tensor counts for the first layer that keeps it.
            A stage that begins with this layer keeps its input besides: the ``output_bytes`` of what is in front.
        output_bytes: of what it hands on, per sample.
    """

    name: str
    forward: AffineCost
    backward: AffineCost
    param_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0

    def times(self, factor: float) -> LayerCost:
        """Returns the layer's costs where it takes ``factor`` times as long; its bytes stay."""
        return replace(self, forward=self.forward.times(factor), backward=self.backward.times(factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """The layers of the backbone in order, and what stays with the leader of each group.

    Attributes:
        layers: of the backbone, which are divided among the devices of a group.
        before: the training step up to the backbone; its ``output_bytes`` is the backbone's input.
        head: behind the backbone, loss included.

    Raises:
        ValueError: no layer.
    """

    layers: tuple[LayerCost, ...]
    before: LayerCost
    head: LayerCost

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("ModelCost.layers is empty: a pipeline needs at least one layer")

    @property
    def parts(self) -> tuple[LayerCost, ...]:
        """All of it, in order."""
        return (self.before, *self.layers, self.head)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One pipeline.

    Attributes:
        ranks: its devices in the order of stages; the first is the leader, which runs the training step.
        cuts: stage s holds the layers [cuts[s], cuts[s + 1]); ``len(ranks) + 1`` strictly increasing numbers, from 0.
        samples: its part of the global batch.
        micro_batches: samples of each micro-batch, in order; they sum up to ``samples``.
        depths: most micro-batches in flight, per stage.
        total_s: modelled time of its part, without synchronisation [s].
    """

    ranks: tuple[int, ...]
    cuts: tuple[int, ...]
    samples: int
    micro_batches: tuple[int, ...]
    depths: tuple[int, ...]
    total_s: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Who computes what.

    Attributes:
        groups: the pipelines; empty if infeasible. Ranks in none of them rest.
        status: whether there is a plan.
        total_s: modelled time of a global batch, synchronisation included [s]; ``inf`` if infeasible.
        sync_s: its part for the gradients' synchronisation [s].
        lower_bound_s: no plan is faster than this [s].
        reason: which constraint cannot be met and what would help, in words; empty when there is a plan.
        judged: groupings that a search compared; 0: all that there are, or none.
    """

    groups: tuple[GroupPlan, ...]
    status: Status = Status.OPTIMAL
    total_s: float = math.inf
    sync_s: float = 0.0
    lower_bound_s: float = 0.0
    reason: str = ""
    judged: int = field(default=0, compare=False)

    @property
    def ok(self) -> bool:
        return self.status is Status.OPTIMAL
