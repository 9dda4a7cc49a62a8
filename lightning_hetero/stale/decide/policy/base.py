"""What a policy sees and decides (layer P).

The coordinator keeps the books (which workers are alive, which samples are assigned, which version is current) and the
rules that make every policy exact and free of deadlock. A policy only answers two questions: what does a worker that
asks for work get (`Policy.claim`), and does what has arrived become an update (`Policy.update`).

To write one, implement the two::

    class Greedy(Asynchronous):
        '''Every worker takes eight samples at a time.'''
        name, holds = "greedy", "never"

        def claim(self, claim):
            return Grant(samples=8)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from lightning_hetero.types import AffineCost

Holds: TypeAlias = Literal["never", "grace", "barrier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Samples that will probably arrive.

    Attributes:
        rank: worker that computes them.
        samples: how many.
        in_s: when they are expected, from now [s]; inf if nothing is known.
        current: whether the worker was in the present global step when it asked for them.
    """

    rank: int
    samples: int
    in_s: float
    current: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A worker asks for work, and everything a policy may know about it.

    Attributes:
        rank: worker that asks.
        expired: it was held for as long as the policy asked for.
        first: first claim of the epoch: must not be held.
        late: it asks from an earlier global step (only at its first claim of the epoch) and cannot end the present one.
        opening: this is the epoch's first global step.
        served: the worker had an assignment in this global step before.
        workers: live workers.
        batch: samples of the present batch.
        need: samples that are still to arrive before the batch is complete (<= 0 if only a witness is missing).
        share: the worker's part of the batch: by speed, or equal if the policy says so; may be 0.
        witnessed: a worker that is in this global step has contributed.
        due: samples that are being computed, each once.
        reserved: slices of live workers that have not asked for work in this global step, as if assigned at its start.
        lead: how many pushes this worker is ahead of the slowest live one.
        step_s: smoothed time of a global step; predicted before there are any; 0 if nothing is known.
        cost: model of this worker's time; None before anything is known of any worker.
    """

    rank: int
    expired: bool
    first: bool
    late: bool
    opening: bool
    served: bool
    workers: int
    batch: int
    need: int
    share: int
    witnessed: bool
    due: tuple[Due, ...]
    reserved: tuple[Due, ...]
    lead: int
    step_s: float
    cost: AffineCost | None

    @property
    def equal_share(self) -> int:
        """Samples per worker of an equal split, rounded up."""
        return -(-self.batch // max(self.workers, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Assign ``samples`` to the worker (fewer where fewer are left), computed in micro-batches or not."""

    samples: int
    micro: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """Let the worker wait until something happens, at most for ``patience_s`` from its claim."""

    patience_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """What has arrived since the last update.

    Attributes:
        contributions: pushes that were accepted.
        pushes: these, and those refused because they were not finite.
        samples: in the contributions.
        batch: samples of the present batch.
        missing: samples still to arrive before the batch is complete; <= 0: complete.
        witnessed: a worker that is in this global step has contributed since it began.
        workers: live ones.
        slices: workers that have a part of this batch.
        last: the batch is the epoch's last one.
    """

    contributions: int
    pushes: int
    samples: int
    batch: int
    missing: int
    witnessed: bool
    workers: int
    slices: int
    last: bool = False

    @property
    def complete(self) -> bool:
        """Whether the global step may end: all samples are there and a worker in this step has contributed."""
        return self.missing <= 0 and self.witnessed


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Make the pool an update.

    Attributes:
        worth: learning rate of the update as a multiple of the user's.
        ends_step: the global step is over with it. What of its batch has not arrived is then still to come, with the
            batches after it; the last batch of an epoch must be complete.
    """

    worth: float = 1.0
    ends_step: bool = True


class Policy(ABC):
    """Which workers wait, which computes what, what counts.

    Every sample of an epoch is applied exactly once, whatever a policy decides.

    Attributes:
        name: how configurations call it.
        holds: whether a worker with work left to give is ever kept waiting: ``"never"``, at most for the ``"grace"``,
            or at a ``"barrier"`` for others.
        claims_bound: no contribution is applied that is more versions old than this; None: no such claim (or, see
            `bound_for`, one that depends on the number of workers).
        equal_shares: shares are equal rather than by speed.
        grace: longest hold under ``"grace"``, as a fraction of the time of a global step.
        completes: a late contribution completes the mean of the update that it missed, see `completed`; else it joins
            that of the next one. For policies whose updates are all worth a global batch; `scale` is then not asked.
    """

    name: ClassVar[str]
    holds: ClassVar[Holds]
    equal_shares: ClassVar[bool] = False
    grace: float = 0.0
    completes: ClassVar[bool] = False

    @property
    def claims_bound(self) -> int | None:
        return None

    @abstractmethod
    def claim(self, claim: Claim) -> Grant | Hold:
        """Answers a worker that asks for work."""

    @abstractmethod
    def update(self, pool: Pool) -> Apply | None:
        """Says whether the pool becomes an update; asked after every push. May end a global step only if witnessed."""

    def bound_for(self, workers: int) -> int | None:
        """Returns the greatest staleness that is accepted [versions]; the coordinator refuses what is older."""
        return self.claims_bound

    def threshold_for(self, workers: int) -> int | None:
        """Returns the version gap from which a worker shall return early; None: never."""
        return None

    def scale(self, staleness: int, workers: int) -> float:
        """Returns the factor of a contribution that is ``staleness`` versions old."""
        return 1.0

    def settings(self) -> dict[str, Any]:
        """Returns name and arguments, as plain values."""
        public: Mapping[str, Any] = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return {"name": self.name, **public}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.settings().items() if k != "name")
        return f"{type(self).__name__}({arguments})"


class Pooled(Policy):
    """One update per global step, at full worth, the moment the batch is complete; a surplus counts for the next."""

    def update(self, pool: Pool) -> Apply | None:
        return Apply() if pool.complete else None


def whole(owner: str, name: str, value: object, least: int) -> int:
    """Returns ``value`` if it is a whole number of at least ``least``; else TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{owner}({name}={value!r}) must be a whole number, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{owner}({name}={value!r}) must be at least {least}")
    return value


def part(owner: str, name: str, value: Any, unit: str) -> float:
    """Returns ``value`` if it is a number >= 0 (inf too), a fraction of ``unit``; else ValueError."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and value >= 0.0):
        raise ValueError(f"{owner}({name}={value!r}) must be a number >= 0, a fraction of {unit}")
    return float(value)
