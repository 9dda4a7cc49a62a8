"""Who is here, what each worker computes on, and when that should end (layer P).

A worker has at most one lease. A lease is *valid* until its samples arrive or are issued again; then it is void, but
stays with its worker until that one speaks: its time is still a sign of life, and its late push is told why it is
refused. A lease may have a *twin*: the same samples, issued a second time to another worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.policy import Due
from lightning_hetero.stale.decide.speeds import Speeds

_OVERDUE = 1.5  # of the predicted time; from here on a chunk may be issued a second time (1.1 to 2 are alike)
_LATE_FACTOR = 3.0


@dataclass(slots=True, kw_only=True)
class Lease:
    """Samples with a worker.

    Attributes:
        number: unique in a run.
        rank: the worker.
        spans, samples: positions, and how many.
        base: version it computes with.
        epoch: of the samples.
        claimed: tick its worker was in when it asked, which may be earlier than the server's.
        granted_s: when.
        predicted_s: how long it should take; NaN: nothing was known then.
        limit_s: without a push for so long the worker counts as stalled.
        void: why a push will be refused; "": valid.
        twin: the same samples, at another worker.
    """

    number: int
    rank: int
    spans: tuple[Span, ...]
    samples: int
    base: int
    epoch: int
    claimed: int
    granted_s: float
    predicted_s: float
    limit_s: float
    void: str = ""
    twin: Lease | None = None

    @property
    def deadline_s(self) -> float:
        """When the worker counts as stalled [s]."""
        return self.granted_s + self.limit_s

    def part_from_twin(self) -> bool:
        """Forgets the twin, which lives on alone; returns whether there was one."""
        if self.twin is None:
            return False
        self.twin.twin = self.twin = None
        return True


@dataclass(slots=True)
class HeldClaim:
    """A claim without an answer yet: the worker's tick, since when, at most until when."""

    tick: int
    since_s: float
    until_s: float = math.inf
    starved: bool = False  # the policy would give work, but no sample may be given out


@dataclass(slots=True)
class WorkerState:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        live: not silent for longer than the limit, with a lease or while others wait for it to claim one.
        grants: in this epoch, dummies included, without what was given back.
        served: last tick it had its part of.
        clock: pushes in this epoch.
        lease: what it computes on, valid or not.
        held: its unanswered claim.
        spoke_s: when it spoke last, or its epoch began [s].
    """

    rank: int
    live: bool = True
    grants: int = 0
    served: int = -1
    clock: int = 0
    lease: Lease | None = None
    held: HeldClaim | None = None
    spoke_s: float = -math.inf

    @property
    def valid(self) -> Lease | None:
        return self.lease if self.lease is not None and not self.lease.void else None


class Workers:
    """The workers.

    Args:
        ranks: workers that take part from the start.
        speeds: predicts how long they take.
        liveness_factor, liveness_s: see `Coordinator`.

    Attributes:
        crew: ranks that took part in this epoch.
    """

    def __init__(
        self, ranks: Iterable[int], *, speeds: Speeds, liveness_factor: float, liveness_s: float
    ) -> None:
        self.speeds = speeds
        self.liveness_factor = liveness_factor
        self.liveness_s = liveness_s
        self._workers = {rank: WorkerState(rank) for rank in sorted(set(ranks))}
        self.crew = set(self._workers)
        self._leases = 0
        self._surprises: list[float] = []  # times of this tick's chunks over their predictions

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(list(self._workers.values()))

    def get(self, rank: int) -> WorkerState | None:
        return self._workers.get(rank)

    def speaks(self, rank: int, now: float) -> WorkerState:
        """Returns the worker, which is live now; a rank not seen before joins."""
        worker = self._workers.get(rank)
        if worker is None:
            clock = min((w.clock for w in self.live()), default=0)
            worker = self._workers[rank] = WorkerState(rank, clock=clock)
            self.crew.add(rank)
        worker.live, worker.spoke_s = True, now
        return worker

    def remove(self, rank: int) -> WorkerState | None:
        """Takes a dead worker out; None if it is not here."""
        return self._workers.pop(rank, None)

    def live(self) -> list[WorkerState]:
        return [worker for worker in self._workers.values() if worker.live]

    def ranks(self) -> set[int]:
        """Returns the live ranks."""
        return {worker.rank for worker in self.live()}

    def begin(self, now: float) -> None:
        """A new epoch: all leases are void, nobody has had a grant."""
        self.begin_tick()
        for worker in self:
            if worker.lease is not None:
                worker.lease.void = worker.lease.void or "gone"
                worker.lease.twin = None
            worker.held, worker.grants, worker.served, worker.clock = None, 0, -1, 0
            worker.spoke_s = now
        self.crew = set(self._workers)

    def fall_asleep(self, now: float) -> list[WorkerState]:
        """Takes for not live who has had nothing to do and said nothing for long, while others wait for it; tells who.

        A barrier waits for all live workers to claim their part. One that is stopped between two chunks has no lease
        that could end; when others have waited for the limit of a lease of unknown length, it is not waited for until
        it speaks again. Those wait who are held, and who could not push in time (at a barrier of manual optimization).
        """
        asleep = [worker for worker, at_s in self._drowsy() if now >= at_s]
        for worker in asleep:
            worker.live = False
        return asleep

    def _drowsy(self) -> Iterator[tuple[WorkerState, float]]:
        """Yields who is waited for without having anything, and until when [s]."""
        workers = self._workers.values()
        waiting = [w.held.since_s for w in workers if w.held is not None and not w.held.starved]
        waiting += [w.lease.deadline_s for w in workers if w.lease is not None and not w.live]
        if waiting:
            for worker in self.live():
                if worker.lease is None and worker.held is None:
                    yield worker, max(worker.spoke_s, min(waiting)) + self.liveness_factor * self.liveness_s

    def begin_tick(self) -> None:
        """A new tick: what chunks took, compared with the prediction, is seen afresh."""
        self._surprises.clear()

    # --- leases -----------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Returns the next lease's number."""
        self._leases += 1
        return self._leases

    def lend(
        self,
        worker: WorkerState,
        spans: tuple[Span, ...],
        samples: int,
        now: float,
        *,
        base: int,
        epoch: int,
        claimed: int,
    ) -> Lease:
        """Gives a worker samples to compute on."""
        predicted_s = self.speeds.predict_s(worker.rank, samples)
        factor = self.liveness_factor
        worker.lease = Lease(
            number=self.number(),
            rank=worker.rank,
            spans=spans,
            samples=samples,
            base=base,
            epoch=epoch,
            claimed=claimed,
            granted_s=now,
            predicted_s=predicted_s,
            limit_s=factor * self.liveness_s if math.isnan(predicted_s) else max(factor * predicted_s, self.liveness_s),
        )
        worker.grants += 1
        return worker.lease

    def lend_twin(self, worker: WorkerState, original: Lease, now: float, *, base: int, claimed: int) -> Lease:
        """Gives a worker the samples of another one's lease as well."""
        twin = self.lend(
            worker, original.spans, original.samples, now, base=base, epoch=original.epoch, claimed=claimed
        )
        original.twin, twin.twin = twin, original
        return twin

    def ended(self, lease: Lease, now: float) -> None:
        """A whole chunk of the present tick is done.

        What surprised its worker (another size of chunk, longer samples in this batch) will surprise the others, too.
        """
        if lease.predicted_s > 0.0:
            self._surprises.append((now - lease.granted_s) / lease.predicted_s)

    def end_s(self, lease: Lease) -> float:
        """Returns when a chunk should end [s], by what was known at the grant; NaN while nothing is known."""
        if math.isnan(lease.predicted_s):
            return lease.granted_s + self.speeds.predict_s(lease.rank, lease.samples)
        return lease.granted_s + lease.predicted_s

    def overdue_s(self, lease: Lease) -> float:
        """Returns from when a chunk may be issued a second time [s]; inf while nothing is known."""
        end_s = self.end_s(lease)
        return math.inf if math.isnan(end_s) else lease.granted_s + _OVERDUE * (end_s - lease.granted_s)

    def due(self, tick: int, now: float) -> tuple[Due, ...]:
        """Returns what is under way, each sample once."""
        due: list[Due] = []
        put_off = max(median(self._surprises), 1.0) if self._surprises else 0.0  # once, of many workers
        for worker in self._workers.values():
            lease = worker.valid
            if lease is None or (lease.twin is not None and lease.twin.number < lease.number):
                continue
            end_s = self._expected_s(lease, tick, put_off)
            if lease.twin is not None:
                end_s = min(end_s, self._expected_s(lease.twin, tick, put_off))
            in_s = expected_in_s(end_s, now)
            due.append(Due(rank=worker.rank, samples=lease.samples, in_s=in_s, current=lease.claimed == tick))
        return tuple(due)

    def _expected_s(self, lease: Lease, tick: int, put_off: float) -> float:
        """Returns when a chunk should end [s], put off if others of its tick took longer; 0: none has ended."""
        if lease.claimed != tick or math.isnan(lease.predicted_s) or not put_off:
            return self.end_s(lease)
        return lease.granted_s + put_off * lease.predicted_s

    def pending(self, asking: WorkerState, tick: int) -> list[WorkerState]:
        """Returns the other live workers that have still to take their part of the tick."""
        return [w for w in self.live() if w is not asking and w.served < tick]

    def most_overdue(self, asking: WorkerState, now: float) -> Lease | None:
        """Returns another worker's lease that should have ended long ago and was issued only once."""
        singles = [w.valid for w in self._workers.values() if w is not asking]
        overdue = [v for v in singles if v is not None and v.twin is None and now >= self.overdue_s(v)]
        return min(overdue, key=lambda v: (self.overdue_s(v), v.number), default=None)

    def wake_s(self) -> float:
        """Returns when time alone changes something: a limit, the end of a hold, a second issue [s]."""
        workers = self._workers.values()
        due = [math.inf]
        due += [w.lease.deadline_s for w in workers if w.live and w.lease is not None]
        due += [w.held.until_s for w in workers if w.held is not None and not w.held.starved]
        due += [at_s for _, at_s in self._drowsy()]
        if any(w.held is not None and w.held.starved for w in workers):
            due += [self.overdue_s(w.valid) for w in workers if w.valid is not None and w.valid.twin is None]
        return min(due)


def expected_in_s(end_s: float, now: float) -> float:
    """Returns when a chunk that was predicted to end at ``end_s`` is expected, from now [s]; inf for NaN.

    A chunk that is late by x is expected in three times x: "any moment now" cost 8 % of the time under spells.
    """
    if math.isnan(end_s):
        return math.inf
    return end_s - now if end_s >= now else _LATE_FACTOR * (now - end_s)
