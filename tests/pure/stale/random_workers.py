"""A tiny event loop that drives a coordinator with simulated workers, and checks every promise while it goes on.

Independent of `benchmarks.stale.simulator`: it knows nothing of training, adds faults of all kinds, and
compares everything the coordinator says with books of its own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.stale.simulator import wants_return
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Effect, Passed, Refused, Reissued, Span, Updated
from lightning_hetero.stale.decide.policy import Claim, Grant, Hold
from tests.pure.stale.kit import over


@dataclass(frozen=True)
class Case:
    """What happens in a run; probabilities are per chunk."""

    ends: tuple[tuple[int, ...], ...]  # per epoch
    rates_s: tuple[float, ...]  # seconds per sample, per rank
    launch_s: float = 0.01
    jitter: float = 0.0
    nonfinite: float = 0.0
    early: float = 0.0
    give_back: float = 0.0
    stall: float = 0.0
    late: float = 0.0  # of a rank's beginning an epoch long after the others
    deaths: tuple[tuple[float, int], ...] = ()  # (time, rank); one worker is always left alive
    joins: tuple[tuple[float, int], ...] = ()
    seed: int = 0
    ahead: int = 0


@dataclass
class RandomWorker:
    rank: int
    rate_s: float
    alive: bool = True
    life: int = 0  # events of an earlier life are void
    global_step: int = 0
    assigned: int = 0  # assignments in this epoch
    finished: bool = False
    asked_s: float | None = None  # claimed and not answered
    waited_s: float = 0.0  # of that: while there was work to give
    patience_s: float = 0.0  # longest wait the policy may ask for


@dataclass
class Books:
    """What the run did, for tests to look at."""

    updates: list[list[Updated]] = field(default_factory=list)  # per epoch
    positions: list[list[tuple[int, ...]]] = field(default_factory=list)  # per epoch and update, sorted
    refused: Counter[str] = field(default_factory=Counter)
    reissued: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # samples by staleness
    assigned: list[Assigned] = field(default_factory=list)
    recomputed: int = 0
    longest_wait_s: float = 0.0
    second_issues: int = 0
    now_s: float = 0.0


def flat(spans: Iterable[Span]) -> list[int]:
    return [i for start, end in spans for i in range(start, end)]


class Loop:
    def __init__(self, coordinator: Coordinator, case: Case) -> None:
        self.it, self.case = coordinator, case
        self.rng = np.random.default_rng(case.seed)
        self.workers = {r: RandomWorker(r, rate) for r, rate in enumerate(case.rates_s)}
        self.heap: list[tuple[float, int, int, str, int, Any]] = []
        self.count = 0
        self.now = 0.0
        self.books = Books()
        self.assignments: dict[int, Assigned] = {}  # every grant of the run
        self.out: set[int] = set()  # assignments whose samples are with a worker, as far as we were told
        self.pooled: list[tuple[Accepted, list[int]]] = []
        self.applied: Counter[int] = Counter()
        self.used_up: Counter[int] = Counter()  # not finite
        self.witnessed = False
        self.real_claim = coordinator.policy.claim
        coordinator.policy.claim = self.spy  # type: ignore[method-assign]

    def spy(self, claim: Claim) -> Grant | Hold:
        worker = self.workers[claim.rank]
        grace = self.it.policy.grace  # infinite also where the time of a step is not known: 0
        worker.patience_s = math.inf if math.isinf(grace) else max(worker.patience_s, grace * claim.step_s)
        return self.real_claim(claim)

    # --- the loop ---

    def run(self) -> Books:
        for at, rank in self.case.deaths:
            self.later(at, "die", rank)
        for at, rank in self.case.joins:
            self.later(at, "join", rank)
        for epoch, ends in enumerate(self.case.ends):
            self.epoch(epoch, ends)
        del self.it.policy.claim
        self.books.now_s = self.now
        return self.books

    def epoch(self, number: int, ends: Sequence[int]) -> None:
        self.ends = ends
        self.books.updates.append([])
        self.books.positions.append([])
        self.applied.clear()
        self.used_up.clear()
        self.witnessed = False
        assert self.it.begin(number, ends, now=self.now) == []
        for worker in self.workers.values():
            worker.global_step, worker.assigned, worker.finished = 0, 0, False
            if worker.alive:
                pause = 50.0 if self.rng.random() < self.case.late else 0.0
                self.claim_later(worker, pause + self.case.jitter * self.rng.random())
        steps = 0
        while any(w.alive and not w.finished for w in self.workers.values()):
            steps += 1
            assert steps < 200 * (ends[-1] + 10) * len(self.workers), "no end in sight"
            wake_s = self.it.wake_s()
            next_s = self.heap[0][0] if self.heap else math.inf
            assert min(wake_s, next_s) < math.inf, f"deadlock in epoch {number}, global_step {self.it.global_step}"
            if wake_s <= next_s:
                self.advance(wake_s)
                self.take(self.it.wake(self.now))
                assert self.it.wake_s() > wake_s or self.it.wake(self.now) == [], "wakes for nothing"
            else:
                self.advance(next_s)
                _, _, life, what, rank, data = heapq.heappop(self.heap)
                worker = self.workers[rank]
                if what in ("die", "join") or (worker.alive and life == worker.life):
                    getattr(self, what)(worker, data)
        self.finish(ends)

    def advance(self, to: float) -> None:
        to = max(to, self.now)
        room = self.it.ledger.free - (len(self.it.ends) - 1 - self.it.global_step)
        for worker in self.workers.values():
            if worker.alive and worker.asked_s is not None and room > 0:
                worker.waited_s += to - self.now
        self.now = to

    def later(self, at: float, what: str, rank: int, data: Any = None) -> None:
        self.count += 1
        heapq.heappush(self.heap, (at, self.count, self.workers[rank].life, what, rank, data))

    def claim_later(self, worker: RandomWorker, pause_s: float = 0.0) -> None:
        self.later(self.now + pause_s, "claim", worker.rank)

    # --- what workers do ---

    def claim(self, worker: RandomWorker, _: Any) -> None:
        first = worker.assigned == 0
        worker.asked_s, worker.waited_s, worker.patience_s = self.now, 0.0, 0.0
        self.take(self.it.claim(worker.rank, worker.global_step, self.now))
        if first:
            assert worker.assigned > 0, "the first claim of an epoch is answered with a grant, at once"

    def push(self, worker: RandomWorker, data: tuple[Assigned, int, bool]) -> None:
        assigned, samples, finite = data
        if worker.rank not in self.it.live:
            self.out.discard(assigned.assignment)
        count = None if samples == assigned.samples else samples
        effects = self.it.push(
            worker.rank, assigned.assignment, self.now, global_step=worker.global_step, samples=count, finite=finite
        )
        assert isinstance(effects[0], Accepted | Refused)
        assert (effects[0].rank, effects[0].assignment) == (worker.rank, assigned.assignment)
        self.pushed(worker, assigned, samples, effects)
        self.take(effects)
        if worker.alive and worker.asked_s is None:
            self.claim(worker, None)

    def give_back(self, worker: RandomWorker, assigned: Assigned) -> None:
        worker.assigned -= 1
        self.out.discard(assigned.assignment)
        self.take(self.it.give_back(worker.rank, assigned.assignment, self.now))
        self.claim_later(worker, 0.01)

    def look(self, worker: RandomWorker, data: tuple[Assigned, int, float]) -> None:
        """Between two micro-batches: returns early if the coordinator wants it."""
        assigned, done, per_s = data
        if done >= assigned.samples or (wants_return(self.it, assigned.assignment) and done):
            self.push(worker, (assigned, min(done, assigned.samples), True))
        else:
            self.later(self.now + per_s, "look", worker.rank, (assigned, done + assigned.micro, per_s))

    def die(self, worker: RandomWorker, _: Any) -> None:
        if not worker.alive or sum(w.alive for w in self.workers.values()) == 1:
            return
        worker.alive, worker.asked_s = False, None
        worker.life += 1
        self.out = {n for n in self.out if self.assignments[n].rank != worker.rank}
        self.take(self.it.lost(worker.rank, self.now))

    def join(self, worker: RandomWorker, _: Any) -> None:
        if worker.alive:
            return
        worker.alive, worker.finished, worker.assigned = True, False, 0
        worker.global_step = int(self.rng.integers(0, min(self.it.global_step, len(self.ends) - 1) + 1))
        self.take(self.it.joined(worker.rank, self.now))
        self.claim_later(worker, 0.01)

    # --- what the coordinator says ---

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            getattr(self, "on_" + type(effect).__name__.lower())(effect)

    def on_assigned(self, assigned: Assigned) -> None:
        worker = self.workers[assigned.rank]
        assert worker.asked_s is not None and worker.alive
        self.answered(worker)
        worker.assigned += 1
        assert assigned.base == self.it.version and assigned.global_step == self.it.global_step
        assert assigned.assignment not in self.assignments
        self.assignments[assigned.assignment] = assigned
        self.books.assigned.append(assigned)
        rng, case = self.rng, self.case
        if not assigned.spans:
            assert worker.assigned == 1, "only the first grant of an epoch may be a dummy"
            self.claim_later(worker, 0.02)
            return
        for assignment in list(self.out):
            other = self.assignments[assignment]
            if set(flat(other.spans)) & set(flat(assigned.spans)):
                if other.rank not in self.it.live:  # stalled, which is not told if its samples were issued twice
                    self.out.discard(assignment)
                    continue
                assert other.spans == assigned.spans and other.rank != assigned.rank
                self.books.second_issues += 1
        mine = set(flat(assigned.spans))
        assert len(mine) == assigned.samples
        assert not any(self.applied[i] or self.used_up[i] for i in mine)
        self.out.add(assigned.assignment)
        seconds = self.duration(worker, assigned.samples)
        if rng.random() < case.give_back:
            self.later(self.now + 0.01, "give_back", worker.rank, assigned)
            return
        if assigned.micro:
            per_s = self.duration(worker, assigned.micro)
            self.later(self.now + per_s, "look", worker.rank, (assigned, assigned.micro, per_s))
            return
        samples = assigned.samples
        if rng.random() < case.early:
            samples = int(rng.integers(1, assigned.samples + 1))
        if rng.random() < case.stall:
            seconds += 400.0 * rng.random()
        self.later(
            self.now + seconds, "push", worker.rank, (assigned, samples, rng.random() >= case.nonfinite)
        )

    def duration(self, worker: RandomWorker, samples: int) -> float:
        noise = math.exp(self.case.jitter * self.rng.standard_normal()) if self.case.jitter else 1.0
        return (self.case.launch_s + worker.rate_s * samples) * noise

    def on_passed(self, passed: Passed) -> None:
        worker = self.workers[passed.rank]
        assert worker.asked_s is not None and worker.alive
        assert worker.assigned > 0, "a rank passed by before its first step"
        assert passed.global_step == self.it.global_step > worker.global_step
        self.answered(worker)
        worker.global_step = passed.global_step
        if passed.global_step == len(self.ends):
            worker.finished = True
        else:
            self.claim_later(worker, 0.001 * self.case.jitter * self.rng.random())

    def answered(self, worker: RandomWorker) -> None:
        worker.asked_s = None
        self.books.longest_wait_s = max(self.books.longest_wait_s, worker.waited_s)
        holds = self.it.policy.holds
        if holds != "barrier":
            assert worker.waited_s <= (worker.patience_s if holds == "grace" else 0.0) + 1e-9

    def pushed(self, worker: RandomWorker, assigned: Assigned, samples: int, effects: list[Effect]) -> None:
        """Checks the answer to a push against the books, before the other effects are taken."""
        first, alive = effects[0], assigned.assignment in self.out
        used = flat(assigned.spans)[:samples]
        self.out.discard(assigned.assignment)
        if isinstance(first, Refused):
            self.books.refused[first.reason] += 1
            self.books.recomputed += samples
            assert first.samples == samples
            if first.reason != "nonfinite":
                assert not alive
                return
            self.books.recomputed -= samples
            self.used_up.update(used)
        else:
            assert isinstance(first, Accepted) and first.samples == samples
            assert first.staleness == self.it_version_before(effects) - assigned.base
            self.pooled.append((first, used))
        assert alive, "an assignment that was void is accepted"
        self.witnessed = self.witnessed or worker.global_step == self.step_before(effects)
        for assignment in list(self.out):
            if self.assignments[assignment].spans == assigned.spans:
                self.out.discard(assignment)

    def it_version_before(self, effects: list[Effect]) -> int:
        return self.it.version - sum(isinstance(e, Updated) for e in effects)

    def step_before(self, effects: list[Effect]) -> int:
        return self.it.global_step - sum(isinstance(e, Updated) and e.ends_step for e in effects)

    def on_accepted(self, accepted: Accepted) -> None:
        bound = self.it.policy.bound_for(len(self.it.workers.crew))
        assert bound is None or accepted.staleness <= bound
        assert 0.0 < accepted.scale <= 1.0

    def on_refused(self, refused: Refused) -> None:
        pass

    def on_reissued(self, reissued: Reissued) -> None:
        self.books.reissued[reissued.reason] += 1
        assert reissued.samples > 0
        self.out.discard(reissued.assignment)

    def on_updated(self, updated: Updated) -> None:
        expected = [(a.rank, a.assignment, a.samples, a.staleness) for a, _ in self.pooled]
        assert [(c.rank, c.assignment, c.samples, c.staleness) for c in updated.contributions] == expected
        assert updated.samples == sum(c.samples for c in updated.contributions)
        positions = [i for _, used in self.pooled for i in used]
        self.applied.update(positions)
        self.pooled.clear()
        self.books.positions[-1].append(tuple(sorted(positions)))
        self.books.updates[-1].append(updated)
        for c in updated.contributions:
            self.books.staleness[c.staleness] += c.samples
        if updated.ends_step:
            assert self.witnessed, "a global step ended without anybody in it"
            self.witnessed = False
            global_step = sum(u.ends_step for u in self.books.updates[-1])
            assert updated.global_step == global_step
            done = sum(self.applied.values()) + sum(self.used_up.values())
            assert done >= self.ends[global_step - 1] or self.it.policy.name in ("quorum", "backup")
            assert self.ends[-1] - done >= len(self.ends) - global_step
        assert updated.samples > 0 or updated.ends_step
        bound = self.it.policy.bound_for(len(self.it.workers.crew))
        if bound is not None:  # a second issue lives on alone: nobody is told
            self.out = {n for n in self.out if updated.version - self.assignments[n].base <= bound}

    def finish(self, ends: Sequence[int]) -> None:
        updates = self.books.updates[-1]
        assert sum(u.ends_step for u in updates) == len(ends) == self.it.global_step
        assert [u.version for u in updates] == list(
            range(self.it.version - len(updates) + 1, self.it.version + 1)
        )
        assert over(self.it) and not self.pooled and not self.out
        ledger = self.it.ledger
        assert (ledger.free, ledger.arrived) == (0, ends[-1])
        times = self.applied + self.used_up
        assert all(times[i] == 1 for i in range(ends[-1]))
        for worker in self.workers.values():
            assert not worker.alive or worker.assigned > 0


def run(coordinator: Coordinator, case: Case) -> Books:
    return Loop(coordinator, case).run()
