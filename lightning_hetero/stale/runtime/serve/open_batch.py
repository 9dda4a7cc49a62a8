"""The pools of the present global step and of its sub-steps, and when each becomes an update (layer T).

    pushes of the global step's last    -> pool       -> Updated      (the coordinator says when)
    pushes of sub-step k                -> subpool k  -> as soon as all are in it, at the latest before Updated

What arrives for a sub-step after it was applied counts for the next global step's, if it is not too old by then; no
subpool outlives two updates, so that what is within the bound when it arrives or is carried over is so when applied.

A pushed gradient waits in its slot until its worker is answered, its pool becomes an update, or the server has nothing
else to do (`OpenBatch.settle`): what came together is added in one pass over memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Updated
from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, KeptMean
from lightning_hetero.stale.runtime.serve.update import Updater, bits
from lightning_hetero.transport.base import Request
from lightning_hetero.transport.flags import PushFlag, Word


class HalfUpdateError(RuntimeError):
    """An optimizer's step has failed: parameters and its state are of no version. The cause is what it raised."""


class OpenBatch:
    """See the module.

    Args:
        updater: applies pools.
        coordinator: knows global step and version.
        counts: where updates are counted.
    """

    def __init__(self, updater: Updater, coordinator: Coordinator, counts: Counts) -> None:
        self._updater, self._coordinator, self._counts = updater, coordinator, counts
        self._completes = coordinator.policy.completes and updater.divide_by is None
        self.begin()

    def begin(self) -> None:
        """Forgets everything; an epoch begins."""
        self._pool = self._new_pool()
        self._subpools: dict[int, GradientSum] = {}
        self._applied: set[int] = set()  # sub-steps of this global step
        self._stepped: set[tuple[int, int]] = set()  # (sub-step, optimizer) in this global step; -1 is the last step
        self._overflowed = False
        self._unread: set[int] = set()  # workers whose slot waits to be added
        self._means: dict[int, KeptMean] = {}  # of the updates from versions that somebody still computes on
        self._count_need()

    def _new_pool(self) -> GradientSum:
        return GradientSum(self._updater.layout, self._updater.spares)

    def _count_need(self) -> None:
        """Notes how many samples the global step that begins still needs."""
        ends, global_step = self._coordinator.ends, self._coordinator.global_step
        self._need = ends[global_step] - self._coordinator.ledger.arrived if global_step < len(ends) else 0

    # ---- contributions ----------------------------------------------------------------------------------------

    def announce(self, request: Request, slot: Tensor) -> None:
        """A push of this global step's last step has arrived from a worker in it, accepted or not."""
        self._take_flags(self._pool, request, slot)

    def accept(self, accepted: Accepted, request: Request, slot: Tensor, base: int) -> None:
        """Adds an accepted push to the pool."""
        pool = self._pool
        if not pool.current:  # not for optimizers that accumulate: whether they step is this global step's to say
            pool.steps = pool.zeroes = pool.steps | (request.steps & request.zeroes)
        pool.ranks.add(accepted.rank)
        mean = self._means.get(base)
        if mean is not None and not request.flags & PushFlag.OVERFLOW:
            pool.buffers.add(slot, samples=request.samples, base=base, rank=accepted.rank)
            self._updater.complete(pool, mean, slot, weight=request.weight, samples=request.samples)
            return
        self._add(pool, accepted.rank, request, slot, base, finite=True, scale=accepted.scale)

    def add_substep(self, rank: int, request: Request, slot: Tensor, base: int, *, finite: bool, counts: bool) -> None:
        """Adds a push to its sub-step.

        Args:
            finite: False: its samples count, its gradients do not.
            counts: False: this sub-step of its samples is in the sum, or applied, already.
        """
        k = request.substep
        if not counts and (k in self._applied or k not in self._subpools):
            return
        pool = self._subpools.setdefault(k, self._new_pool())
        if request.global_step == self._coordinator.global_step:
            self._take_flags(pool, request, slot)
        elif not pool.ranks:
            pool.steps, pool.zeroes = request.steps, request.zeroes
        pool.ranks.add(rank)
        if counts:
            self._add(pool, rank, request, slot, base, finite=finite)
        else:
            pool.samples += request.samples

    def may_wait(self, substep: int, base: int) -> bool:
        """Whether gradients of version ``base`` may wait for the next time that a sub-step is applied."""
        if substep not in self._applied:
            return True
        coordinator = self._coordinator
        return coordinator.global_step + 1 < len(coordinator.ends) and coordinator.within_bound(base, later=1)

    def is_open(self, request: Request) -> bool:
        """Whether a push of the present global step is of a sub-step that is still to be applied in it."""
        k = request.substep
        return request.global_step == self._coordinator.global_step and k in self._subpools and k not in self._applied

    def settle(self, rank: int | None = None) -> None:
        """Adds what waits in slots.

        Args:
            rank: a worker that is about to be answered, and may write its slot then; nothing is done if that does not
                wait. None: there is time now.
        """
        if self._unread if rank is None else rank in self._unread:
            for pool in (self._pool, *self._subpools.values()):
                self._updater.settle(pool)
            self._unread.clear()

    def _take_flags(self, pool: GradientSum, request: Request, slot: Tensor) -> None:
        """Which optimizers step is what any push of the global step says; hyper-parameters are the newest one's."""
        if not pool.current:
            pool.steps = pool.zeroes = 0
        pool.current = True
        pool.steps |= request.steps
        pool.zeroes |= request.zeroes
        pool.numbers = self._updater.layout.numbers_of(slot).tolist()

    def _add(
        self, pool: GradientSum, rank: int, request: Request, slot: Tensor, base: int, *, finite: bool,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        overflow = bool(request.flags & PushFlag.OVERFLOW)
        pool.overflow = pool.overflow or overflow
        if overflow or not finite:
            pool.samples += request.samples
            return
        pool.buffers.add(slot, samples=request.samples, base=base, rank=rank)
        self._updater.add(pool, slot, weight=request.weight, samples=request.samples, scale=scale)
        if pool.waits:
            self._unread.add(rank)

    # ---- updates ----------------------------------------------------------------------------------------------

    def apply_at_once(self, request: Request) -> None:
        """Applies a sub-step that has just been added, worth its samples."""
        pool = self._subpools.pop(request.substep)
        self._apply(pool, request.substep, worth=self._part(pool, request.global_step))

    def _part(self, pool: GradientSum, global_step: int) -> float:
        """Returns the samples of a pool in parts of a batch, at most 1."""
        ends = self._coordinator.ends
        global_step = min(global_step, len(ends) - 1)
        return min(1.0, pool.samples / (ends[global_step] - (ends[global_step - 1] if global_step else 0)))

    def apply_complete(self, done: AbstractSet[int]) -> Iterator[int]:
        """Applies the sub-steps that are complete, in order, and yields their numbers.

        Args:
            done: workers that will push nothing more for any sub-step of this global step.
        """
        for k in sorted(self._subpools.keys() - self._applied):
            pool = self._subpools[k]
            missing = self._coordinator.live - pool.ranks - done
            if not pool.current or (pool.samples < self._need and missing):
                return
            self._apply(self._subpools.pop(k), k)
            self._applied.add(k)
            yield k

    def update(self, updated: Updated) -> int | None:
        """Applies what is left of the sub-steps, then the pool; returns the global step's `Word` if that ends it."""
        for k in sorted(self._subpools.keys() - self._applied):
            late = self._subpools.pop(k)  # by nobody of this global step, if its program has no such step this time
            self._apply(late, k, worth=1.0 if late.current else self._part(late, updated.global_step - 1))
        pool, self._pool = self._pool, self._new_pool()
        bases, base, mean = self._coordinator.bases(), updated.version - 1, None
        if self._completes and pool.weight > 0.0 and base in bases:
            mean = KeptMean(pool.weight, [None] * len(pool.sums))
        self._apply(pool, -1, worth=updated.worth, last=updated.ends_step, mean=mean)
        if mean is not None and not pool.overflow:
            self._means[base] = mean
        self._means = {version: kept for version, kept in self._means.items() if version in bases}
        if not updated.ends_step:  # which optimizers step is what any push of the global step says
            self._pool.steps, self._pool.zeroes, self._pool.current = pool.steps, pool.zeroes, pool.current
            return None
        word = Word.of(steps=len(self._stepped), overflow=self._overflowed)
        self._stepped.clear()
        self._applied.clear()
        self._overflowed = False
        for late in self._subpools.values():  # belongs to the next global step, which has flags of its own
            late.current = False
            late.ranks.clear()
        self._count_need()
        return word

    def _apply(
        self, pool: GradientSum, substep: int, *, worth: float = 1.0, last: bool = True, mean: KeptMean | None = None
    ) -> None:
        began_s = time.perf_counter()
        try:
            version = self._coordinator.version
            stepped = self._updater.apply(pool, version=version, worth=worth, last=last, mean=mean)
        except Exception as error:
            raise HalfUpdateError(
                f"a step of an optimizer failed in the parameter server: {type(error).__name__}: {error}. If it needs"
                " more than gradients, use strategy='hetero_balanced', whose ranks step themselves"
            ) from error
        self._counts.applied(time.perf_counter() - began_s)
        if pool.overflow and stepped:
            self._overflowed = True
            self._counts.overflows += 1
        self._stepped |= {(substep, o) for o in bits(stepped)}
