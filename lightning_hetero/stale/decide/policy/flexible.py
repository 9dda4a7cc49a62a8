"""The default: one update per global batch, from whatever mix of workers, without waiting for stragglers (layer P)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeAlias, get_args

from lightning_hetero.stale.decide.policy.base import Claim, Due, Grant, Hold, Holds, Pooled, part, whole

__all__ = ["Flexible"]

Late: TypeAlias = Literal["auto", "join", "complete"]


class Flexible(Pooled):
    """Flexible barrier: updates are DDP's in number, size and learning rate; contributions are at most ``bound`` old.

    A worker takes its share of the batch, by predicted speed. One that finds all of the batch claimed is held only if
    the rest is predicted to arrive within the grace, and never longer; otherwise it computes a small top-up chunk with
    the *newest* version, and what the straggler computes counts for the next update. With equal constant speeds nothing
    is ever stale and every update is exactly its batch.

    Ours, in the spirit of SaPS's abstract ("limit the staleness of parameters without waiting for stragglers").

    Args:
        bound: versions a contribution may be old, >= 0. 1, 2 and 4 trained equally well; 2 recomputes less than 1.
        grace: longest hold, as a fraction of the time of a step, >= 0; 0 holds nobody, inf waits like a barrier.
        overlap: work ahead on the next batch instead of being held. Hides the transfers, but such contributions are
            one version old: with momentum at a tuned learning rate that costs several times the final loss.
        late: what late contributions count. ``"join"``: they join the mean of the next update. ``"complete"``: they
            complete the mean of the update that they missed, and the next one moves by the difference. The server keeps
            that mean, a copy of the gradients for each version that somebody still computes on. ``"auto"``: complete
            where every optimizer is `torch.optim.SGD` itself, with momentum or not: its steps are linear in the
            gradients, so that two parts come to what one whole would have; else join.

    Raises:
        TypeError: ``bound`` is not a whole number, or ``overlap`` not a bool.
        ValueError: a number is out of range, or ``late`` is none of the three.
    """

    name = "flexible"
    holds: ClassVar[Holds] = "grace"

    def __init__(self, *, bound: int = 2, grace: float = 0.1, overlap: bool = False, late: Late = "auto") -> None:
        self.bound = whole("Flexible", "bound", bound, 0)
        self.grace = part("Flexible", "grace", grace, "a step")
        if type(overlap) is not bool:
            raise TypeError(f"Flexible(overlap={overlap!r}) must be True or False")
        if overlap and bound < 1:
            raise ValueError(f"Flexible(overlap=True, bound={bound}) would refuse all it works ahead: use bound >= 1")
        if late not in get_args(Late):
            raise ValueError(f"Flexible(late={late!r}) must be 'auto', 'join' or 'complete'")
        self.overlap = overlap
        self.late: Late = late

    def completes(self, *, linear: bool) -> bool:
        return self.late == "complete" or (self.late == "auto" and linear)

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def claim(self, claim: Claim) -> Grant | Hold:
        share = max(claim.share, 1)
        expected = claim.due
        if claim.opening:  # a worker that is first at a new epoch must not do the others' part, too
            expected += claim.reserved
        missing = claim.need - sum(d.samples for d in expected)
        if missing > 0:
            return Grant(samples=min(share, missing))
        small = min(share, max(1, -(-claim.need // max(claim.workers, 1))))
        present = claim.witnessed or any(d.current for d in expected)
        if claim.expired or not present:  # without a worker in this tick no update ever comes
            return Grant(samples=small)
        if self.overlap and claim.next_need > 0:
            return Grant(samples=min(share, claim.next_need))
        wait_s = self._end(claim, expected) - claim.now_s
        # Waiting like a barrier does not depend on a step's time, which the first batch does not know.
        patience_s = self.grace * claim.step_s if claim.step_s > 0.0 else 0.0
        if math.isinf(self.grace):
            patience_s = math.inf
        if not claim.first and patience_s > 0.0 and wait_s <= patience_s:
            return Hold(until_s=claim.since_s + patience_s)
        # No more than this worker's part of what is missing: larger fill-ins are 1-2 % faster under spells, but what
        # they leave over is stale for the next update, and makes it small (measured: twice as many stale samples, and
        # at a learning rate at the edge of stability 1.9 times the final loss instead of 1.1).
        return Grant(samples=min(small, self._fits(claim, wait_s)))

    @staticmethod
    def _end(claim: Claim, expected: tuple[Due, ...]) -> float:
        """Returns when the expected samples will have completed the batch [s]."""
        etas = sorted((d.eta_s(claim.now_s), d.samples, d.current) for d in expected)
        need, witnessed = claim.need, claim.witnessed
        for eta, samples, current in etas:
            need -= samples
            witnessed = witnessed or current
            if need <= 0 and witnessed:
                return eta
        return math.inf

    @staticmethod
    def _fits(claim: Claim, wait_s: float) -> int:
        """Returns the largest chunk this worker ends within ``wait_s``, at least 1 [samples]."""
        if claim.cost is None or not math.isfinite(wait_s) or claim.cost.per_sample_s <= 0.0:
            return max(claim.share, 1)
        return max(1, int(min((wait_s - claim.cost.fixed_s) / claim.cost.per_sample_s, claim.batch)))

