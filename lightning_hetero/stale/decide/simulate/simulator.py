"""Discrete-event simulation of the stale engine: the same coordinator and policies as in the server (layer P).

Workers behave as the real ones do. One goes through the epoch's ticks, claims work, fetches parameters if there are
newer ones (``pull_s``), computes (`ChunkTime`), hands its gradients over (``push_s``) and claims again with the same
message:

    claim -> grant -> pull -> launch -> compute -> push + claim -> ...
             (held: no answer yet)                 passed: on to the server's tick; after the last one, meet the others

The simulation decides nothing: it gives messages to a `Coordinator` in order of time, equal times in order of rank,
and obeys the answers. So it is deterministic, and what it proves about a policy holds for the server as far as the
times are right. Without `Hooks` it only counts; with them a caller computes real gradients on the simulated schedule.
Discrete-event simulation is textbook; the model of a worker and of its costs is ours.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Effect,
    Granted,
    Passed,
    Refused,
    Reissued,
)
from lightning_hetero.stale.decide.intervals import head
from lightning_hetero.stale.decide.simulate.trace import (
    ChunkTime,
    Costs,
    Hooks,
    Membership,
    Trace,
    WorkerTotals,
)
from lightning_hetero.types import Event

__all__ = ["ChunkTime", "Costs", "Hooks", "Membership", "Trace", "WorkerTotals", "simulate"]


_MEMBERSHIP, _MESSAGE = 0, 1  # at equal times the death of a worker comes before its message


_Appointment = tuple[float, int, int, int, str, int]  # time, kind, rank, sequence, what, life


@dataclass(slots=True)
class _SimulatedWorker:
    """Where a worker is; ``life`` makes appointments of an earlier life void."""

    tick: int = 0
    life: int = 0
    alive: bool = True
    finished: bool = False
    asked_s: float | None = None  # claimed, not answered yet
    granted: Granted | None = None
    computed: int = 0  # samples of the lease already done
    granted_s: float = 0.0
    busy_s: float = 0.0  # of the chunk under way
    pull_s: float = 0.0  # for it
    holds: int = -1  # version of its parameters
    finished_s: float = 0.0


@dataclass(slots=True)
class _Simulation:
    coordinator: Coordinator
    work_s: ChunkTime
    costs: Costs
    hooks: Hooks | None
    record: bool
    now_s: float = 0.0
    steps_before: int = 0  # ticks of earlier epochs
    ticks: int = 0
    epoch: int = 0
    sequence: int = 0
    queue: list[_Appointment] = field(default_factory=lambda: [])
    workers: dict[int, _SimulatedWorker] = field(default_factory=dict[int, _SimulatedWorker])
    totals: dict[int, WorkerTotals] = field(default_factory=dict[int, WorkerTotals])
    staleness: Counter[int] = field(default_factory=Counter[int])
    updates_s: list[float] = field(default_factory=list[float])
    events: list[Event] = field(default_factory=list[Event])

    # ---- the queue ---------------------------------------------------------------------------------------

    def at(self, time_s: float, kind: int, rank: int, what: str) -> None:
        self.sequence += 1
        life = self.workers[rank].life if rank in self.workers else 0
        heapq.heappush(self.queue, (time_s, kind, rank, self.sequence, what, life))

    def run_epoch(self, ends: Sequence[int]) -> None:
        self.note("epoch", -1, samples=ends[-1], ticks=len(ends))
        if self.hooks:
            self.hooks.begin(self.epoch, self.now_s)
        self.obey(self.coordinator.begin(self.epoch, ends, now=self.now_s))
        for rank, worker in sorted(self.workers.items()):
            worker.tick, worker.finished = 0, not worker.alive
            if worker.alive:
                self.at(self.now_s, _MESSAGE, rank, "claim")
        idle = 0
        while not all(w.finished for w in self.workers.values()):
            wake_s = self.coordinator.wake_s()
            if self.queue and self.queue[0][0] <= wake_s:
                idle = 0
                self.now_s, _, rank, _, what, life = heapq.heappop(self.queue)
                if what in ("dies", "joins") or self.workers[rank].life == life:
                    getattr(self, "on_" + what)(rank)
            elif math.isfinite(wake_s):
                idle += 1
                if idle > 1000:
                    raise RuntimeError(f"the coordinator wants to be woken at {wake_s} s and does nothing: {self!s}")
                self.now_s = max(self.now_s, wake_s)
                self.obey(self.coordinator.wake(self.now_s))
            else:
                raise RuntimeError(f"deadlock at {self.now_s} s in tick {self.coordinator.tick}: {self!s}")
        if not any(w.alive for w in self.workers.values()):
            where = f"epoch {self.epoch}, tick {self.coordinator.tick}"
            raise RuntimeError(f"the last worker died at {self.now_s} s in {where}")
        for rank, worker in self.workers.items():
            if worker.alive:
                self.totals[rank].sync_s += self.now_s - worker.finished_s
        self.steps_before += len(ends)

    def __str__(self) -> str:
        states = {
            rank: "dead" if not w.alive else "done" if w.finished else "held" if w.asked_s is not None else "busy"
            for rank, w in sorted(self.workers.items())
        }
        return f"workers {states}, ticks {[w.tick for _, w in sorted(self.workers.items())]}"

    # ---- what happens to workers -------------------------------------------------------------------------

    def on_claim(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.asked_s = self.now_s
        self.obey(self.coordinator.claim(rank, worker.tick, self.now_s))
        if self.workers[rank].asked_s is not None:  # not answered
            self.note("hold", rank)

    def on_micro(self, rank: int) -> None:
        """One micro-batch is done: return early, or go on."""
        worker = self.workers[rank]
        granted = worker.granted
        assert granted is not None
        worker.computed += min(granted.micro, granted.samples - worker.computed)
        if worker.computed >= granted.samples or self.coordinator.wants_return(granted.lease):
            self.hand_over(rank)
        else:
            self.compute_micro(rank)

    def on_push(self, rank: int) -> None:
        """Push and claim are one message, but the coordinator sees two; what the push frees comes after the claim."""
        worker = self.workers[rank]
        granted, worker.granted = worker.granted, None
        assert granted is not None
        totals = self.totals[rank]
        totals.busy_s += worker.busy_s
        totals.pull_s += worker.pull_s
        if granted.spans:
            totals.push_s += self.costs.push_s
            totals.chunks += 1
            effects = self.coordinator.push(
                rank, granted.lease, self.now_s, tick=worker.tick, samples=worker.computed
            )
            self.obey(effects, granted)
        self.on_claim(rank)

    def on_dies(self, rank: int) -> None:
        worker = self.workers.get(rank)
        if worker is None or not worker.alive:
            raise ValueError(f"worker {rank} dies at {self.now_s} s, but it does not live then")
        if worker.granted is not None:
            self.totals[rank].busy_s += self.now_s - worker.granted_s
        worker.alive, worker.finished, worker.asked_s, worker.granted = False, True, None, None
        worker.life += 1
        self.note("dies", rank)
        self.obey(self.coordinator.lost(rank, self.now_s))

    def on_joins(self, rank: int) -> None:
        worker = self.workers.setdefault(rank, _SimulatedWorker(alive=False))
        if worker.alive:
            raise ValueError(f"worker {rank} joins at {self.now_s} s, but it lives already")
        worker.alive, worker.tick, worker.asked_s, worker.holds = True, self.coordinator.tick, None, -1
        worker.life += 1
        self.totals.setdefault(rank, WorkerTotals())
        self.note("joins", rank)
        self.obey(self.coordinator.joined(rank, self.now_s))
        worker.finished = worker.tick >= len(self.coordinator.ends)
        worker.finished_s = self.now_s
        if not worker.finished:
            self.at(self.now_s, _MESSAGE, rank, "claim")

    # ---- what the coordinator answers --------------------------------------------------------------------

    def obey(self, effects: Sequence[Effect], pushed: Granted | None = None) -> None:
        """Carries out what the coordinator decided; ``pushed`` is what was computed, if a push caused it."""
        for effect in effects:
            if isinstance(effect, Granted):
                self.answered(effect.rank)
                self.begin_chunk(effect)
            elif isinstance(effect, Passed):
                self.answered(effect.rank)
                self.go_on(effect)
            elif isinstance(effect, Accepted):
                assert pushed is not None
                samples, staleness = effect.samples, effect.staleness
                self.totals[effect.rank].samples += samples
                self.staleness[staleness] += samples
                self.note("accepted", effect.rank, lease=effect.lease, samples=samples, staleness=staleness)
                if self.hooks:
                    self.hooks.accepted(effect, pushed, head(pushed.spans, effect.samples)[0], self.now_s)
            elif isinstance(effect, Refused):
                self.totals[effect.rank].recomputed += effect.samples
                self.note("refused", effect.rank, lease=effect.lease, samples=effect.samples, reason=effect.reason)
                if self.hooks:
                    self.hooks.refused(effect, self.now_s)
            elif isinstance(effect, Reissued):
                self.note("reissued", effect.rank, lease=effect.lease, samples=effect.samples, reason=effect.reason)
            else:
                self.updates_s.append(self.now_s)
                self.ticks += effect.ends_tick
                by = [[c.rank, c.samples, c.staleness] for c in effect.contributions]
                self.note("update", -1, version=effect.version, samples=effect.samples, worth=effect.worth, by=by)
                if self.hooks:
                    self.hooks.updated(effect, self.now_s)

    def answered(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.asked_s is None or not worker.alive:
            raise RuntimeError(f"worker {rank} is answered at {self.now_s} s and has not asked: {self!s}")
        held_s, worker.asked_s = self.now_s - worker.asked_s, None
        totals = self.totals[rank]
        totals.hold_s += held_s
        totals.longest_hold_s = max(totals.longest_hold_s, held_s)

    def begin_chunk(self, granted: Granted) -> None:
        rank, worker = granted.rank, self.workers[granted.rank]
        worker.granted, worker.granted_s, worker.computed, worker.busy_s = granted, self.now_s, 0, 0.0
        worker.pull_s = self.costs.pull_s if granted.base != worker.holds else 0.0  # another version only
        worker.holds = granted.base
        spans = [list(span) for span in granted.spans]
        self.note("grant", rank, lease=granted.lease, base=granted.base, spans=spans, at=worker.tick)
        if self.hooks:
            self.hooks.granted(granted, self.now_s)
        if granted.micro > 0 and granted.spans:
            self.compute_micro(rank, worker.pull_s)
            return
        # A dummy batch holds one sample that counts nothing.
        busy_s = self.compute_s(rank, self.now_s + worker.pull_s, granted.samples or 1)
        worker.computed = granted.samples
        push_s = self.costs.push_s if granted.spans else 0.0
        self.at(self.now_s + worker.pull_s + busy_s + push_s, _MESSAGE, rank, "push")

    def compute_micro(self, rank: int, delay_s: float = 0.0) -> None:
        granted = self.workers[rank].granted
        assert granted is not None
        samples = min(granted.micro, granted.samples - self.workers[rank].computed)
        self.at(self.now_s + delay_s + self.compute_s(rank, self.now_s + delay_s, samples), _MESSAGE, rank, "micro")

    def hand_over(self, rank: int) -> None:
        self.at(self.now_s + self.costs.push_s, _MESSAGE, rank, "push")

    def compute_s(self, rank: int, from_s: float, samples: int) -> float:
        """Returns the time of a chunk or micro-batch and notes it as busy."""
        step = self.steps_before + self.workers[rank].tick
        busy_s = self.costs.launch_s + self.work_s(rank, step, from_s, samples)
        if not (math.isfinite(busy_s) and busy_s >= 0.0):
            what = f"worker {rank} and {samples} samples"
            raise ValueError(f"work_s gave {busy_s!r} s for {what}: it must be finite and >= 0")
        self.workers[rank].busy_s += busy_s
        return busy_s

    def go_on(self, passed: Passed) -> None:
        worker = self.workers[passed.rank]
        if passed.tick <= worker.tick:
            told = f"told at tick {worker.tick} that the server is at {passed.tick}"
            raise RuntimeError(f"worker {passed.rank} is {told}")
        worker.tick = passed.tick
        self.note("passed", passed.rank, tick=passed.tick)
        if passed.tick < len(self.coordinator.ends):
            self.at(self.now_s, _MESSAGE, passed.rank, "claim")
        else:
            worker.finished, worker.finished_s = True, self.now_s

    def note(self, kind: str, rank: int, **data: object) -> None:
        if self.record:
            step = self.coordinator.tick
            self.events.append(Event(kind=kind, rank=rank, epoch=self.epoch, step=step, t_s=self.now_s, data=data))


def simulate(
    coordinator: Coordinator,
    work_s: ChunkTime,
    *,
    workers: Sequence[int],
    epochs: Sequence[Sequence[int]],
    costs: Costs | None = None,
    membership: Sequence[Membership] = (),
    hooks: Hooks | None = None,
    record: bool = True,
) -> Trace:
    """Runs epochs to their end and returns what happened.

    At the end of an epoch every worker meets the others: the next begins when the last one has finished its chunk.

    Args:
        coordinator: fresh, with the policy to simulate.
        work_s: time of a chunk.
        workers: ranks alive at the start.
        epochs: for each epoch, the ends of its ticks in samples (cumulative, strictly increasing).
        costs: of launches and transfers; none if left out.
        membership: deaths and joins, in any order. A worker that joins begins at the server's tick.
        hooks: to compute real gradients.
        record: whether to keep events; without them it is faster.

    Raises:
        ValueError: no workers, no epochs, a death of a dead worker or a join of a living one, or ``work_s`` gives
            something that is no time.
        RuntimeError: no worker is left; nothing is under way and nobody will be woken (deadlock); or the coordinator
            answers a worker that has not asked.
    """
    if not workers or not epochs or any(not ends for ends in epochs):
        raise ValueError(f"workers={workers!r} and epochs={epochs!r} must not be empty")
    run = _Simulation(coordinator, work_s, costs or Costs(), hooks, record)
    run.workers = {rank: _SimulatedWorker() for rank in workers}
    run.totals = {rank: WorkerTotals() for rank in workers}
    for change in membership:
        run.at(change.at_s, _MEMBERSHIP, change.rank, change.what)
    for epoch, ends in enumerate(epochs):
        run.epoch = epoch
        if epoch:
            run.now_s += run.costs.sync_s
        run.run_epoch(ends)
    return Trace(
        makespan_s=run.now_s,
        workers=dict(sorted(run.totals.items())),
        staleness=dict(sorted(run.staleness.items())),
        updates_s=run.updates_s,
        ticks=run.ticks,
        events=run.events,
    )
