"""Hands out samples, counts what arrives, decides when it becomes an update: one object for server and simulator (P).

Events go in (`claim`, `push`, `give_back`, `lost`, `joined`, `wake`), effects come out; no clock, no thread, no tensor.
The policy decides who gets how much and when the pool becomes an update; the rules below, and those of `dispatch`
for answers to claims, hold whatever it decides, and make every policy exact and free of deadlock:

- *Witness.* A tick ends only with a contribution of a worker that is in it. Learning rates come with the pushes of
  workers in that tick, and nobody can be at a synchronisation point before it.
- *Strict bound.* The pool is emptied by every update, so staleness at arrival is staleness at application. Leases that
  have become too old are issued again at once; what still comes of them is refused.
- *Liveness.* A lease without a push for long is issued again, and nobody waits longer for a worker without a lease to
  claim one; the worker stays welcome.

A coordinator that bounds staleness without waiting is SaPS's idea (abstract only); the rules are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_hetero.predictors import Predictor
from lightning_hetero.stale.decide.dispatch import Dispatch, Sizing
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Effect,
    Passed,
    Refused,
    Reissued,
    Span,
    Updated,
)  # fmt: skip
from lightning_hetero.stale.decide.epoch import Epoch, check_update
from lightning_hetero.stale.decide.intervals import head
from lightning_hetero.stale.decide.ledger import Ledger
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.decide.speeds import Speeds, StepTime
from lightning_hetero.stale.decide.workers import HeldClaim, Lease, Workers, WorkerState


class Coordinator:
    """See the module. Times are of any one monotonic clock [s].

    Args:
        policy: who waits, who computes what, what counts.
        workers: ranks that take part from the start.
        ahead: fix slices so many global steps early, so that workers can fetch them (`Granted.hint`).
        predictor: model of a worker's time; None: `Kalman`.
        liveness_factor, liveness_s: a lease is issued again when it takes so many times its predicted time, but not
            before so long [s]. Before anything is known, and for a claim that others wait for, it is their product.

    Attributes:
        epoch, tick: present batch; ``tick == len(ends)``: the epoch is over.
        version: of the parameters: number of updates so far.
        ends: cumulative samples behind each global step of the epoch.
        live: ranks that are connected and not silent for longer than the limit.
        ledger: which samples are free, leased, arrived.
        step_s: smoothed time between the ends of ticks [s]; 0 before there are any.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        workers: Iterable[int],
        ahead: int = 0,
        predictor: Predictor | None = None,
        liveness_factor: float = 10.0,
        liveness_s: float = 5.0,
    ) -> None:
        ranks = list(workers)
        if not callable(getattr(policy, "claim", None)):
            raise TypeError(f"policy={policy!r} must be a Policy; by_name({policy!r}) makes one from a name")
        if any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ValueError(f"workers={ranks} must be whole numbers >= 0 (ranks)")
        if type(ahead) is not int or ahead < 0:
            raise ValueError(f"ahead={ahead!r} must be a whole number >= 0 (global steps)")
        if not liveness_factor > 1.0:
            raise ValueError(f"liveness_factor={liveness_factor!r} must exceed 1, else healthy workers count as dead")
        if not liveness_s > 0.0:
            raise ValueError(f"liveness_s={liveness_s!r} must be above 0 seconds")
        self.policy = policy
        self.ahead = ahead
        self.speeds = Speeds(predictor)
        self.workers = Workers(ranks, speeds=self.speeds, liveness_factor=liveness_factor, liveness_s=liveness_s)
        self.version = 0
        self._step = StepTime()
        self._sizing = Sizing(policy, self.workers, ahead=ahead)
        self._dispatch = Dispatch(policy, self.workers, self._sizing, self._step)
        self._books = Epoch(-1, [1], applied=[(0, 1)], tick=1)
        self._resumed: Mapping[int, Any] = {}  # epoch -> sub-steps that count in it, from a checkpoint

    @property
    def epoch(self) -> int:
        return self._books.number

    @property
    def ends(self) -> tuple[int, ...]:
        return self._books.ends if self.epoch >= 0 else ()

    @property
    def tick(self) -> int:
        return self._books.tick if self.epoch >= 0 else 0

    @property
    def over(self) -> bool:
        """Whether the epoch has had all its ticks (or none has begun)."""
        return self._books.over

    @property
    def ledger(self) -> Ledger:
        return self._books.ledger

    @property
    def live(self) -> set[int]:
        return self.workers.ranks()

    @property
    def step_s(self) -> float:
        return self._step.smoothed_s

    # --- events -----------------------------------------------------------------------------------------------

    def begin(
        self, epoch: int, ends: Sequence[int], *, applied: Iterable[Span] = (), tick: int = 0, now: float
    ) -> list[Effect]:
        """Begins an epoch; leases of the one before are void.

        Args:
            epoch: its number.
            ends: cumulative samples behind each of its ticks, strictly increasing.
            applied: samples that are applied already, when an epoch is resumed at ``tick``.
            tick: first tick.
            now: time [s].

        Raises:
            ValueError: ``ends`` or ``applied`` make no epoch, or too few samples are left for the remaining ticks.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch={epoch!r} must be a whole number >= 0")
        books = Epoch(epoch, ends, applied=applied, tick=tick, now=now)
        if tick:  # resumed
            books.ledger.resume_substeps(self._resumed.get(epoch, {}))
        self._resumed = {}
        ticks = len(self.ends)
        effects: list[Effect] = [Passed(rank=w.rank, tick=ticks) for w in self.workers if w.held is not None]
        self.workers.begin(now)
        self._books = books
        self._step.interrupt()
        return effects

    def claim(self, rank: int, tick: int, now: float) -> list[Effect]:
        """A worker in batch ``tick`` asks for work; it is granted, passed, or held (no effect for it yet).

        Raises:
            ValueError: no epoch has begun, or ``tick`` is ahead of the server's.
        """
        if self.epoch < 0:
            raise ValueError(f"rank {rank} claims work before an epoch has begun: call begin() first")
        if not 0 <= tick <= self.tick:
            raise ValueError(f"rank {rank} claims batch {tick} of epoch {self.epoch}, but the server is in {self.tick}")
        worker = self.workers.speaks(rank, now)
        effects = self._free_lease(worker, "abandoned: its worker asks for other work")
        worker.lease, worker.held = None, None
        if worker.grants and (tick < self.tick or self.over):
            effects.append(Passed(rank=rank, tick=self.tick))
        else:
            worker.held = HeldClaim(tick, now)
        return effects + self._settle(now)

    def push(
        self, rank: int, lease: int, now: float, *, tick: int, samples: int | None = None, finite: bool = True
    ) -> list[Effect]:
        """A worker in batch ``tick`` has the gradients of its lease, or of the first ``samples`` of it.

        Args:
            rank: the worker.
            lease: number of its grant.
            now: time [s].
            tick: where the worker is; what counts as being in the present tick.
            samples: computed samples, if it returns early; None: all. The rest is issued again.
            finite: False: the gradients have NaN or Inf; the samples are used up all the same.

        Raises:
            ValueError: ``samples`` is not in 1 to the size of the grant.
        """
        worker = self.workers.get(rank)
        held = worker.lease if worker is not None else None
        if worker is None or held is None or held.number != lease:
            return [Refused(rank=rank, lease=lease, samples=samples or 0, reason="gone")]
        count = held.samples if samples is None else samples
        self._check_samples(held, count)
        self.workers.speaks(rank, now)
        worker.clock += 1
        # What lay still for long (a stopped process) says little about speed: not more than the limit is learned.
        self.speeds.learn(rank, count, min(now - held.granted_s, held.limit_s))
        if held.claimed == self.tick and count == held.samples:
            self.workers.ended(held, now)
        effects = self._receive(worker, held, count, finite, in_tick=tick == self.tick)
        effects += self._update(now)
        return effects + self._settle(now)

    def _receive(
        self, worker: WorkerState, held: Lease, count: int, finite: bool, *, in_tick: bool
    ) -> list[Effect]:
        staleness = self.version - held.base
        effects: list[Effect] = []
        if not self.within_bound(held.base):
            effects += self._free_lease(worker, "stale")
        worker.lease = None
        rank, lease = worker.rank, held.number
        if held.void:
            return [Refused(rank=rank, lease=lease, samples=count, reason=held.void), *effects]
        if held.twin is not None:
            held.twin.void = "gone"
            held.part_from_twin()
        done, rest = head(held.spans, count)
        accepted = None
        if finite:
            scale = self.policy.scale(staleness, len(self.workers.crew))
            accepted = Accepted(rank=rank, lease=lease, samples=count, staleness=staleness, scale=scale)
        self._books.arrive(done, accepted, in_tick=in_tick)
        effects.append(accepted or Refused(rank=rank, lease=lease, samples=count, reason="nonfinite"))
        if rest:
            self.ledger.release(rest)
            effects.append(
                Reissued(rank=rank, lease=lease, samples=held.samples - count, reason="returned early")
            )
        return effects

    def substep(self, lease: Lease, number: int, samples: int) -> bool:
        """Whether the gradients of a push that is not the last of its batch count; if so, that is noted.

        They do not if that step counts already for these samples: it came from a worker that died or was late with
        the last push, so that the samples were issued again, or from the lease's twin. ValueError if ``samples`` is
        not in 1 to the size of the lease.
        """
        self._check_samples(lease, samples)
        return self.ledger.first(number, head(lease.spans, samples)[0])

    def _check_samples(self, lease: Lease, samples: object) -> None:
        if type(samples) is not int or not 1 <= samples <= lease.samples:
            raise ValueError(
                f"rank {lease.rank} pushes samples={samples!r} of lease {lease.number}, which has {lease.samples}:"
                f" give 1 to {lease.samples}, or give the lease back"
            )

    def give_back(self, rank: int, lease: int, now: float) -> list[Effect]:
        """A grant will not be computed: its samples are free again."""
        worker = self.workers.get(rank)
        if worker is None or worker.lease is None or worker.lease.number != lease:
            return []
        self.workers.speaks(rank, now)
        if worker.lease.epoch == self.epoch:
            worker.grants -= 1
        effects = self._free_lease(worker, "given back")
        worker.lease = None
        return effects + self._settle(now)

    def idle(self, rank: int, now: float) -> list[Effect]:
        """A worker computes nothing now: a grant that it has not pushed is given back."""
        worker = self.workers.get(rank)
        lease = None if worker is None else worker.lease
        return [] if lease is None else self.give_back(rank, lease.number, now)

    def lost(self, rank: int, now: float) -> list[Effect]:
        """A worker is dead: its lease is issued again, and nobody counts on it."""
        worker = self.workers.remove(rank)
        if worker is None:
            return []
        effects = self._free_lease(worker, "its worker is dead")
        return effects + self._update(now) + self._settle(now)

    def joined(self, rank: int, now: float) -> list[Effect]:
        """A worker connected, perhaps again; it takes part at once. Unknown ranks that claim join, too."""
        self.workers.speaks(rank, now)
        return self._settle(now)

    def wake(self, now: float) -> list[Effect]:
        """Does what is due by now: ends of holds, leases or workers without a sign of life, second issues."""
        effects: list[Effect] = []
        for worker in self.workers:
            if worker.live and worker.lease is not None and now >= worker.lease.deadline_s:
                worker.live = False
                effects += self._free_lease(worker, "stalled")
                worker.lease.void = worker.lease.void or "gone"
        self.workers.fall_asleep(now)
        return effects + self._update(now) + self._settle(now)

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        return self.workers.wake_s()

    # --- questions --------------------------------------------------------------------------------------------

    def wants_return(self, lease: int) -> bool:
        """Whether the worker should push what it has of this lease now: its version is too far behind."""
        threshold = self.policy.threshold_for(len(self.workers.crew))
        if threshold is None:
            return False
        valid = (worker.valid for worker in self.workers)
        return any(v is not None and v.number == lease and self.version - v.base >= threshold for v in valid)

    def lease(self, rank: int, number: int) -> Lease | None:
        """Returns what a worker computes on in this epoch, valid or not, if that has this number; else None."""
        worker = self.workers.get(rank)
        lease = None if worker is None else worker.lease
        return lease if lease is not None and (lease.number, lease.epoch) == (number, self.epoch) else None

    def within_bound(self, base: int, *, later: int = 0) -> bool:
        """Whether gradients computed with version ``base`` may be applied now, or so many versions later."""
        bound = self.policy.bound_for(len(self.workers.crew))
        return bound is None or self.version + later - base <= bound

    def bases(self) -> set[int]:
        """Returns the versions that somebody computes with in this epoch."""
        leases = (worker.lease for worker in self.workers)
        return {lease.base for lease in leases if lease is not None and lease.epoch == self.epoch}

    def shares(self) -> tuple[int, ...]:
        """Returns samples per rank, from 0 to the highest, of the present batch; 0 for ranks that are not live."""
        if not self.ends:
            return ()
        return self._sizing.shares(self._books)

    def hints(self, rank: int) -> list[Span]:
        """Returns what a worker will probably be granted in the next ``ahead`` ticks; (0, 0) where nothing."""
        return self._sizing.hints(self._books, rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only; ``applied`` leaves out what is pooled: it will be computed again."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "tick": self.tick,
            "applied": self._books.applied() if self.ends else [],
            "substeps": self.ledger.substeps(),
            "step_s": self.step_s,
            "speeds": self.speeds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over version and speeds; `begin` with the state's ``applied`` and ``tick`` resumes its epoch."""
        self.version = int(state["version"])
        self._resumed = {int(state.get("epoch", -1)): state.get("substeps", {})}
        self._step.smoothed_s = float(state["step_s"])
        self.speeds.load_state_dict(state["speeds"])

    # --- bookkeeping ------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        """Answers whoever can be answered now."""
        return [*self._dispatch.answer(self._books, self.version, now)]

    def _free_lease(self, worker: WorkerState, reason: str) -> list[Effect]:
        """Makes a valid lease void, its samples free unless issued a second time."""
        lease = worker.valid
        if lease is None:
            return []
        lease.void = "stale" if reason == "stale" else "gone"
        if lease.part_from_twin():
            return []
        self.ledger.release(lease.spans)
        return [Reissued(rank=worker.rank, lease=lease.number, samples=lease.samples, reason=reason)]

    def _update(self, now: float) -> list[Effect]:
        """Asks the policy whether the pool becomes an update, and makes it one."""
        if self.over:
            return []
        pool = self._books.pool(len(self.live))
        verdict = self.policy.update(pool)
        if verdict is None:
            return []
        check_update(verdict.ends_step, pool, type(self.policy).__name__)
        self.version += 1
        contributions = self._books.empty()
        if verdict.ends_step:
            self._books.advance(now)
            self.workers.begin_tick()
            self._step.ended(now)
        updated = Updated(
            version=self.version, tick=self.tick, samples=pool.samples, contributions=contributions,
            worth=verdict.worth, ends_step=verdict.ends_step,
        )  # fmt: skip
        effects: list[Effect] = [updated]
        for worker in self.workers:
            lease = worker.valid
            if lease is not None and not self.within_bound(lease.base):
                effects += self._free_lease(worker, "stale")
        return effects
