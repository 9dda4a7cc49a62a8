"""Policies with a barrier at every update: stock data-parallel training, and backup workers (layer P)."""

from __future__ import annotations

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
    whole,
)

__all__ = ["Backup", "Bsp"]


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
    claims_every_sample = False
    equal_shares = True

    def __init__(self, *, spares: int = 1) -> None:
        self.spares = whole("Backup", "spares", spares, 0)

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
