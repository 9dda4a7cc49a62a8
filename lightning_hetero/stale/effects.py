"""Carries out what the coordinator decided (layer T).

    Accepted            a slot is added to the pool
    Updated             the pool becomes an update, and is published
    Granted, Passed     a claim is answered
    Refused, Reissued   are counted
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.stale.agreement import Members
from lightning_hetero.stale.coordinator import Coordinator
from lightning_hetero.stale.meters import Meters
from lightning_hetero.stale.outbox import Outbox
from lightning_hetero.stale.protocol import Accepted, Effect, Granted, Passed, Refused, Reissued, Updated
from lightning_hetero.stale.substeps import Substeps
from lightning_hetero.stale.tickwork import TickWork
from lightning_hetero.transport.base import Request, Say

__all__ = ["Computing", "Effects"]


class Computing(NamedTuple):
    """A lease that no final push has come for: who computes, with which version, since when [s]."""

    rank: int
    base: int
    granted_s: float


class Effects:
    """Keeps the claims that wait for an answer and the leases computed on, which effects are about.

    Args:
        coordinator: whose effects they are.
        work: the pools.
        substeps: end with the tick's update.
        outbox: answers and publishes.
        members: the workers that live.
        meters: where all is counted.

    Attributes:
        leases: those computed on, by number.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        work: TickWork,
        substeps: Substeps,
        outbox: Outbox,
        members: Members,
        meters: Meters,
    ) -> None:
        self._coordinator, self._work, self._substeps = coordinator, work, substeps
        self._outbox, self._members, self._meters = outbox, members, meters
        self._claims: dict[int, tuple[Request, float]] = {}  # and when they were made [s]
        self.leases: dict[int, Computing] = {}

    @property
    def claiming(self) -> KeysView[int]:
        """Workers whose claim is unanswered."""
        return self._claims.keys()

    @property
    def version_gap(self) -> int:
        """Versions the oldest lease is behind."""
        return max((self._coordinator.version - lease.base for lease in self.leases.values()), default=0)

    def claimed(self, rank: int, claim: Request, now: float) -> None:
        """A worker claims work; some effect will answer it."""
        self._claims[rank] = (claim, now)

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._claims.pop(rank, None)
        self._drop_leases(rank)

    def forget_claims(self) -> None:
        """The run has failed; all who claimed have been told."""
        self._claims.clear()

    def _drop_leases(self, rank: int) -> None:
        self.leases = {number: lease for number, lease in self.leases.items() if lease.rank != rank}

    def carry_out(
        self,
        effects: Sequence[Effect],
        now: float,
        push: Request | None = None,
        slot: Tensor | None = None,
    ) -> None:
        """Carries out what the coordinator decided.

        Args:
            effects: in order.
            now: time [s].
            push, slot: what caused them, if a push did.
        """
        for effect in effects:
            if isinstance(effect, Granted):
                self._granted(effect, now)
            elif isinstance(effect, Passed):
                asked = self._answered(effect.rank, now)
                words = self._work.words[asked.tick :]
                self._outbox.answer(effect.rank, Say.PASSED, tick=effect.tick, numbers=words)
            elif isinstance(effect, Accepted):
                assert push is not None and slot is not None
                base = self.leases.pop(effect.lease).base
                self._meters.accepted(effect.rank, effect.samples, effect.staleness, push.compute_s)
                self._work.accept(effect, push, slot, base)
            elif isinstance(effect, Updated):
                self._work.update(effect)
                self._work.keep_only({lease.base for lease in self.leases.values()})
                self._outbox.publish()
                self._substeps.applied()
            elif isinstance(effect, Refused):
                self._meters.discarded[effect.reason] += effect.samples
                self.leases.pop(effect.lease, None)
            else:
                assert isinstance(effect, Reissued)
                self._meters.reissued[effect.reason] += effect.samples

    def _answered(self, rank: int, now: float) -> Request:
        """Takes the claim of a worker that is answered now."""
        claim, at_s = self._claims.pop(rank)
        self._meters.held(rank, now - at_s)
        return claim

    def _granted(self, granted: Granted, now: float) -> None:
        self._answered(granted.rank, now)
        self._drop_leases(granted.rank)
        if granted.spans:
            self.leases[granted.lease] = Computing(granted.rank, granted.base, now)
            self._work.granted(granted.base)
        self._outbox.answer(
            granted.rank, Say.GRANT, tick=granted.tick, version=granted.base, lease=granted.lease, micro=granted.micro,
            numbers=[number for span in granted.spans for number in span], hint=granted.hint,
            flags=self._coordinator.policy.threshold_for(len(self._members.live)) or 0,
        )  # fmt: skip
