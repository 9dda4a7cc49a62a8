"""Policies with a barrier at every update: stock data-parallel training, backup workers, a quorum (layer P)."""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_hetero.stale.decide.policy.base import (
    Apply,
    Claim,
    Grant,
    Hold,
    Holds,
    Policy,
    Pool,
    Pooled,
    Wait,
    part,
    whole,
)

__all__ = ["Backup", "Bsp", "Quorum"]


class Bsp(Pooled):
    """Bulk synchronous (Valiant 1990): equal shares, everybody waits for everybody; what stock DDP does.

    The part of a worker that dies goes to the others; the part of one that is only slow is waited for.
    """

    name = "bsp"
    holds: ClassVar[Holds] = "barrier"
    equal_shares = True

    @property
    def claims_bound(self) -> int | None:
        return 0

    def claim(self, claim: Claim) -> Grant | Hold:
        return _own_part(claim)


class Backup(Policy):
    """Backup workers (Chen et al., *Revisiting Distributed Synchronous SGD*, 2016; m-sync SGD).

    A batch is over with the contributions of all live workers but ``spares``; late ones are refused and their samples
    skipped for this epoch. An update has full worth although it has fewer samples, which costs final loss; and one
    must know in advance how many workers will be slow.

    Args:
        spares: workers not waited for, >= 0; at least one is always waited for.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is negative.
    """

    name = "backup"
    holds: ClassVar[Holds] = "barrier"
    equal_shares = True

    def __init__(self, *, spares: int = 1) -> None:
        self.spares = whole("Backup", "spares", spares, 0)

    @property
    def claims_every_sample(self) -> bool:
        return False

    @property
    def claims_bound(self) -> int | None:
        return 0

    def claim(self, claim: Claim) -> Grant | Hold:
        return _own_part(claim)

    def update(self, pool: Pool) -> Apply | None:
        enough = min(max(pool.workers - self.spares, 1), max(pool.slices, 1))
        if pool.witnessed and (pool.missing <= 0 or pool.pushes >= enough):
            return Apply(skip=True)
        return None


class Quorum(Policy):
    """A barrier for a quorum: an update goes out when so many workers are in and a grace window after that is over.

    The window is as long as ``grace`` times what the quorum took, so no time need be known; who comes within it is in
    time. With ``bound=0`` others are wasted, as under `Backup`: their samples are skipped for this epoch. With a bound
    they are late: their samples count with those of a later batch, and where they would be too old others compute them.
    The last batch of an epoch then waits for all of it. Shares are equal, and an update has full worth.

    The words are those of quorum-based commit and of federated rounds with a report window; the form is ours.

    Args:
        quorum: workers that must be in, >= 1; None: more than half. Never more than have a part of the batch.
        grace: length of the window, as a fraction of the time from the batch's beginning to the quorum, >= 0; inf
            waits for all.
        bound: versions a late contribution may be old, >= 0; 0: none counts.

    Raises:
        TypeError: a count is not a whole number.
        ValueError: a number is out of range.
    """

    name = "quorum"
    holds: ClassVar[Holds] = "barrier"
    equal_shares = True

    def __init__(self, *, quorum: int | None = None, grace: float = 0.1, bound: int = 2) -> None:
        self.quorum = None if quorum is None else whole("Quorum", "quorum", quorum, 1)
        self.grace = part("Quorum", "grace", grace, "the time that the quorum took")
        self.bound = whole("Quorum", "bound", bound, 0)

    @property
    def claims_every_sample(self) -> bool:
        return self.bound > 0

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def claim(self, claim: Claim) -> Grant | Hold:
        return _own_part(claim)

    def update(self, pool: Pool) -> Apply | Wait | None:
        if pool.complete:
            return Apply()
        if not pool.witnessed or (self.bound and pool.last):
            return None
        enough = self.quorum or pool.workers // 2 + 1
        enough = min(enough, max(pool.workers, 1), max(pool.slices, 1))
        if len(pool.in_s) < enough or math.isinf(self.grace):
            return None
        quorum_s = pool.in_s[enough - 1]
        until_s = quorum_s + self.grace * (quorum_s - pool.began_s)
        if pool.now_s < until_s:
            return Wait(until_s=until_s)
        return Apply(carry=True) if self.bound else Apply(skip=True)


def _own_part(claim: Claim) -> Grant | Hold:
    """Gives a worker its slice once, then only what nobody else is going to compute, else lets it wait."""
    if claim.late:
        return Hold()
    unclaimed = claim.need - sum(d.samples for d in claim.due) - sum(d.samples for d in claim.reserved)
    if not claim.served and claim.share:
        samples = min(claim.share, unclaimed)
    else:
        samples = min(claim.equal_share, unclaimed)
    return Grant(samples=samples) if samples > 0 else Hold()
