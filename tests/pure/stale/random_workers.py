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

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Effect,
    Granted,
    Passed,
    Refused,
    Reissued,
    Span,
    Updated,
)
from lightning_hetero.stale.decide.policy import Claim, Grant, Hold


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
    tick: int = 0
    granted: int = 0  # grants in this epoch
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
    granted: list[Granted] = field(default_factory=list)
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
        self.leases: dict[int, Granted] = {}  # every grant of the run
        self.out: set[int] = set()  # leases whose samples are with a worker, as far as we were told
        self.pooled: list[tuple[Accepted, list[int]]] = []
        self.applied: Counter[int] = Counter()
        self.used_up: Counter[int] = Counter()  # not finite
        self.witnessed = False
        self.real_claim = coordinator.policy.claim
        coordinator.policy.claim = self.spy  # type: ignore[method-assign]

    def spy(self, claim: Claim) -> Grant | Hold:
        worker = self.workers[claim.rank]
        worker.patience_s = max(worker.patience_s, self.it.policy.grace * claim.step_s)
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
            worker.tick, worker.granted, worker.finished = 0, 0, False
            if worker.alive:
                pause = 50.0 if self.rng.random() < self.case.late else 0.0
                self.claim_later(worker, pause + self.case.jitter * self.rng.random())
        steps = 0
        while any(w.alive and not w.finished for w in self.workers.values()):
            steps += 1
            assert steps < 200 * (ends[-1] + 10) * len(self.workers), "no end in sight"
            wake_s = self.it.wake_s()
            next_s = self.heap[0][0] if self.heap else math.inf
            assert min(wake_s, next_s) < math.inf, f"deadlock in epoch {number}, tick {self.it.tick}"
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
        room = self.it.ledger.free - (len(self.it.ends) - 1 - self.it.tick)
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
        first = worker.granted == 0
        worker.asked_s, worker.waited_s, worker.patience_s = self.now, 0.0, 0.0
        self.take(self.it.claim(worker.rank, worker.tick, self.now))
        if first:
            assert worker.granted > 0, "the first claim of an epoch is answered with a grant, at once"

    def push(self, worker: RandomWorker, data: tuple[Granted, int, bool]) -> None:
        granted, samples, finite = data
        if worker.rank not in self.it.live:
            self.out.discard(granted.lease)
        count = None if samples == granted.samples else samples
        effects = self.it.push(
            worker.rank, granted.lease, self.now, tick=worker.tick, samples=count, finite=finite
        )
        assert isinstance(effects[0], Accepted | Refused)
        assert (effects[0].rank, effects[0].lease) == (worker.rank, granted.lease)
        self.pushed(worker, granted, samples, effects)
        self.take(effects)
        if worker.alive and worker.asked_s is None:
            self.claim(worker, None)

    def give_back(self, worker: RandomWorker, granted: Granted) -> None:
        worker.granted -= 1
        self.out.discard(granted.lease)
        self.take(self.it.give_back(worker.rank, granted.lease, self.now))
        self.claim_later(worker, 0.01)

    def look(self, worker: RandomWorker, data: tuple[Granted, int, float]) -> None:
        """Between two micro-batches: returns early if the coordinator wants it."""
        granted, done, per_s = data
        if done >= granted.samples or (self.it.wants_return(granted.lease) and done):
            self.push(worker, (granted, min(done, granted.samples), True))
        else:
            self.later(self.now + per_s, "look", worker.rank, (granted, done + granted.micro, per_s))

    def die(self, worker: RandomWorker, _: Any) -> None:
        if not worker.alive or sum(w.alive for w in self.workers.values()) == 1:
            return
        worker.alive, worker.asked_s = False, None
        worker.life += 1
        self.out = {n for n in self.out if self.leases[n].rank != worker.rank}
        self.take(self.it.lost(worker.rank, self.now))

    def join(self, worker: RandomWorker, _: Any) -> None:
        if worker.alive:
            return
        worker.alive, worker.finished, worker.granted = True, False, 0
        worker.tick = int(self.rng.integers(0, min(self.it.tick, len(self.ends) - 1) + 1))
        self.take(self.it.joined(worker.rank, self.now))
        self.claim_later(worker, 0.01)

    # --- what the coordinator says ---

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            getattr(self, "on_" + type(effect).__name__.lower())(effect)

    def on_granted(self, granted: Granted) -> None:
        worker = self.workers[granted.rank]
        assert worker.asked_s is not None and worker.alive
        self.answered(worker)
        worker.granted += 1
        assert granted.base == self.it.version and granted.tick == self.it.tick
        assert granted.lease not in self.leases
        self.leases[granted.lease] = granted
        self.books.granted.append(granted)
        rng, case = self.rng, self.case
        if not granted.spans:
            assert worker.granted == 1, "only the first grant of an epoch may be a dummy"
            self.claim_later(worker, 0.02)
            return
        for lease in list(self.out):
            other = self.leases[lease]
            if set(flat(other.spans)) & set(flat(granted.spans)):
                if other.rank not in self.it.live:  # stalled, which is not told if its samples were issued twice
                    self.out.discard(lease)
                    continue
                assert other.spans == granted.spans and other.rank != granted.rank
                self.books.second_issues += 1
        mine = set(flat(granted.spans))
        assert len(mine) == granted.samples
        assert not any(self.applied[i] or self.used_up[i] for i in mine)
        self.out.add(granted.lease)
        seconds = self.duration(worker, granted.samples)
        if rng.random() < case.give_back:
            self.later(self.now + 0.01, "give_back", worker.rank, granted)
            return
        if granted.micro:
            per_s = self.duration(worker, granted.micro)
            self.later(self.now + per_s, "look", worker.rank, (granted, granted.micro, per_s))
            return
        samples = granted.samples
        if rng.random() < case.early:
            samples = int(rng.integers(1, granted.samples + 1))
        if rng.random() < case.stall:
            seconds += 400.0 * rng.random()
        self.later(
            self.now + seconds, "push", worker.rank, (granted, samples, rng.random() >= case.nonfinite)
        )

    def duration(self, worker: RandomWorker, samples: int) -> float:
        noise = math.exp(self.case.jitter * self.rng.standard_normal()) if self.case.jitter else 1.0
        return (self.case.launch_s + worker.rate_s * samples) * noise

    def on_passed(self, passed: Passed) -> None:
        worker = self.workers[passed.rank]
        assert worker.asked_s is not None and worker.alive
        assert worker.granted > 0, "a rank passed by before its first step"
        assert passed.tick == self.it.tick > worker.tick
        self.answered(worker)
        worker.tick = passed.tick
        if passed.tick == len(self.ends):
            worker.finished = True
        else:
            self.claim_later(worker, 0.001 * self.case.jitter * self.rng.random())

    def answered(self, worker: RandomWorker) -> None:
        worker.asked_s = None
        self.books.longest_wait_s = max(self.books.longest_wait_s, worker.waited_s)
        holds = self.it.policy.holds
        if holds != "barrier":
            assert worker.waited_s <= (worker.patience_s if holds == "grace" else 0.0) + 1e-9

    def pushed(self, worker: RandomWorker, granted: Granted, samples: int, effects: list[Effect]) -> None:
        """Checks the answer to a push against the books, before the other effects are taken."""
        first, alive = effects[0], granted.lease in self.out
        used = flat(granted.spans)[:samples]
        self.out.discard(granted.lease)
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
            assert first.staleness == self.it_version_before(effects) - granted.base
            self.pooled.append((first, used))
        assert alive, "a lease that was void is accepted"
        self.witnessed = self.witnessed or worker.tick == self.tick_before(effects)
        for lease in list(self.out):
            if self.leases[lease].spans == granted.spans:
                self.out.discard(lease)

    def it_version_before(self, effects: list[Effect]) -> int:
        return self.it.version - sum(isinstance(e, Updated) for e in effects)

    def tick_before(self, effects: list[Effect]) -> int:
        return self.it.tick - sum(isinstance(e, Updated) and e.ends_step for e in effects)

    def on_accepted(self, accepted: Accepted) -> None:
        bound = self.it.policy.bound_for(len(self.it.workers.crew))
        assert bound is None or accepted.staleness <= bound
        assert 0.0 < accepted.scale <= 1.0

    def on_refused(self, refused: Refused) -> None:
        pass

    def on_reissued(self, reissued: Reissued) -> None:
        self.books.reissued[reissued.reason] += 1
        assert reissued.samples > 0
        self.out.discard(reissued.lease)

    def on_updated(self, updated: Updated) -> None:
        expected = [(a.rank, a.lease, a.samples, a.staleness) for a, _ in self.pooled]
        assert [(c.rank, c.lease, c.samples, c.staleness) for c in updated.contributions] == expected
        assert updated.samples == sum(c.samples for c in updated.contributions)
        positions = [i for _, used in self.pooled for i in used]
        self.applied.update(positions)
        self.pooled.clear()
        self.books.positions[-1].append(tuple(sorted(positions)))
        self.books.updates[-1].append(updated)
        for c in updated.contributions:
            self.books.staleness[c.staleness] += c.samples
        if updated.ends_step:
            assert self.witnessed, "a tick ended without anybody in it"
            self.witnessed = False
            tick = sum(u.ends_step for u in self.books.updates[-1])
            assert updated.tick == tick
            done = sum(self.applied.values()) + sum(self.used_up.values())
            assert done >= self.ends[tick - 1] or self.it.policy.name in ("quorum", "backup")
            assert self.ends[-1] - done >= len(self.ends) - tick
        assert updated.samples > 0 or updated.ends_step
        bound = self.it.policy.bound_for(len(self.it.workers.crew))
        if bound is not None:  # a second issue lives on alone: nobody is told
            self.out = {n for n in self.out if updated.version - self.leases[n].base <= bound}

    def finish(self, ends: Sequence[int]) -> None:
        updates = self.books.updates[-1]
        assert sum(u.ends_step for u in updates) == len(ends) == self.it.tick
        assert [u.version for u in updates] == list(
            range(self.it.version - len(updates) + 1, self.it.version + 1)
        )
        assert self.it.over and not self.pooled and not self.out
        ledger = self.it.ledger
        assert (ledger.free, ledger.leased, ledger.arrived) == (0, 0, ends[-1])
        times = self.applied + self.used_up
        assert all(times[i] == 1 for i in range(ends[-1]))
        for worker in self.workers.values():
            assert not worker.alive or worker.granted > 0


def run(coordinator: Coordinator, case: Case) -> Books:
    return Loop(coordinator, case).run()
