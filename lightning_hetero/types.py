"""Vocabulary shared by every layer: what is measured, what is decided, what is recorded.

Pure data (layer P): frozen dataclasses and plain functions, no torch, no clock, no environment.
Units stand in the names: ``_s`` seconds, ``_bytes`` bytes, ``samples_per_s`` samples per second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "AffineCost",
    "Allocation",
    "Cost",
    "Event",
    "PiecewiseLinearCost",
    "SpeedSample",
    "Status",
]


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
    """``T(b) = fixed_s + per_sample_s * b``: what a device costs below and above saturation alike.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    fixed_s: float
    per_sample_s: float

    def __post_init__(self) -> None:
        for name in ("fixed_s", "per_sample_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"AffineCost.{name}={value!r} must be a finite number >= 0 (seconds)")

    def seconds(self, samples: float) -> float:
        return self.fixed_s + self.per_sample_s * samples

    def most_samples(self, deadline_s: float) -> float:
        if deadline_s < self.fixed_s:
            return -math.inf
        if self.per_sample_s == 0.0:
            return math.inf
        return (deadline_s - self.fixed_s) / self.per_sample_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecewiseLinearCost:
    """Linear between knots, e.g. a GPU: flat below saturation, then linear (LB-BSP, "pairwise-linear").

    Left of the first knot the first value holds; right of the last knot the last slope goes on.

    Args:
        samples: knots [samples], strictly increasing, at least two.
        seconds_at: time at each knot [s], non-decreasing.

    Raises:
        ValueError: fewer than two knots, or knots out of order.
    """

    samples: tuple[float, ...]
    seconds_at: tuple[float, ...]

    def __post_init__(self) -> None:
        n = len(self.samples)
        if n < 2 or n != len(self.seconds_at):
            raise ValueError(
                f"PiecewiseLinearCost needs two or more knots and as many times, got {n} and {len(self.seconds_at)}"
            )
        if any(b <= a for a, b in zip(self.samples, self.samples[1:], strict=False)):
            raise ValueError(f"PiecewiseLinearCost.samples must increase strictly, got {self.samples}")
        if self.seconds_at[0] < 0 or any(
            b < a for a, b in zip(self.seconds_at, self.seconds_at[1:], strict=False)
        ):
            raise ValueError(
                f"PiecewiseLinearCost.seconds_at must be >= 0 and never decrease, got {self.seconds_at}"
            )

    def seconds(self, samples: float) -> float:
        if samples <= self.samples[0]:
            return self.seconds_at[0]
        i = min(bisect_right(self.samples, samples), len(self.samples) - 1)
        x0, x1, y0, y1 = self.samples[i - 1], self.samples[i], self.seconds_at[i - 1], self.seconds_at[i]
        return y0 + (samples - x0) * (y1 - y0) / (x1 - x0)

    def most_samples(self, deadline_s: float) -> float:
        if deadline_s < self.seconds_at[0]:
            return -math.inf
        i = min(bisect_right(self.seconds_at, deadline_s), len(self.samples) - 1)
        x0, x1, y0, y1 = self.samples[i - 1], self.samples[i], self.seconds_at[i - 1], self.seconds_at[i]
        if y1 == y0:  # only past the last knot of a flat end: never gets slower
            return math.inf
        return x0 + (deadline_s - y0) * (x1 - x0) / (y1 - y0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedSample:
    """One rank's measurement of one step.

    Attributes:
        rank: global rank.
        step: batch index inside the epoch the time was taken on.
        samples: samples this rank computed on.
        compute_s: seconds of own work; never any waiting for peers.
        wait_s: seconds between the end of own work and the end of the gradient exchange.
    """

    rank: int
    step: int
    samples: int
    compute_s: float
    wait_s: float = 0.0


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
        t_s: seconds since the trace was opened on this rank (passed in; pure code reads no clock).
        data: plain JSON values; units in the keys.
    """

    kind: str
    rank: int
    epoch: int
    step: int
    t_s: float
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
