"""Which workers are here, what each computes on, and when that should end (layer P).

A worker has at most one assignment. That is *valid* until its samples arrive or are issued again; then it is void, but
remains its worker's until that one speaks: its time is a sign of life, and the answer to a late push says why it is
refused. An assignment may have a *twin*: the same samples, issued a second time to another worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from statistics import median

from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.intervals import size
from lightning_hetero.stale.decide.policy import Due
from lightning_hetero.stale.decide.speeds import Speeds

_OVERDUE = 1.5  # of the predicted time; from here on a chunk may be issued a second time (1.1 to 2 are alike)
_LATE_FACTOR = 3.0
_STALLED_FACTOR = 10.0  # times the predicted time; a worker without a push for so long counts as stalled


@dataclass(slots=True, kw_only=True)
class Assignment:
    """Samples with a worker.

    Attributes:
        number: unique in a run.
        rank: the worker.
        spans: positions.
        base: version it computes with.
        claimed: global step its worker was in when it asked, which may be earlier than the server's.
        assigned_s: when.
        predicted_s: how long it should take; NaN: nothing was known then.
        limit_s: without a push for so long the worker counts as stalled.
        void: why a push will be refused; "": valid.
        twin: the same samples, at another worker.
    """

    number: int
    rank: int
    spans: tuple[Span, ...]
    base: int
    claimed: int
    assigned_s: float
    predicted_s: float
    limit_s: float
    void: str = ""
    twin: Assignment | None = None

    @property
    def samples(self) -> int:
        return size(self.spans)

    @property
    def deadline_s(self) -> float:
        """When the worker counts as stalled [s]."""
        return self.assigned_s + self.limit_s

    def part_from_twin(self) -> bool:
        """Forgets the twin, which lives on alone; returns whether there was one."""
        if self.twin is None:
            return False
        self.twin.twin = self.twin = None
        return True


@dataclass(slots=True)
class HeldClaim:
    """A claim without an answer yet: the worker's global step, since when, at most until when."""

    global_step: int
    since_s: float
    until_s: float = math.inf
    starved: bool = False  # the policy would give work, but no sample may be given out


@dataclass(slots=True)
class WorkerState:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        live: not silent for longer than the limit, with an assignment or while others wait for it to claim one.
        assignments: in this epoch, dummies included, without what was given back.
        served: last global step it had its part of.
        clock: pushes in this epoch.
        assignment: what it computes on, valid or not.
        held: its unanswered claim.
        spoke_s: when it spoke last, or its epoch began [s].
    """

    rank: int
    live: bool = True
    assignments: int = 0
    served: int = -1
    clock: int = 0
    assignment: Assignment | None = None
    held: HeldClaim | None = None
    spoke_s: float = -math.inf

    @property
    def valid(self) -> Assignment | None:
        return self.assignment if self.assignment is not None and not self.assignment.void else None


class Workers:
    """The workers.

    Args:
        ranks: workers that take part from the start.
        speeds: predicts how long they take.
        liveness_s: see `Coordinator`.

    Attributes:
        crew: ranks that took part in this epoch.
        numbers: of the assignments to come.
    """

    def __init__(self, ranks: Iterable[int], *, speeds: Speeds, liveness_s: float) -> None:
        self.speeds = speeds
        self._liveness_s = liveness_s
        self._workers = {rank: WorkerState(rank) for rank in sorted(set(ranks))}
        self.crew = set(self._workers)
        self.numbers = count(1)
        self._surprises: list[float] = []  # times of this step's chunks over their predictions

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
        """A new epoch: no worker has an assignment, or has had one in it."""
        self.begin_step()
        for worker in self:
            worker.assignment, worker.held, worker.assignments, worker.served, worker.clock = None, None, 0, -1, 0
            worker.spoke_s = now
        self.crew = set(self._workers)

    def fall_asleep(self, now: float) -> None:
        """Takes for not live the workers that have had nothing to do and said nothing for long, while others wait.

        A barrier waits for all live workers to claim their part. One that is stopped between two chunks has no
        assignment that could end; when others have waited for the limit of an assignment of unknown length, it is not
        waited for until it speaks again. Those wait that are held, and that could not push in time (at a barrier of
        manual optimization).
        """
        for worker in [worker for worker, at_s in self._drowsy() if now >= at_s]:
            worker.live = False

    def _drowsy(self) -> Iterator[tuple[WorkerState, float]]:
        """Yields the workers that are waited for without having anything, and until when [s]."""
        workers = self._workers.values()
        waiting = [w.held.since_s for w in workers if w.held is not None and not w.held.starved]
        waiting += [w.assignment.deadline_s for w in workers if w.assignment is not None and not w.live]
        if waiting:
            for worker in self.live():
                if worker.assignment is None and worker.held is None:
                    yield worker, max(worker.spoke_s, min(waiting)) + _STALLED_FACTOR * self._liveness_s

    def begin_step(self) -> None:
        """A new global step: what chunks took, compared with the prediction, is seen afresh."""
        self._surprises.clear()

    # --- assignments ------------------------------------------------------------------------------------------

    def assign(
        self, worker: WorkerState, spans: tuple[Span, ...], now: float, *, base: int, claimed: int
    ) -> Assignment:
        """Gives a worker samples to compute on."""
        predicted_s = self.speeds.predict_s(worker.rank, size(spans))
        known = not math.isnan(predicted_s)
        worker.assignment = Assignment(
            number=next(self.numbers), rank=worker.rank, spans=spans, base=base, claimed=claimed,
            assigned_s=now, predicted_s=predicted_s,
            limit_s=max(_STALLED_FACTOR * (predicted_s if known else self._liveness_s), self._liveness_s),
        )  # fmt: skip
        worker.assignments += 1
        return worker.assignment

    def ended(self, done: Assignment, now: float) -> None:
        """A whole chunk of the present global step is done.

        What surprised its worker (another size of chunk, longer samples in this batch) will surprise the others, too.
        """
        if done.predicted_s > 0.0:
            self._surprises.append((now - done.assigned_s) / done.predicted_s)

    def _takes_s(self, assignment: Assignment) -> float:
        """Returns how long a chunk should take [s], by what was known when it was assigned; NaN: nothing is known."""
        if math.isnan(assignment.predicted_s):
            return self.speeds.predict_s(assignment.rank, assignment.samples)
        return assignment.predicted_s

    def overdue_s(self, assignment: Assignment) -> float:
        """Returns from when a chunk may be issued a second time [s]; inf while nothing is known."""
        takes_s = self._takes_s(assignment)
        return math.inf if math.isnan(takes_s) else assignment.assigned_s + _OVERDUE * takes_s

    def due(self, global_step: int, now: float) -> tuple[Due, ...]:
        """Returns what is under way, each sample once."""
        put_off = max(median(self._surprises), 1.0) if self._surprises else 1.0

        def expected_s(one: Assignment) -> float:
            surprised = one.claimed == global_step and not math.isnan(one.predicted_s)
            return one.assigned_s + self._takes_s(one) * (put_off if surprised else 1.0)

        due: list[Due] = []
        for one in (worker.valid for worker in self._workers.values()):
            if one is None or (one.twin is not None and one.twin.number < one.number):
                continue
            end_s = expected_s(one) if one.twin is None else min(expected_s(one), expected_s(one.twin))
            in_s, current = expected_in_s(end_s, now), one.claimed == global_step
            due.append(Due(rank=one.rank, samples=one.samples, in_s=in_s, current=current))
        return tuple(due)

    def pending(self, asking: WorkerState, global_step: int) -> list[WorkerState]:
        """Returns the other live workers that have still to take their part of the global step."""
        return [w for w in self.live() if w is not asking and w.served < global_step]

    def most_overdue(self, asking: WorkerState, now: float) -> Assignment | None:
        """Returns another worker's assignment that should have ended long ago and was issued only once."""
        singles = [w.valid for w in self._workers.values() if w is not asking]
        overdue = [v for v in singles if v is not None and v.twin is None and now >= self.overdue_s(v)]
        return min(overdue, key=lambda v: (self.overdue_s(v), v.number), default=None)

    def wake_s(self) -> float:
        """Returns when time alone changes something: a limit, the end of a hold, a second issue [s]."""
        workers = self._workers.values()
        due = [math.inf]
        due += [w.assignment.deadline_s for w in workers if w.live and w.assignment is not None]
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
