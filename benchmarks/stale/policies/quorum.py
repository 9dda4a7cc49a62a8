"""Barriers that do not wait for all workers."""

from __future__ import annotations

from typing import ClassVar

from lightning_hetero.stale.policy import Apply, Claim, Grant, Hold, Policy, Pool, own_part, whole


class Quorum(Policy):
    """A batch is over with the contributions of a quorum; the samples of the others count with those of a later one.

    Where these would be more than ``bound`` versions old, other workers compute them. The last batch of an epoch waits
    for all of it. Shares are equal, and an update has full worth. The word is that of quorum-based commit; the form is
    ours.

    Args:
        quorum: contributions that must be in, >= 1; None: of more than half of the workers.
        bound: versions a late contribution may be old, >= 0.
    """

    name = "quorum"
    holds: ClassVar = "barrier"
    equal_shares = True

    def __init__(self, *, quorum: int | None = None, bound: int = 2) -> None:
        self.quorum = None if quorum is None else whole("Quorum", "quorum", quorum, 1)
        self.bound = whole("Quorum", "bound", bound, 0)

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def claim(self, claim: Claim) -> Grant | Hold:
        return own_part(claim)

    def enough(self, workers: int) -> int:
        """Returns how many contributions end a batch."""
        return self.quorum or workers // 2 + 1

    def update(self, pool: Pool) -> Apply | None:
        if pool.complete:
            return Apply()
        enough = max(1, min(self.enough(pool.workers), pool.workers, pool.slices))
        return Apply() if pool.witnessed and not pool.last and pool.pushes >= enough else None


class Backup(Quorum):
    """Backup workers (Chen et al., *Revisiting Distributed Synchronous SGD*, 2016): all but ``spares`` are waited for.

    What comes late is not used: its samples are computed again, with a later batch.

    Args:
        spares: workers not waited for, >= 0; at least one is always waited for.
    """

    name = "backup"

    def __init__(self, *, spares: int = 1) -> None:
        self.spares = whole("Backup", "spares", spares, 0)
        self.bound = 0

    def enough(self, workers: int) -> int:
        return workers - self.spares
