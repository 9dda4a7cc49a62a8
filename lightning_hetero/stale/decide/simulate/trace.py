"""What goes into a simulation of the stale engine and what comes out, as plain values (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_hetero.stale.decide.effects import Accepted, Granted, Refused, Span, Updated
from lightning_hetero.types import Event

__all__ = ["ChunkTime", "Costs", "Hooks", "Membership", "Trace", "WorkerTotals"]


class ChunkTime(Protocol):
    """Seconds a worker computes on a chunk; `SimulatedSpeeds.work_s` is one."""

    def __call__(self, rank: int, step: int, now_s: float, samples: int) -> float:
        """Returns the time [s] of ``samples`` samples begun at ``now_s`` in training step ``step`` (over epochs)."""
        ...


class Hooks(Protocol):
    """What a caller may do along the simulated schedule, e.g. train a model. Called in order of simulated time."""

    def begin(self, epoch: int, now_s: float) -> None:
        """An epoch begins: positions are those of its order of samples."""

    def granted(self, granted: Granted, now_s: float) -> None:
        """A worker takes the parameters, which are of version ``granted.base`` now."""

    def accepted(self, accepted: Accepted, granted: Granted, spans: Sequence[Span], now_s: float) -> None:
        """The mean gradient over ``spans``, at the parameters taken with ``granted``, goes into the pool.

        Never called for contributions that are refused, so nothing is computed in vain.
        """

    def refused(self, refused: Refused, now_s: float) -> None:
        """A contribution is thrown away."""

    def updated(self, updated: Updated, now_s: float) -> None:
        """The pool becomes one update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Constant costs of a chunk besides `ChunkTime` [s].

    A push that runs beside the backward pass costs only what is left when backward ends.

    Attributes:
        launch_s: start of a chunk, or of one micro-batch of it.
        pull_s: parameters from server to worker, after the grant.
        push_s: gradients from worker to server, before they count.
        sync_s: from the moment the last worker has finished an epoch to the next epoch.

    Raises:
        ValueError: a cost is negative or not finite.
    """

    launch_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("launch_s", "pull_s", "push_s", "sync_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"Costs.{name}={value!r} must be a finite number >= 0 (seconds)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """A worker dies or joins at ``at_s``.

    Raises:
        ValueError: a negative time, or neither ``dies`` nor ``joins``.
    """

    at_s: float
    rank: int
    what: Literal["dies", "joins"]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.at_s >= 0.0):
            raise ValueError(f"Membership.at_s={self.at_s!r} must be a finite number >= 0 (seconds)")
        if self.what not in ("dies", "joins"):
            raise ValueError(f"Membership.what={self.what!r} must be 'dies' or 'joins'")


@dataclass(kw_only=True, slots=True)
class WorkerTotals:
    """What one worker did. ``busy_s + pull_s + push_s + hold_s + sync_s`` is its time, up to its death.

    Attributes:
        busy_s: computing and launching.
        pull_s, push_s: waiting for transfers.
        hold_s: asked for work and was not answered.
        longest_hold_s: the longest such wait.
        sync_s: finished with the epoch, waiting for the others.
        chunks: pushes made.
        samples: computed samples that count.
        recomputed: computed samples that were refused.
    """

    busy_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    hold_s: float = 0.0
    longest_hold_s: float = 0.0
    sync_s: float = 0.0
    chunks: int = 0
    samples: int = 0
    recomputed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What happened.

    Attributes:
        makespan_s: from the start to the last worker's end of the last epoch.
        workers: totals by rank.
        staleness: samples applied, by the number of versions they were old.
        updates_s: time of each update.
        ticks: ticks completed, over all epochs.
        events: kinds ``epoch``, ``grant``, ``hold``, ``passed``, ``accepted``, ``refused``, ``reissued``, ``update``,
            ``dies``, ``joins``; rank -1 is the server; empty unless asked for.
    """

    makespan_s: float
    workers: Mapping[int, WorkerTotals]
    staleness: Mapping[int, int]
    updates_s: Sequence[float]
    ticks: int
    events: Sequence[Event] = ()

    @property
    def max_staleness(self) -> int:
        """Largest staleness of any applied sample [versions]."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over applied samples [versions]; 0 if there are none."""
        total = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / total if total else 0.0

    @property
    def recomputed(self) -> int:
        """Samples computed in vain."""
        return sum(w.recomputed for w in self.workers.values())

    def waiting(self) -> float:
        """Returns the fraction of the workers' time spent held or waiting for the others at an epoch's end."""
        parts = [(w.hold_s + w.sync_s, w.busy_s + w.pull_s + w.push_s) for w in self.workers.values()]
        waited = math.fsum(w for w, _ in parts)
        total = waited + math.fsum(w for _, w in parts)
        return waited / total if total > 0.0 else 0.0
