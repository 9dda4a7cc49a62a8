"""The five policies that the engine brings (layer P).

`Asynchronous` ones make an update of n of the batch's B samples worth n/B. That is safe for SGD; Adam normalises each
small noisy update and loses: 1.6 to 2.3 times the final loss in our measurements.
"""

from __future__ import annotations

import math
from typing import ClassVar

from lightning_hetero.stale.decide.policy.base import (
    Apply,
    Claim,
    Due,
    Grant,
    Hold,
    Holds,
    Policy,
    Pool,
    Pooled,
    part,
    whole,
)  # fmt: skip


class Flexible(Pooled):
    """Flexible barrier: updates are DDP's in number, size and learning rate; contributions are at most ``bound`` old.

    A worker takes its share of the batch, by predicted speed. One that finds all of the batch claimed is held only if
    the rest is predicted to arrive within the grace, and never longer; otherwise it computes a small top-up chunk with
    the *current* weights, and what the straggler computes counts for a later update. With equal constant speeds nothing
    is ever stale and every update is exactly its batch.

    A late contribution completes the mean of the update that it missed, and the next update moves by the difference,
    whatever the optimizer: so it does not act as more momentum. The server keeps that mean, a copy of the gradients for
    each version that somebody still computes on. Losses that are sums, and steps inside a batch of manual optimization,
    join the next update; so does all that is late under a subclass with ``completes = False``.

    Ours, in the spirit of SaPS's abstract ("limit the staleness of parameters without waiting for stragglers").

    Args:
        bound: versions a contribution may be old, >= 0. 1, 2 and 4 trained equally well; 2 recomputes less than 1.
        grace: longest hold, as a fraction of the time of a step, >= 0; 0 holds nobody, inf waits like a barrier.

    Raises:
        TypeError: ``bound`` is not a whole number.
        ValueError: a number is out of range.
    """

    name = "flexible"
    holds: ClassVar[Holds] = "grace"
    completes = True

    def __init__(self, *, bound: int = 2, grace: float = 0.1) -> None:
        self.bound = whole("Flexible", "bound", bound, 0)
        self.grace = part("Flexible", "grace", grace, "a step")

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
        if claim.expired or not present:  # without a worker in this step no update ever comes
            return Grant(samples=small)
        wait_s = self._complete_in_s(claim, expected)
        # Waiting like a barrier does not depend on a step's time, which the first batch does not know.
        patience_s = math.inf if math.isinf(self.grace) else self.grace * claim.step_s
        if not claim.first and patience_s > 0.0 and wait_s <= patience_s:
            return Hold(patience_s=patience_s)
        # No more than this worker's part of what is missing: larger top-ups are 1-2 % faster under spells, but what
        # they leave over is stale for the next update, and makes it small (measured: twice as many stale samples, and
        # at a learning rate at the edge of stability 1.9 times the final loss instead of 1.1).
        return Grant(samples=min(small, self._fits(claim, wait_s)))

    @staticmethod
    def _complete_in_s(claim: Claim, expected: tuple[Due, ...]) -> float:
        """Returns when the expected samples will have completed the batch, from now [s]."""
        need, witnessed = claim.need, claim.witnessed
        for due in sorted(expected, key=lambda due: (due.in_s, due.samples, due.current)):
            need -= due.samples
            witnessed = witnessed or due.current
            if need <= 0 and witnessed:
                return due.in_s
        return math.inf

    @staticmethod
    def _fits(claim: Claim, wait_s: float) -> int:
        """Returns the largest chunk this worker ends within ``wait_s``, at least 1 [samples]."""
        if claim.cost is None or not math.isfinite(wait_s) or claim.cost.per_sample_s <= 0.0:
            return max(claim.share, 1)
        return max(1, int(min((wait_s - claim.cost.fixed_s) / claim.cost.per_sample_s, claim.batch)))


class Bsp(Pooled):
    """Bulk synchronous (Valiant 1990): equal shares, all workers wait for all; what stock DDP does.

    The part of a worker that dies goes to the others; the part of one that is only slow is waited for.
    """

    name = "bsp"
    holds: ClassVar[Holds] = "barrier"
    equal_shares = True

    @property
    def claims_bound(self) -> int | None:
        return 0

    def claim(self, claim: Claim) -> Grant | Hold:
        return own_part(claim)


def own_part(claim: Claim) -> Grant | Hold:
    """Gives a worker its slice once, then only what no other worker is going to compute, else lets it wait."""
    if claim.late:
        return Hold()
    unclaimed = claim.need - sum(d.samples for d in (*claim.due, *claim.reserved))
    mine = claim.share if not claim.served and claim.share else claim.equal_share
    samples = min(mine, unclaimed)
    return Grant(samples=samples) if samples > 0 else Hold()


class Asynchronous(Policy):
    """Common part: equal chunks, no worker waits, every contribution makes an update."""

    holds: ClassVar[Holds] = "never"
    equal_shares = True

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=max(1, claim.share or claim.equal_share))

    def update(self, pool: Pool) -> Apply | None:
        return self.every(1, pool)

    @staticmethod
    def every(k: int, pool: Pool) -> Apply | None:
        """Returns an update every ``k`` contributions, and one at the end of the batch with what there is."""
        if pool.contributions >= k or pool.complete:
            return Apply(worth=pool.samples / pool.batch, ends_step=pool.complete)
        return None


class Asp(Asynchronous):
    """Fully asynchronous SGD: every contribution is applied at once, however old."""

    name = "asp"


class Ssp(Asynchronous):
    """Stale synchronous parallel (Ho et al. 2013): no worker is more than ``bound`` pushes ahead of the slowest.

    The bound is on the workers' clocks, counted from the beginning of the epoch. It waits for stragglers.

    Args:
        bound: pushes ahead, >= 0.
    """

    name = "ssp"
    holds = "barrier"

    def __init__(self, *, bound: int = 3) -> None:
        self.bound = whole("Ssp", "bound", bound, 0)

    def claim(self, claim: Claim) -> Grant | Hold:
        if claim.lead > self.bound and not claim.first:
            return Hold()
        return super().claim(claim)


class Saps(Asynchronous):
    """The literal reading of SaPS's abstract: a straggler, known by its old version, returns early what it has.

    Workers compute in micro-batches and look between them at the current version. From a gap of ``threshold`` on they
    push what is done, pull, and go on with new samples: slow workers contribute little, but always. ``bound`` is the
    strict backstop. The paper's thresholds are not public; with N equal workers the natural gap is N - 1 already.

    Args:
        threshold: version gap from which to return early, >= 1; None: ceil(max(N, 1.5 (N - 1))).
        bound: versions a contribution may be old, >= 1; None: max(N + 2, 2 (N - 1)), and more than ``threshold``.
        micro: samples between two looks, >= 1; None: a quarter of the chunk.
    """

    name = "saps"

    def __init__(self, *, threshold: int | None = None, bound: int | None = None, micro: int | None = None) -> None:
        self.threshold = None if threshold is None else whole("Saps", "threshold", threshold, 1)
        self.bound = None if bound is None else whole("Saps", "bound", bound, 1)
        self.micro = None if micro is None else whole("Saps", "micro", micro, 1)
        if threshold is not None and bound is not None and bound <= threshold:
            raise ValueError(
                f"Saps(bound={bound}) must exceed threshold={threshold}: else partial work is refused, too"
            )

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def threshold_for(self, workers: int) -> int | None:
        if self.threshold is not None:
            return self.threshold
        most = math.ceil(max(workers, 1.5 * (workers - 1)))
        return most if self.bound is None else max(1, min(most, self.bound - 1))

    def bound_for(self, workers: int) -> int | None:
        if self.bound is not None:
            return self.bound
        least = 0 if self.threshold is None else self.threshold + 1
        return max(workers + 2, 2 * (workers - 1), least)

    def claim(self, claim: Claim) -> Grant | Hold:
        samples = max(1, claim.share or claim.equal_share)
        return Grant(samples=samples, micro=self.micro or -(-samples // 4))
