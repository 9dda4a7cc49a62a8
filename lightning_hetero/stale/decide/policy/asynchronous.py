"""Policies that apply contributions as they come: an update of n of the batch's B samples is worth n/B (layer P).

Safe for SGD; Adam normalises each small noisy update and loses: 1.6 to 2.3 times the final loss in our measurements.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from lightning_hetero.stale.decide.policy.base import Apply, Claim, Grant, Hold, Holds, Policy, Pool, whole

__all__ = ["Asp", "Asynchronous", "Buffered", "Damping", "DcAsgd", "Drop", "DynSgd", "Saps", "Ssp"]

Damping = Literal["dynsgd", "dynsgd_per_worker", "delay_adaptive"]
_DAMPINGS = ("dynsgd", "dynsgd_per_worker", "delay_adaptive")


class Asynchronous(Policy):
    """Common part: equal chunks, nobody waits, every ``k``-th contribution makes an update.

    Args:
        damping: factor of a contribution that is tau versions old, N workers: None: 1; ``"dynsgd"``: 1/(1 + tau)
            (Jiang et al. 2017 as in dist-keras); ``"dynsgd_per_worker"``: 1/(1 + tau/N), our milder form, the one in
            our tables; ``"delay_adaptive"``: N/max(N, tau) (Mishchenko et al. 2022).
        compensation: lambda of DC-ASGD (Zheng et al. 2017), applied by the server; 0: none.
        chunk: samples per assignment; None: an equal part of the batch.

    Raises:
        TypeError: a count is not a whole number.
        ValueError: a number is out of range, or the damping unknown.
    """

    holds: ClassVar[Holds] = "never"
    equal_shares = True
    damping: Damping | None = None

    def __init__(
        self, *, damping: Damping | None = None, compensation: float = 0.0, chunk: int | None = None
    ) -> None:
        owner = type(self).__name__
        if damping is not None and damping not in _DAMPINGS:
            raise ValueError(f"{owner}(damping={damping!r}) must be None or one of {', '.join(_DAMPINGS)}")
        self.damping = damping
        self.compensation = _finite(owner, "compensation", compensation)
        self.chunk = _chunk(owner, chunk)

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=self.chunk or max(1, claim.share or claim.equal_share))

    def update(self, pool: Pool) -> Apply | None:
        return self._every(1, pool)

    @staticmethod
    def _every(k: int, pool: Pool) -> Apply | None:
        """An update every ``k`` contributions, and one at the end of the batch with what there is."""
        if pool.contributions >= k or pool.complete:
            return Apply(worth=pool.samples / pool.batch, ends_tick=pool.complete)
        return None

    def scale(self, staleness: int, workers: int) -> float:
        if self.damping == "dynsgd":
            return 1.0 / (1.0 + staleness)
        if self.damping == "dynsgd_per_worker":
            return 1.0 / (1.0 + staleness / max(workers, 1))
        if self.damping == "delay_adaptive":
            return workers / max(workers, staleness, 1)
        return 1.0


def _finite(owner: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{owner}({name}={value!r}) must be a finite number >= 0")
    return float(value)


def _chunk(owner: str, chunk: int | None) -> int | None:
    return None if chunk is None else whole(owner, "chunk", chunk, 1)


class Asp(Asynchronous):
    """Fully asynchronous SGD: every contribution is applied at once, however old."""

    name = "asp"


class DynSgd(Asynchronous):
    """DynSGD (Jiang et al., SIGMOD 2017): a contribution that is tau versions old counts 1/(tau + 1).

    What `Asp(damping="dynsgd")` does, by the name of the paper.

    Args:
        chunk: see `Asynchronous`.
    """

    name = "dynsgd"
    damping = "dynsgd"

    def __init__(self, *, chunk: int | None = None) -> None:
        self.chunk = _chunk("DynSgd", chunk)


class DcAsgd(Asynchronous):
    """DC-ASGD (Zheng et al., ICML 2017): g + lambda g * g * (w_now - w_then), the gradient as it would be by now.

    Entry by entry, so it is refused with optimizers that are not, such as Muon. The server keeps a copy of the
    parameters for each version that somebody computes on: at most one per rank.

    The correction grows with the gradient and with the way the parameters have gone meanwhile, and paper and authors'
    code put no limit to it. Ours: it changes no entry by more than ``correction_limit`` times that entry, so with 1
    none changes its sign and none more than doubles.

    Args:
        compensation: lambda, >= 0.
        correction_limit: >= 0; inf: none, as in the paper.
        chunk: see `Asynchronous`.

    Raises:
        ValueError: a number is out of range.
    """

    name = "dc_asgd"

    def __init__(
        self, *, compensation: float = 0.5, correction_limit: float = 1.0, chunk: int | None = None
    ) -> None:
        self.compensation = _finite("DcAsgd", "compensation", compensation)
        self.chunk = _chunk("DcAsgd", chunk)
        limit: Any = correction_limit  # whatever a command line has made of it
        self.correction_limit = math.inf if limit == math.inf else _finite("DcAsgd", "correction_limit", limit)


class Ssp(Asynchronous):
    """Stale synchronous parallel (Ho et al. 2013): nobody is more than ``bound`` pushes ahead of the slowest worker.

    The bound is on the workers' clocks, counted from the beginning of the epoch. It waits for stragglers.

    Args:
        bound: pushes ahead, >= 0.
        damping, compensation, chunk: see `Asynchronous`.
    """

    name = "ssp"
    holds = "barrier"

    def __init__(
        self,
        *,
        bound: int = 3,
        damping: Damping | None = None,
        compensation: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__(damping=damping, compensation=compensation, chunk=chunk)
        self.bound = whole("Ssp", "bound", bound, 0)

    def claim(self, claim: Claim) -> Grant | Hold:
        if claim.lead > self.bound and not claim.first:
            return Hold()
        return super().claim(claim)


class Drop(Asynchronous):
    """Ringmaster ASGD (Maranjyan et al. 2025): contributions more than ``bound`` versions old are thrown away.

    Their samples are issued again at once, not when the straggler arrives.

    Args:
        bound: versions a contribution may be old, >= 0.
        damping, compensation, chunk: see `Asynchronous`.
    """

    name = "drop"

    def __init__(
        self,
        *,
        bound: int = 8,
        damping: Damping | None = None,
        compensation: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__(damping=damping, compensation=compensation, chunk=chunk)
        self.bound = whole("Drop", "bound", bound, 0)

    @property
    def claims_bound(self) -> int | None:
        return self.bound


class Saps(Asynchronous):
    """The literal reading of SaPS's abstract: a straggler, known by its old version, returns early what it has.

    Workers compute in micro-batches and look between them at the newest version. From a gap of ``threshold`` on they
    push what is done, pull, and go on with new samples: slow workers contribute little, but always. ``bound`` is the
    strict backstop. The paper's thresholds are not public; with N equal workers the natural gap is N - 1 already.

    Args:
        threshold: version gap from which to return early, >= 1; None: ceil(max(N, 1.5 (N - 1))).
        bound: versions a contribution may be old, >= 1; None: max(N + 2, 2 (N - 1)), and more than ``threshold``.
        micro: samples between two looks, >= 1; None: a quarter of the chunk.
        damping, compensation, chunk: see `Asynchronous`.
    """

    name = "saps"

    def __init__(
        self,
        *,
        threshold: int | None = None,
        bound: int | None = None,
        micro: int | None = None,
        damping: Damping | None = None,
        compensation: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__(damping=damping, compensation=compensation, chunk=chunk)
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
        samples = self.chunk or max(1, claim.share or claim.equal_share)
        return Grant(samples=samples, micro=self.micro or -(-samples // 4))


class Buffered(Asynchronous):
    """Buffered asynchronous updates (FedBuff, Nguyen et al. 2022): one per ``k`` contributions, from any workers.

    Args:
        k: contributions per update, >= 1.
        bound: versions a contribution may be old, >= 0.
        damping, compensation, chunk: see `Asynchronous`.
    """

    name = "buffered"

    def __init__(
        self,
        *,
        k: int = 3,
        bound: int = 2,
        damping: Damping | None = None,
        compensation: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        super().__init__(damping=damping, compensation=compensation, chunk=chunk)
        self.k = whole("Buffered", "k", k, 1)
        self.bound = whole("Buffered", "bound", bound, 0)

    @property
    def claims_bound(self) -> int | None:
        return self.bound

    def update(self, pool: Pool) -> Apply | None:
        return self._every(self.k, pool)
