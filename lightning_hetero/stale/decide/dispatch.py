"""Answers claims with what a policy gives, within rules that no policy can change; how a batch is cut (layer P).

- *Once per epoch.* The first claim of a rank in an epoch is answered at once with an assignment, perhaps a dummy: each
  rank runs at least one step, else epoch-end reductions of metrics do not pair up.
- *Room.* One sample per later global step of the epoch stays unassigned, so that each of them has an update.
- *Second issue.* When no sample may be given out any more, an idle worker computes an overdue chunk a second time; the
  first result wins.
- *Somebody works.* Workers that would all wait for one another without end do not: the first one gets a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hetero.stale.decide.effects import Granted, Passed, Span
from lightning_hetero.stale.decide.epoch import Epoch
from lightning_hetero.stale.decide.intervals import size
from lightning_hetero.stale.decide.policy import Claim, Due, Grant, Hold, Policy
from lightning_hetero.stale.decide.speeds import StepTime
from lightning_hetero.stale.decide.workers import HeldClaim, Lease, Workers, WorkerState, expected_in_s


class Sizing:
    """Shares follow speeds up to the moment of a claim; slices are fixed once, ``ahead`` ticks early.

    Args:
        policy: whether shares are equal or by speed.
        workers: who is live, and how fast.
        ahead: fix slices so many ticks early, so that workers can fetch them.
    """

    def __init__(self, policy: Policy, workers: Workers, *, ahead: int = 0) -> None:
        self._policy, self._workers, self._ahead = policy, workers, ahead

    def _split(self, total: int) -> Mapping[int, int]:
        workers = self._workers
        return workers.speeds.split(workers.ranks(), total, equal=self._policy.equal_shares)

    def shares(self, books: Epoch) -> tuple[int, ...]:
        """Returns samples per rank, from 0 to the highest, of the present batch; 0 for ranks that are not live."""
        split = self._split(books.batch)
        return tuple(split.get(rank, 0) for rank in range(max((w.rank for w in self._workers), default=-1) + 1))

    def share(self, books: Epoch, rank: int) -> int:
        """Returns the worker's part of the present batch [samples]."""
        planned = books.ledger.planned(rank, books.tick)
        if self._policy.equal_shares:
            return planned
        present = self._split(books.batch).get(rank, 0)
        # Slices fixed earlier are kept unless speeds have really changed: they may have been fetched already.
        return planned if abs(planned - present) <= max(1, present // 16) else present

    def step_s(self, books: Epoch) -> float:
        """Returns the predicted time of the present batch, its slowest share [s]; 0 while nothing is known."""
        times = [self._workers.speeds.predict_s(r, part) for r, part in self._split(books.batch).items() if part]
        return max((t for t in times if not math.isnan(t)), default=0.0)

    def lay_out(self, books: Epoch) -> None:
        """Fixes the slices of the present batch and of those ``ahead``, where they are not yet."""
        for batch in range(books.tick, min(books.tick + self._ahead, len(books.ends) - 1) + 1):
            if not books.ledger.laid_out(batch):
                books.ledger.lay_out(batch, self._split(books.size(batch)))

    def hint(self, books: Epoch, rank: int) -> Span:
        """Returns what the worker will probably be granted ``ahead`` ticks from now; (0, 0): nothing."""
        return books.ledger.slice(rank, books.tick + self._ahead) if self._ahead else (0, 0)

    def hints(self, books: Epoch, rank: int) -> list[Span]:
        """Returns what the worker will probably be granted in the next ``ahead`` ticks; (0, 0) where nothing."""
        if books.over:
            return []
        self.lay_out(books)
        return [books.ledger.slice(rank, books.tick + i) for i in range(self._ahead)]


class Dispatch:
    """See the module.

    Args:
        policy: says who gets how much, and who waits.
        workers: workers with their claims and leases.
        sizing: shares and slices of batches.
        step: measured time of a tick.
    """

    def __init__(self, policy: Policy, workers: Workers, sizing: Sizing, step: StepTime) -> None:
        self._policy, self._workers, self._sizing, self._step = policy, workers, sizing, step

    def answer(self, books: Epoch, version: int, now: float) -> list[Granted | Passed]:
        """Answers whoever can be answered now, in the order of asking.

        Args:
            books: of the present epoch.
            version: of the parameters, which those who get work compute with.
            now: time [s].
        """
        answers: list[Granted | Passed] = []
        waiting = [(w.held.since_s, w.rank, w) for w in self._workers if w.held is not None]
        for _, _, worker in sorted(waiting, key=lambda entry: entry[:2]):
            held = worker.held
            if held is None:
                continue
            if worker.grants and (held.tick < books.tick or books.over):
                worker.held = None
                answers.append(Passed(rank=worker.rank, tick=books.tick))
            elif (granted := self._decide(worker, held, books, version, now)) is not None:
                worker.held = None
                answers.append(granted)
        return answers + self._break_deadlock(books, version, now)

    def _break_deadlock(self, books: Epoch, version: int, now: float) -> list[Granted | Passed]:
        """If all live workers wait for one another without end, the first that asked gets a sample."""
        live = self._workers.live()
        held = [(w.held.since_s, w.rank, w, w.held) for w in live if w.held is not None]
        if books.over or not held or len(held) < len(live) or books.room < 1:
            return []
        if any(h.until_s < math.inf for *_, h in held):
            return []
        _, _, worker, first = min(held, key=lambda entry: entry[:2])
        worker.held = None
        return [self._lend(worker, first.tick, 1, books, version, now, micro=0)]

    def _decide(self, worker: WorkerState, held: HeldClaim, books: Epoch, version: int, now: float) -> Granted | None:
        first = worker.grants == 0
        if books.over:
            return self._dummy(worker, books, version)
        self._sizing.lay_out(books)
        claim = self._view(worker, held, books, now)
        answer = self._policy.claim(claim)
        if isinstance(answer, Hold):
            if first:
                return self._dummy(worker, books, version)
            held.starved, held.until_s = False, min(held.until_s, held.since_s + answer.patience_s)
            if now < held.until_s:
                return None
            answer = Grant(samples=1)  # a hold ends when it was to end, whatever the policy says now
        witness = claim.witnessed or any(d.current for d in claim.due)
        room = books.room - (claim.late and not witness)  # the last sample is for a worker that can end the step
        samples = min(answer.samples, room)
        if samples > 0:
            return self._lend(worker, held.tick, samples, books, version, now, micro=answer.micro)
        if first:
            return self._dummy(worker, books, version)
        original = self._workers.most_overdue(worker, now)
        if original is None:
            held.starved = True
            return None
        twin = self._workers.lend_twin(worker, original, now, base=version, claimed=held.tick)
        return self._granted(twin, books, micro=answer.micro)

    def _lend(
        self, worker: WorkerState, claimed: int, samples: int, books: Epoch, version: int, now: float, *, micro: int
    ) -> Granted:
        pending = {other.rank for other in self._workers.pending(worker, books.tick)}
        spans, others = books.ledger.alike(books.ledger.take(worker.rank, samples, books.tick, pending=pending))
        books.ledger.release(others)
        if claimed == books.tick:
            worker.served = books.tick
        lease = self._workers.lend(
            worker, spans, size(spans), now, base=version, epoch=books.number, claimed=claimed
        )
        return self._granted(lease, books, micro=micro)

    def _granted(self, lease: Lease, books: Epoch, *, micro: int) -> Granted:
        return Granted(
            rank=lease.rank, lease=lease.number, tick=books.tick, base=lease.base, spans=lease.spans, micro=micro,
            hint=self._sizing.hint(books, lease.rank),
        )  # fmt: skip

    def _dummy(self, worker: WorkerState, books: Epoch, version: int) -> Granted:
        worker.grants += 1
        return Granted(
            rank=worker.rank, lease=self._workers.number(), tick=books.tick, base=version, spans=()
        )

    def _view(self, worker: WorkerState, held: HeldClaim, books: Epoch, now: float) -> Claim:
        """Returns what the policy may know about a claim."""
        tick, speeds = books.tick, self._workers.speeds
        reserved: list[Due] = []
        for other in self._workers.pending(worker, tick):
            if (part := books.ledger.free_in_slice(other.rank, tick)) > 0:
                in_s = expected_in_s(books.began_s + speeds.predict_s(other.rank, part), now)
                reserved.append(Due(rank=other.rank, samples=part, in_s=in_s, current=True))
        clocks = [other.clock for other in self._workers.live()]
        return Claim(
            rank=worker.rank,
            expired=now >= held.until_s,
            first=worker.grants == 0,
            late=held.tick < tick,
            opening=tick == books.opening,
            served=worker.served == tick,
            workers=len(clocks),
            batch=books.batch,
            need=books.need,
            share=self._sizing.share(books, worker.rank),
            witnessed=books.witnessed,
            due=self._workers.due(tick, now),
            reserved=tuple(reserved),
            lead=worker.clock - min(clocks, default=worker.clock),
            step_s=self._step.smoothed_s or self._sizing.step_s(books),
            cost=speeds.cost(worker.rank),
        )
