"""Hands out samples, counts what arrives, decides when it becomes an update: one object for server and simulator (P).

Events go in (`claim`, `push`, `give_back`, `lost`, `joined`, `wake`), effects come out; no clock, no thread, no tensor.
The policy decides who gets how much and when the pool becomes an update; the rules below hold whatever it decides, and
make every policy exact and free of deadlock:

- *Once per epoch.* The first claim of a rank in an epoch is answered at once with a grant, a dummy if need be: each
  rank runs at least one step, else epoch-end reductions of metrics do not pair up.
- *Witness.* A tick ends only with a contribution of a worker that is in it. Learning rates come with the pushes of
  workers in that tick, and nobody can be at a synchronisation point before it.
- *Room.* One sample per later tick of the epoch stays unleased, so that each of the epoch's ticks has an update.
- *Strict bound.* The pool is emptied by every update, so staleness at arrival is staleness at application. Leases that
  have become too old are issued again at once; what still comes of them is refused.
- *Liveness.* A lease without a push for long is issued again; its worker stays welcome.
- *Second issue.* When no sample may be given out any more, an idle worker computes an overdue chunk a second time; the
  first result wins.
- *Somebody works.* Workers that would all wait for one another without end do not: the first one gets a sample.

The idea of a coordinator that bounds staleness without waiting is SaPS's (abstract only); the rules are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_hetero.predictors import Predictor
from lightning_hetero.stale.epoch import Epoch
from lightning_hetero.stale.ledger import Ledger, head
from lightning_hetero.stale.policy import Apply, Claim, Due, Grant, Hold, Policy, Pool
from lightning_hetero.stale.protocol import (
    Accepted,
    Contribution,
    Effect,
    Granted,
    Passed,
    Refused,
    Reissued,
    Span,
    Updated,
)
from lightning_hetero.stale.roster import Held, Lease, Roster, Worker
from lightning_hetero.stale.speeds import Speeds

__all__ = ["Coordinator"]

_STEP_WEIGHT = 0.5  # of the newest step in the smoothed one


class Coordinator:
    """See the module. Times are of any one monotonic clock [s].

    Args:
        policy: who waits, who computes what, what counts.
        workers: ranks that take part from the start.
        ahead: fix slices so many ticks early, so that workers can fetch them (`Granted.hint`).
        predictor: model of a worker's time; None: `Kalman`.
        liveness_factor: a lease is issued again when it takes so many times its predicted time ...
        liveness_s: ... but not before this [s]. Before anything is known of any worker the limit is their product.

    Attributes:
        epoch, tick: present batch; ``tick == len(ends)``: the epoch is over.
        version: of the parameters, i.e. number of updates so far.
        ends: cumulative samples behind each tick of the epoch.
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
            raise ValueError(f"ahead={ahead!r} must be a whole number >= 0 (ticks)")
        if not liveness_factor > 1.0:
            raise ValueError(f"liveness_factor={liveness_factor!r} must exceed 1, else healthy workers count as dead")
        if not liveness_s > 0.0:
            raise ValueError(f"liveness_s={liveness_s!r} must be above 0 seconds")
        self.policy = policy
        self.ahead = ahead
        self.speeds = Speeds(predictor)
        self.roster = Roster(ranks, speeds=self.speeds, liveness_factor=liveness_factor, liveness_s=liveness_s)
        self.version = 0
        self.step_s = 0.0
        self._books = Epoch(-1, [1], applied=[(0, 1)], tick=1)
        self._step_from_s: float | None = None

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
        return self.roster.ranks()

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
        ticks = len(self.ends)
        effects: list[Effect] = [Passed(rank=w.rank, tick=ticks) for w in self.roster if w.held is not None]
        self.roster.begin()
        self._books, self._step_from_s = books, None
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
        worker = self.roster.speaks(rank)
        effects = self._free_lease(worker, "abandoned: its worker asks for other work")
        worker.lease, worker.held = None, None
        if worker.grants and (tick < self.tick or self.over):
            effects.append(Passed(rank=rank, tick=self.tick))
        else:
            worker.held = Held(tick, now)
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
        worker = self.roster.get(rank)
        held = worker.lease if worker is not None else None
        if worker is None or held is None or held.number != lease:
            return [Refused(rank=rank, lease=lease, samples=samples or 0, reason="gone")]
        count = held.samples if samples is None else samples
        if type(count) is not int or not 1 <= count <= held.samples:
            raise ValueError(
                f"rank {rank} pushes samples={samples!r} of lease {lease}, which has {held.samples}:"
                f" give 1 to {held.samples}, or give the lease back"
            )
        self.roster.speaks(rank)
        worker.clock += 1
        # What lay still for long (a stopped process) says little about speed: not more than the limit is learned.
        self.speeds.learn(rank, count, min(now - held.granted_s, held.limit_s))
        if held.claimed == self.tick and count == held.samples:
            self.roster.ended(held, now)
        effects = self._receive(worker, held, count, finite, in_tick=tick == self.tick)
        effects += self._update(now)
        return effects + self._settle(now)

    def _receive(
        self, worker: Worker, held: Lease, count: int, finite: bool, *, in_tick: bool
    ) -> list[Effect]:
        staleness = self.version - held.base
        bound = self.policy.bound_for(len(self.roster.crew))
        effects: list[Effect] = []
        if bound is not None and staleness > bound:
            effects += self._free_lease(worker, "stale")
        worker.lease = None
        rank, lease = worker.rank, held.number
        if held.void:
            return [Refused(rank=rank, lease=lease, samples=count, reason=held.void), *effects]
        if held.twin is not None:
            held.twin.void = "gone"
            held.part_from_twin()
        done, rest = head(held.spans, count)
        contribution = Contribution(rank=rank, lease=lease, samples=count, staleness=staleness)
        self._books.arrive(done, contribution if finite else None, in_tick=in_tick)
        if finite:
            scale = self.policy.scale(staleness, len(self.roster.crew))
            effects.append(Accepted(rank=rank, lease=lease, samples=count, staleness=staleness, scale=scale))
        else:
            effects.append(Refused(rank=rank, lease=lease, samples=count, reason="nonfinite"))
        if rest:
            self.ledger.release(rest)
            effects.append(
                Reissued(rank=rank, lease=lease, samples=held.samples - count, reason="returned early")
            )
        return effects

    def give_back(self, rank: int, lease: int, now: float) -> list[Effect]:
        """A grant will not be computed: its samples are free again."""
        worker = self.roster.get(rank)
        if worker is None or worker.lease is None or worker.lease.number != lease:
            return []
        self.roster.speaks(rank)
        if worker.lease.epoch == self.epoch:
            worker.grants -= 1
        effects = self._free_lease(worker, "given back")
        worker.lease = None
        return effects + self._settle(now)

    def lost(self, rank: int, now: float) -> list[Effect]:
        """A worker is dead: its lease is issued again, and nobody counts on it."""
        worker = self.roster.remove(rank)
        if worker is None:
            return []
        effects = self._free_lease(worker, "its worker is dead")
        return effects + self._update(now) + self._settle(now)

    def joined(self, rank: int, now: float) -> list[Effect]:
        """A worker connected, perhaps again; it takes part at once. Unknown ranks that claim join, too."""
        self.roster.speaks(rank)
        return self._settle(now)

    def wake(self, now: float) -> list[Effect]:
        """Does what is due by now: ends of holds, leases without a sign of life, second issues."""
        effects: list[Effect] = []
        for worker in self.roster:
            if worker.live and worker.lease is not None and now >= worker.lease.deadline_s:
                worker.live = False
                effects += self._free_lease(worker, "stalled")
                worker.lease.void = worker.lease.void or "gone"
        return effects + self._update(now) + self._settle(now)

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        return self.roster.wake_s()

    # --- questions --------------------------------------------------------------------------------------------

    def wants_return(self, lease: int) -> bool:
        """Whether the worker should push what it has of this lease now: its version is too far behind."""
        threshold = self.policy.threshold_for(len(self.roster.crew))
        if threshold is None:
            return False
        valid = (worker.valid for worker in self.roster)
        return any(v is not None and v.number == lease and self.version - v.base >= threshold for v in valid)

    def shares(self) -> tuple[int, ...]:
        """Returns samples per rank, from 0 to the highest, of the present batch; 0 for ranks that are not live."""
        if not self.ends:
            return ()
        split = self._split(self._books.batch)
        return tuple(split.get(rank, 0) for rank in range(max((w.rank for w in self.roster), default=-1) + 1))

    def hints(self, rank: int) -> list[Span]:
        """Returns what a worker will probably be granted in the next ``ahead`` ticks; (0, 0) where nothing."""
        if self.over:
            return []
        self._lay_out()
        return [self.ledger.slice(rank, self.tick + i) for i in range(self.ahead)]

    def predicted_s(self, rank: int, samples: int) -> float:
        """Returns the time from grant to push [s]; NaN while nothing is known of any worker."""
        return self.speeds.predict_s(rank, samples)

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only; ``applied`` leaves out what is pooled: it will be computed again."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "tick": self.tick,
            "applied": self._books.applied() if self.ends else [],
            "step_s": self.step_s,
            "speeds": self.speeds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over version and speeds; `begin` with the state's ``applied`` and ``tick`` resumes its epoch."""
        self.version = int(state["version"])
        self.step_s = float(state["step_s"])
        self.speeds.load_state_dict(state["speeds"])

    # --- bookkeeping ------------------------------------------------------------------------------------------

    def _split(self, total: int) -> Mapping[int, int]:
        return self.speeds.split(self.live, total, equal=self.policy.equal_shares)

    def _free_lease(self, worker: Worker, reason: str) -> list[Effect]:
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
        self._check(verdict, pool)
        self.version += 1
        contributions = self._books.empty()
        if verdict.skip:
            for worker in self.roster:
                if worker.valid is not None:
                    worker.valid.twin = None
                    worker.valid.void = "late"
            self.ledger.skip(self.tick)
        if verdict.ends_tick:
            self._books.advance(now)
            self.roster.begin_tick()
            self._measure_step(now)
        updated = Updated(
            version=self.version, tick=self.tick, samples=pool.samples, contributions=contributions,
            worth=verdict.worth, ends_tick=verdict.ends_tick,
        )  # fmt: skip
        effects: list[Effect] = [updated]
        bound = self.policy.bound_for(len(self.roster.crew))
        for worker in self.roster:
            lease = worker.valid
            if bound is not None and lease is not None and self.version - lease.base > bound:
                effects += self._free_lease(worker, "stale")
        return effects

    def _check(self, verdict: Apply, pool: Pool) -> None:
        name = type(self.policy).__name__
        if verdict.ends_tick and not pool.witnessed:
            raise RuntimeError(f"{name}.update ended a tick to which no worker in it contributed: see pool.witnessed")
        if verdict.ends_tick != (verdict.skip or pool.complete):
            raise RuntimeError(f"{name}.update must end the tick exactly when pool.complete, or with skip: {pool}")
        if not pool.pushes and not verdict.ends_tick:
            raise RuntimeError(f"{name}.update made an update of an empty pool: {pool}")

    def _measure_step(self, now: float) -> None:
        if self._step_from_s is not None:
            step_s = now - self._step_from_s
            if self.step_s > 0.0:  # clipped: a validation in between is no step
                self.step_s += _STEP_WEIGHT * (min(step_s, 2.0 * self.step_s) - self.step_s)
            else:
                self.step_s = step_s
        self._step_from_s = now

    # --- answers to claims ------------------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Effect]:
        """Answers whoever can be answered now, in the order of asking."""
        effects: list[Effect] = []
        waiting = [(w.held.since_s, w.rank, w) for w in self.roster if w.held is not None]
        for _, _, worker in sorted(waiting, key=lambda entry: entry[:2]):
            held = worker.held
            if held is None:
                continue
            if worker.grants and (held.tick < self.tick or self.over):
                worker.held = None
                effects.append(Passed(rank=worker.rank, tick=self.tick))
            elif (granted := self._decide(worker, held, now)) is not None:
                worker.held = None
                effects.append(granted)
        return effects + self._break_deadlock(now)

    def _break_deadlock(self, now: float) -> list[Effect]:
        """If all live workers wait for one another without end, the first that asked gets a sample."""
        live = self.roster.live()
        held = [(w.held.since_s, w.rank, w, w.held) for w in live if w.held is not None]
        if self.over or not held or len(held) < len(live) or self._books.room < 1:
            return []
        if any(h.until_s < math.inf for *_, h in held):
            return []
        _, _, worker, first = min(held, key=lambda entry: entry[:2])
        worker.held = None
        return [self._lend(worker, first.tick, 1, now, micro=0)]

    def _decide(self, worker: Worker, held: Held, now: float) -> Granted | None:
        first = worker.grants == 0
        if self.over:
            return self._dummy(worker)
        self._lay_out()
        claim = self._view(worker, held, now)
        answer = self.policy.claim(claim)
        if isinstance(answer, Hold):
            if first:
                return self._dummy(worker)
            held.starved, held.until_s = False, min(held.until_s, answer.until_s)
            if now < held.until_s:
                return None
            answer = Grant(samples=1)  # a hold ends when it was to end, whatever the policy says now
        samples = min(answer.samples, claim.room)
        if samples > 0:
            return self._lend(worker, held.tick, samples, now, micro=answer.micro)
        if first:
            return self._dummy(worker)
        original = self.roster.most_overdue(worker, now)
        if original is None:
            held.starved = True
            return None
        twin = self.roster.lend_twin(worker, original, now, base=self.version, claimed=held.tick)
        return self._granted(twin, micro=answer.micro)

    def _lend(self, worker: Worker, claimed: int, samples: int, now: float, *, micro: int) -> Granted:
        pending = {other.rank for other in self.roster.pending(worker, self.tick)}
        spans = self.ledger.take(worker.rank, samples, self.tick, pending=pending)
        if claimed == self.tick:
            worker.served = self.tick
        lease = self.roster.lend(
            worker, spans, samples, now, base=self.version, epoch=self.epoch, claimed=claimed
        )
        return self._granted(lease, micro=micro)

    def _granted(self, lease: Lease, *, micro: int) -> Granted:
        hint = self.ledger.slice(lease.rank, self.tick + self.ahead) if self.ahead else (0, 0)
        return Granted(
            rank=lease.rank, lease=lease.number, tick=self.tick, base=self.version, spans=lease.spans, micro=micro,
            hint=hint,
        )  # fmt: skip

    def _dummy(self, worker: Worker) -> Granted:
        worker.grants += 1
        return Granted(
            rank=worker.rank, lease=self.roster.number(), tick=self.tick, base=self.version, spans=()
        )

    def _lay_out(self) -> None:
        for batch in range(self.tick, min(self.tick + self.ahead, len(self.ends) - 1) + 1):
            if not self.ledger.laid_out(batch):
                self.ledger.lay_out(batch, self._split(self._books.size(batch)))

    def _view(self, worker: Worker, held: Held, now: float) -> Claim:
        books, tick = self._books, self.tick
        due = self.roster.due(tick)
        reserved: list[Due] = []
        for other in self.roster.pending(worker, tick):
            if (part := books.ledger.free_in_slice(other.rank, tick)) > 0:
                end_s = books.began_s + self.speeds.predict_s(other.rank, part)
                reserved.append(Due(rank=other.rank, samples=part, end_s=end_s, current=True))
        late = held.tick < tick
        witness = books.witnessed or any(d.current for d in due)
        clocks = [other.clock for other in self.roster.live()]
        return Claim(
            rank=worker.rank,
            now_s=now,
            since_s=held.since_s,
            expired=now >= held.until_s,
            first=worker.grants == 0,
            late=late,
            opening=tick == books.opening,
            served=worker.served == tick,
            tick=tick,
            version=self.version,
            workers=len(clocks),
            batch=books.batch,
            need=books.need,
            room=books.room - (late and not witness),  # the last sample is for who can end the tick
            share=self._share(worker.rank),
            witnessed=books.witnessed,
            due=due,
            reserved=tuple(reserved),
            next_need=books.next_need,
            lead=worker.clock - min(clocks, default=worker.clock),
            step_s=self.step_s or self._predicted_step_s(),
            cost=self.speeds.cost(worker.rank),
        )

    def _share(self, rank: int) -> int:
        """Returns the worker's part of the present batch [samples]."""
        planned = self.ledger.planned(rank, self.tick)
        if self.policy.equal_shares:
            return planned
        present = self._split(self._books.batch).get(rank, 0)
        # Slices fixed earlier are kept unless speeds have really changed: they may have been fetched already.
        return planned if abs(planned - present) <= max(1, present // 16) else present

    def _predicted_step_s(self) -> float:
        split = self._split(self._books.batch)
        times = [self.speeds.predict_s(rank, part) for rank, part in split.items() if part]
        return max((t for t in times if not math.isnan(t)), default=0.0)
