"""Answers claims with what a policy gives, within rules that no policy can change; how a batch is cut (layer P).

- *Once per epoch.* The first claim of a rank in an epoch is answered at once with an assignment, perhaps a dummy: each
  rank runs at least one step, else epoch-end reductions of metrics do not pair up.
- *Room.* One sample per later global step of the epoch stays unassigned, so that each of them has an update.
- *Second issue.* When no sample may be given out any more, an idle worker computes an overdue chunk a second time; the
  first result wins.
- *Own streams.* A worker is assigned no more than its own stream has left, and none is assigned another's work.
- *Some worker works.* Where all would wait for one another without end, the first one gets a sample.

Shares follow speeds up to the moment of a claim; slices are fixed once, so early that workers can fetch them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hetero.stale.decide.effects import Assigned, Effect, Passed, Span
from lightning_hetero.stale.decide.epoch import Epoch
from lightning_hetero.stale.decide.policy import Claim, Due, Grant, Hold, Policy
from lightning_hetero.stale.decide.workers import Assignment, HeldClaim, Workers, WorkerState, expected_in_s


class Dispatch:
    """See the module.

    Args:
        policy: says which worker gets how much, and which waits; whether shares are equal or by speed.
        workers: workers with their claims and assignments, and how fast they are.
        ahead: fix slices so many global steps early.

    Attributes:
        version: of the parameters: number of updates so far.
    """

    def __init__(self, policy: Policy, workers: Workers, *, ahead: int) -> None:
        self.policy, self.workers, self.version = policy, workers, 0
        self._books = Epoch(-1, ())  # of the present epoch
        self._step_s, self._ahead = 0.0, ahead  # smoothed time of a global step [s]; 0 before there are any

    # ---- shares and slices of batches -------------------------------------------------------------------------

    def _split(self, total: int) -> Mapping[int, int]:
        workers = self.workers
        return workers.speeds.split(workers.ranks(), total, equal=self.policy.equal_shares)

    def shares(self) -> tuple[int, ...]:
        """Returns samples per rank, from 0 to the highest, of the present batch; 0 for ranks that are not live."""
        if not self._books.ends:
            return ()
        split = self._split(self._books.batch)
        return tuple(split.get(rank, 0) for rank in range(max((w.rank for w in self.workers), default=-1) + 1))

    def _share(self, rank: int) -> int:
        """Returns the worker's part of the present batch [samples]."""
        books = self._books
        planned = books.ledger.planned(rank, books.global_step)
        if self.policy.equal_shares:
            return planned
        present = self._split(books.batch).get(rank, 0)
        # Slices fixed earlier are kept unless speeds have really changed: they may have been fetched already.
        return planned if abs(planned - present) <= max(1, present // 16) else present

    def _predicted_step_s(self) -> float:
        """Returns the predicted time of the present batch, its slowest share [s]; 0 while nothing is known."""
        speeds = self.workers.speeds
        times = [speeds.predict_s(rank, part) for rank, part in self._split(self._books.batch).items() if part]
        return max((t for t in times if not math.isnan(t)), default=0.0)

    def _lay_out(self) -> None:
        """Fixes the slices of the present batch and of those ``ahead``, where they are not yet."""
        books = self._books
        for batch in range(books.global_step, min(books.global_step + self._ahead + 1, len(books.ends))):
            if not books.ledger.laid_out(batch):
                books.ledger.lay_out(batch, self._split(books.size(batch)))

    def hints(self, rank: int) -> list[Span]:
        """Returns what a worker will probably be assigned in the next ``ahead`` steps; (0, 0) where nothing."""
        books = self._books
        if books.over:
            return []
        self._lay_out()
        return [books.ledger.slice(rank, books.global_step + i) for i in range(self._ahead)]

    # ---- answers ----------------------------------------------------------------------------------------------

    def answer(self, now: float) -> list[Effect]:
        """Answers the claims that can be answered now, in the order of asking."""
        books, answers = self._books, list[Effect]()
        for held, worker in self._held(list(self.workers)):
            answer: Assigned | Passed | None
            if worker.assignments and (held.global_step < books.global_step or books.over):
                answer = Passed(rank=worker.rank, global_step=books.global_step)
            else:
                answer = self._decide(worker, held, now)
            if answer is not None:
                worker.held = None
                answers.append(answer)
        return [*answers, *self._break_deadlock(now)]

    @staticmethod
    def _held(workers: list[WorkerState]) -> list[tuple[HeldClaim, WorkerState]]:
        """Returns the claims of ``workers`` that wait, in the order of asking."""
        held = [(worker.held, worker) for worker in workers if worker.held is not None]
        return sorted(held, key=lambda entry: (entry[0].since_s, entry[1].rank))

    def _break_deadlock(self, now: float) -> list[Assigned]:
        """If all live workers wait for one another without end, the first that asked gets a sample."""
        live = self.workers.live()
        held = self._held(live)
        endless = held and len(held) == len(live) and all(claim.until_s == math.inf for claim, _ in held)
        able = [(claim, worker) for claim, worker in held if self._own(worker)]
        if self._books.over or not endless or not able or self._books.room < 1:
            return []
        first, worker = able[0]
        worker.held = None
        return [self._assign(worker, first.global_step, Grant(samples=1), 1, now)]

    def _decide(self, worker: WorkerState, held: HeldClaim, now: float) -> Assigned | None:
        first, books = worker.assignments == 0, self._books
        if books.over:
            return self._dummy(worker)
        if not (own := self._own(worker)):
            return self._dummy(worker) if first else None
        self._lay_out()
        claim = self._view(worker, held, now)
        answer = self.policy.claim(claim)
        if isinstance(answer, Hold):
            if first:
                return self._dummy(worker)
            held.starved, held.until_s = False, min(held.until_s, held.since_s + answer.patience_s)
            if now < held.until_s:
                return None
            answer = Grant(samples=1)  # a hold ends when it was to end, whatever the policy says now
        witness = claim.witnessed or any(d.current for d in claim.due)
        room = books.room - (claim.late and not witness)  # the last sample is for a worker that can end the step
        samples = min(answer.samples, room, own)
        if samples > 0:
            return self._assign(worker, held.global_step, answer, samples, now)
        if first:
            return self._dummy(worker)
        if books.streams is not None:
            held.until_s = math.inf
            return None
        original = self.workers.most_overdue(worker, now)
        if original is None:
            held.starved = True
            return None
        twin = self.workers.assign(worker, original.spans, now, base=self.version, claimed=held.global_step)
        original.twin, twin.twin = twin, original
        return self._assigned(twin, answer)

    def _own(self, worker: WorkerState) -> int:
        """Returns how many samples can be assigned to a worker at most: what its own stream is known to have left."""
        books, held = self._books, worker.valid
        if books.streams is None:
            return books.ledger.total
        return books.streams.left(worker.rank) - (held.samples if held is not None else 0)

    def _assign(self, worker: WorkerState, claimed: int, grant: Grant, samples: int, now: float) -> Assigned:
        books = self._books
        pending = {other.rank for other in self.workers.pending(worker, books.global_step)}
        taken = books.ledger.take(worker.rank, samples, books.global_step, pending=pending)
        spans, others = books.ledger.alike(taken)
        books.ledger.release(others)
        if claimed == books.global_step:
            worker.served = claimed
        return self._assigned(self.workers.assign(worker, spans, now, base=self.version, claimed=claimed), grant)

    def _assigned(self, made: Assignment, grant: Grant) -> Assigned:
        step = self._books.global_step
        return Assigned(
            rank=made.rank, assignment=made.number, global_step=step, base=made.base, spans=made.spans,
            micro=grant.micro, hint=self._books.ledger.slice(made.rank, step + self._ahead) if self._ahead else (0, 0),
        )  # fmt: skip

    def _dummy(self, worker: WorkerState) -> Assigned:
        worker.assignments += 1
        number, step = next(self.workers.numbers), self._books.global_step
        return Assigned(rank=worker.rank, assignment=number, global_step=step, base=self.version, spans=())

    def _view(self, worker: WorkerState, held: HeldClaim, now: float) -> Claim:
        """Returns what the policy may know about a claim."""
        books, speeds = self._books, self.workers.speeds
        step = books.global_step
        reserved: list[Due] = []
        for other in self.workers.pending(worker, step):
            if (part := min(books.ledger.free_in_slice(other.rank, step), self._own(other))) > 0:
                in_s = expected_in_s(books.began_s + speeds.predict_s(other.rank, part), now)
                reserved.append(Due(rank=other.rank, samples=part, in_s=in_s, current=True))
        clocks = [other.clock for other in self.workers.live()]
        return Claim(
            rank=worker.rank, expired=now >= held.until_s, first=worker.assignments == 0,
            late=held.global_step < step, opening=step == books.opening, served=worker.served == step,
            workers=len(clocks), batch=books.batch, need=books.need, share=self._share(worker.rank),
            witnessed=books.witnessed, due=self.workers.due(step, now), reserved=tuple(reserved),
            lead=worker.clock - min(clocks, default=worker.clock),
            step_s=self._step_s or self._predicted_step_s(), cost=speeds.cost(worker.rank),
        )  # fmt: skip
