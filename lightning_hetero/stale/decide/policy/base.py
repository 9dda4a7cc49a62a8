"""What a policy sees and decides (layer P).

The coordinator keeps the books (who is alive, which samples are leased, which version is newest) and the rules that
make every policy exact and free of deadlock. A policy only answers two questions: what does a worker that asks for
work get (`Policy.claim`), and does what has arrived become an update (`Policy.update`).

To write one, implement the two::

    class Greedy(Asynchronous):
        '''Everybody takes eight samples at a time.'''
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

from lightning_hetero.types import LearnedCost

__all__ = ["Apply", "Claim", "Due", "Grant", "Hold", "Holds", "Policy", "Pool", "Pooled", "Wait", "part", "whole"]

_OVERDUE = 3.0
Holds: TypeAlias = Literal["never", "grace", "barrier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Samples that will probably arrive.

    Attributes:
        rank: whose.
        samples: how many.
        end_s: when the chunk was predicted to end; NaN while nothing is known of any worker.
        current: its worker was in the present tick when it asked for it.
    """

    rank: int
    samples: int
    end_s: float
    current: bool

    def eta_s(self, now_s: float) -> float:
        """Returns when they are expected [s]; inf if unknown.

        A chunk that is late by x is expected in three times x: "any moment now" cost 8 % of the time under spells.
        """
        if math.isnan(self.end_s):
            return math.inf
        return self.end_s if self.end_s >= now_s else now_s + _OVERDUE * (now_s - self.end_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A worker asks for work, and everything a policy may know about it.

    Attributes:
        rank: who asks.
        now_s, since_s: the time, and when this worker asked (earlier, if it is held).
        expired: it was held until the deadline the policy set.
        first: first claim of the epoch: must not be held.
        late: it asks from an earlier tick (only at its first claim of the epoch) and cannot end the present one.
        opening: the epoch's first tick.
        served: the worker had a grant in this tick before.
        tick, version, workers: present batch, version of the parameters, live workers.
        batch: samples of the present batch.
        need: samples that are still to arrive before the batch is complete (<= 0 if only a witness is missing).
        room: samples that may be leased now at all.
        share: the worker's part of the batch: by speed, or equal if the policy says so; may be 0.
        witnessed: a worker that is in this tick has contributed.
        due: leases that are valid and under way, each sample once.
        reserved: slices of live workers that have not asked for work in this tick, as if granted when it began.
        next_need: samples of the next batch that nobody has claimed.
        lead: how many pushes this worker is ahead of the slowest live one.
        step_s: smoothed time between the ends of ticks; predicted before there are any; 0 if nothing is known.
        cost: model of this worker's time; None before anything is known of any worker.
    """

    rank: int
    now_s: float
    since_s: float
    expired: bool
    first: bool
    late: bool
    opening: bool
    served: bool
    tick: int
    version: int
    workers: int
    batch: int
    need: int
    room: int
    share: int
    witnessed: bool
    due: tuple[Due, ...]
    reserved: tuple[Due, ...]
    next_need: int
    lead: int
    step_s: float
    cost: LearnedCost | None

    @property
    def equal_share(self) -> int:
        """Samples per worker of an equal split, rounded up."""
        return -(-self.batch // max(self.workers, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Give the worker ``samples`` (the coordinator gives fewer where fewer may be leased), in micro-batches or not."""

    samples: int
    micro: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """Let the worker wait until something happens, at most until ``until_s``."""

    until_s: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """What has arrived since the last update.

    Attributes:
        contributions: pushes that were accepted.
        pushes: these, and those refused because they were not finite.
        samples: in the contributions.
        batch: samples of the present batch.
        missing: samples still to arrive before the batch is complete; <= 0: complete.
        witnessed: a worker that is in this tick has contributed since it began.
        workers: live ones.
        slices: workers that have a part of this batch.
        now_s, began_s: the time, and when the present batch began [s].
        in_s: when each worker that is in this tick first pushed for it [s], ascending.
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
    now_s: float = 0.0
    began_s: float = 0.0
    in_s: tuple[float, ...] = ()
    last: bool = False

    @property
    def complete(self) -> bool:
        """Whether the tick may end: all samples are there and a worker in this tick has contributed."""
        return self.missing <= 0 and self.witnessed


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Make the pool an update.

    Attributes:
        worth: learning rate of the update as a multiple of the user's.
        ends_tick: the batch is over with it.
        skip: what of the batch has not arrived is not trained on in this epoch.
        carry: what of the batch has not arrived is still to come, with the batches after it; not in an epoch's last.
    """

    worth: float = 1.0
    ends_tick: bool = True
    skip: bool = False
    carry: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """No update yet; ask again at ``until_s``, or as ever after the next push."""

    until_s: float


class Policy(ABC):
    """Who waits, who computes what, what counts.

    Attributes:
        name: how configurations call it.
        holds: whether a worker with work left to give is ever kept waiting: ``"never"``, at most for the ``"grace"``,
            or at a ``"barrier"`` for others.
        claims_every_sample: every sample of the epoch is applied exactly once; true unless a policy says otherwise.
        claims_bound: no contribution is applied that is more versions old than this; None: no such claim (or, see
            `bound_for`, one that depends on the number of workers).
        equal_shares: shares are equal rather than by speed.
        grace: longest hold under ``"grace"``, as a fraction of the time of a step.
        compensation: lambda of delay compensation, for the server (DC-ASGD, Zheng et al. 2017); 0: none.
        correction_limit: most that compensation may change an entry of a gradient, in multiples of that entry.
    """

    name: ClassVar[str]
    holds: ClassVar[Holds]
    equal_shares: ClassVar[bool] = False
    grace: float = 0.0
    compensation: float = 0.0
    correction_limit: float = math.inf

    def completes(self, *, linear: bool) -> bool:
        """Whether a late contribution completes the mean of the update that it missed, see `completion`; else it joins
        the mean of the next one.

        Args:
            linear: whether what the optimizers do is linear in the gradients.
        """
        return False

    @property
    def claims_every_sample(self) -> bool:
        return True

    @property
    def claims_bound(self) -> int | None:
        return None

    @abstractmethod
    def claim(self, claim: Claim) -> Grant | Hold:
        """Answers a worker that asks for work."""

    @abstractmethod
    def update(self, pool: Pool) -> Apply | Wait | None:
        """Tells whether the pool becomes an update; asked after every push. May end a tick only if witnessed."""

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
    """One update per tick, at full worth, the moment the batch is complete; a surplus counts for the next."""

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
