"""What the server counts in a run, and what is known of now (layer P)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lightning_hetero.stale.decide.coordinator import Coordinator


@dataclass(slots=True)
class Counts:
    """Totals since the start of the server.

    Attributes:
        updates, apply_s, longest_apply_s, last_apply_s: updates, and the time they took [s].
        queue, longest_queue: messages found waiting when the server looked, the last time and at most.
        pushes, samples: accepted, by rank.
        staleness: samples accepted, by the number of versions they were old.
        discarded: samples computed in vain, by reason.
        reissued: samples given out again, by reason.
        hold_s: time from a worker's claim to its answer, by rank [s].
        compute_s: time the workers say they computed for their pushes, by rank [s].
        overflows: updates skipped because gradients overflowed.
    """

    updates: int = 0
    apply_s: float = 0.0
    longest_apply_s: float = 0.0
    last_apply_s: float = 0.0
    queue: int = 0
    longest_queue: int = 0
    pushes: Counter[int] = field(default_factory=Counter[int])
    samples: Counter[int] = field(default_factory=Counter[int])
    staleness: Counter[int] = field(default_factory=Counter[int])
    discarded: Counter[str] = field(default_factory=Counter[str])
    reissued: Counter[str] = field(default_factory=Counter[str])
    hold_s: dict[int, float] = field(default_factory=dict[int, float])
    compute_s: dict[int, float] = field(default_factory=dict[int, float])
    overflows: int = 0

    def applied(self, seconds: float) -> None:
        """An update took so long."""
        self.updates += 1
        self.apply_s += seconds
        self.last_apply_s = seconds
        self.longest_apply_s = max(self.longest_apply_s, seconds)

    def waiting(self, messages: int) -> None:
        """So many messages were waiting."""
        self.queue = messages
        self.longest_queue = max(self.longest_queue, messages)

    def accepted(self, rank: int, samples: int, staleness: int, compute_s: float) -> None:
        """A contribution went into the pool."""
        self.pushes[rank] += 1
        self.samples[rank] += samples
        self.staleness[staleness] += samples
        self.compute_s[rank] = self.compute_s.get(rank, 0.0) + compute_s

    def held(self, rank: int, seconds: float) -> None:
        """A claim was answered after so long."""
        self.hold_s[rank] = self.hold_s.get(rank, 0.0) + seconds

    def stale_fraction(self) -> float:
        """Returns the part of the accepted samples that was computed on an older version; 0 if there are none."""
        total = sum(self.staleness.values())
        return 1.0 - self.staleness[0] / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, where numbers as keys become strings; ``stale_fraction`` besides."""
        plain: dict[str, Any] = {}
        for name in self.__slots__:
            value: Any = getattr(self, name)
            if isinstance(value, dict):
                value = {str(k): v for k, v in sorted(cast("dict[Any, Any]", value).items())}
            plain[name] = value
        return {**plain, "stale_fraction": self.stale_fraction()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Counts:
        """Returns the counts that `as_dict` wrote; raises KeyError if one is missing."""
        values = {name: plain[name] for name in cls.__slots__}
        for name in ("pushes", "samples", "staleness", "hold_s", "compute_s"):
            values[name] = {int(k): v for k, v in values[name].items()}
        for name in ("pushes", "samples", "staleness", "discarded", "reissued"):
            values[name] = Counter(values[name])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What the server has counted so far, and what it knows of now.

    Attributes:
        counts: totals since its start.
        epoch, tick: the present batch.
        version_gap: versions the oldest work under way is behind.
        shares: per rank, from 0 on, samples of the present batch.
        predicted_s: time for them [s]; NaN where unknown.
        equal_s: time for an equal part [s]; NaN where unknown.
    """

    counts: Counts
    epoch: int
    tick: int
    version_gap: int
    shares: tuple[int, ...]
    predicted_s: tuple[float, ...]
    equal_s: tuple[float, ...]

    @classmethod
    def take(cls, counts: Counts, coordinator: Coordinator) -> Measures:
        """Returns what is known at this moment."""
        shares, live = coordinator.shares(), coordinator.live
        part = -(-sum(shares) // max(1, len(live)))

        def seconds(rank: int, samples: int) -> float:
            return coordinator.speeds.predict_s(rank, samples) if rank in live else math.nan

        return cls(
            counts=counts,
            epoch=coordinator.epoch,
            tick=coordinator.tick,
            version_gap=coordinator.version - min(coordinator.bases(), default=coordinator.version),
            shares=shares,
            predicted_s=tuple(seconds(rank, samples) for rank, samples in enumerate(shares)),
            equal_s=tuple(seconds(rank, part) for rank in range(len(shares))),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "counts": self.counts.as_dict()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Measures:
        """Returns the measures that `as_dict` wrote, also from JSON; raises KeyError if one is missing."""
        values: dict[str, Any] = {name: plain[name] for name in cls.__slots__}
        for name in ("shares", "predicted_s", "equal_s"):
            values[name] = tuple(values[name])
        values["counts"] = Counts.of(plain["counts"])
        return cls(**values)
