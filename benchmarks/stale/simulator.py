"""Discrete-event simulation of the stale engine: the same coordinator and policies as in the server (layer P).

Workers behave as the real ones do. One goes through the epoch's global steps, claims work, fetches parameters if there
are newer ones (``pull_s``), computes (`ChunkTime`), hands its gradients over (``push_s``) and claims again with the
same message:

    claim -> assigned -> pull -> compute -> push + claim -> ...
             (held: no answer yet)         passed: on to the server's step; after the last one, meet the others

The simulation decides nothing: it gives messages to a `Coordinator` in order of time, equal times in order of rank,
and obeys the answers. So it is deterministic, and what it says of a policy holds for the server as far as the times
are right. With `Hooks` a caller may compute real gradients on the simulated schedule.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Effect, Passed, Refused, Span, Updated
from lightning_hetero.stale.decide.intervals import head


def wants_return(coordinator: Coordinator, assignment: int) -> bool:
    """Whether a worker should push what it has of this assignment now: its version is too far behind."""
    threshold = coordinator.policy.threshold_for(len(coordinator.workers.crew))
    if threshold is None:
        return False
    version, valid = coordinator.version, [worker.valid for worker in coordinator.workers]
    return any(v is not None and v.number == assignment and version - v.base >= threshold for v in valid)


class ChunkTime(Protocol):
    """Seconds a worker computes on a chunk."""

    def __call__(self, rank: int, step: int, now_s: float, samples: int) -> float:
        """Returns the time [s] of ``samples`` samples begun at ``now_s`` in training step ``step`` (over epochs)."""
        ...


class Hooks:
    """What a caller may do along the simulated schedule, in order of simulated time."""

    def begin(self, epoch: int, now_s: float) -> None:
        """An epoch begins: positions are those of its order of samples."""

    def assigned(self, assigned: Assigned, now_s: float) -> None:
        """A worker takes the parameters, which are of version ``assigned.base`` now."""

    def accepted(self, accepted: Accepted, assigned: Assigned, spans: Sequence[Span], now_s: float) -> None:
        """The mean gradient over ``spans``, at the parameters taken with ``assigned``, goes into the pool."""

    def refused(self, refused: Refused, now_s: float) -> None:
        """A contribution is thrown away."""

    def updated(self, updated: Updated, now_s: float) -> None:
        """The pool becomes one update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Constant times of transfers [s].

    A push that runs beside the backward pass costs only what is left when backward ends.

    Attributes:
        pull_s: parameters from server to worker, after the assignment.
        push_s: gradients from worker to server, before they count.

    Raises:
        ValueError: a cost is negative or not finite.
    """

    pull_s: float = 0.0
    push_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("pull_s", "push_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"Costs.{name}={value!r} must be a finite number >= 0 (seconds)")


@dataclass(kw_only=True, slots=True)
class WorkerTotals:
    """What one worker did.

    Attributes:
        busy_s: time it computed [s].
        hold_s: time it had asked for work and was not answered [s].
        chunks: pushes made.
        samples: computed samples that count.
        recomputed: computed samples that were refused.
    """

    busy_s: float = 0.0
    hold_s: float = 0.0
    chunks: int = 0
    samples: int = 0
    recomputed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What happened.

    Attributes:
        makespan_s: from the start to the last worker's end of the last epoch.
        workers: totals by rank.
        staleness: samples applied, by the number of versions they were old.
        updates_s: time of each update.
    """

    makespan_s: float
    workers: dict[int, WorkerTotals]
    staleness: dict[int, int]
    updates_s: list[float]

    @property
    def max_staleness(self) -> int:
        """Largest staleness of any applied sample [versions]."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over applied samples [versions]; 0 if there are none."""
        total = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / total if total else 0.0

    @property
    def recomputed(self) -> int:
        """Samples computed in vain."""
        return sum(w.recomputed for w in self.workers.values())


@dataclass(slots=True)
class _SimulatedWorker:
    global_step: int = 0
    finished: bool = False
    asked_s: float | None = None  # claimed, not answered yet
    assigned: Assigned | None = None
    computed: int = 0  # samples of the assignment already done
    holds: int = -1  # version of its parameters
    totals: WorkerTotals = field(default_factory=WorkerTotals)


@dataclass(slots=True)
class _Simulation:
    coordinator: Coordinator
    work_s: ChunkTime
    costs: Costs
    hooks: Hooks
    workers: dict[int, _SimulatedWorker]
    now_s: float = 0.0
    steps_before: int = 0  # of earlier epochs
    queue: list[tuple[float, int, int, str]] = field(default_factory=lambda: [])  # time, rank, sequence, what
    sequence: int = 0
    staleness: Counter[int] = field(default_factory=Counter[int])
    updates_s: list[float] = field(default_factory=list[float])

    def at(self, time_s: float, rank: int, what: str) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (time_s, rank, self.sequence, what))

    def run_epoch(self, epoch: int, ends: Sequence[int]) -> None:
        self.hooks.begin(epoch, self.now_s)
        self.obey(self.coordinator.begin(epoch, ends, now=self.now_s))
        for rank, worker in self.workers.items():
            worker.global_step, worker.finished = 0, False
            self.at(self.now_s, rank, "claim")
        idle = 0
        while not all(w.finished for w in self.workers.values()):
            wake_s = self.coordinator.wake_s()
            if self.queue and self.queue[0][0] <= wake_s:
                idle = 0
                self.now_s, rank, _, what = heapq.heappop(self.queue)
                getattr(self, "on_" + what)(rank)
            elif math.isfinite(wake_s) and idle < 1000:
                idle += 1
                self.now_s = max(self.now_s, wake_s)
                self.obey(self.coordinator.wake(self.now_s))
            else:
                held = [rank for rank, w in self.workers.items() if w.asked_s is not None]
                where = f"in global step {self.coordinator.global_step}"
                raise RuntimeError(f"deadlock at {self.now_s} s {where}: {held} wait")
        self.steps_before += len(ends)

    # ---- what happens to workers -------------------------------------------------------------------------

    def on_claim(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.asked_s = self.now_s
        self.obey(self.coordinator.claim(rank, worker.global_step, self.now_s))

    def on_micro(self, rank: int) -> None:
        """One micro-batch is done: return early, or go on."""
        worker = self.workers[rank]
        assigned = worker.assigned
        assert assigned is not None
        worker.computed += min(assigned.micro, assigned.samples - worker.computed)
        if worker.computed >= assigned.samples or wants_return(self.coordinator, assigned.assignment):
            self.at(self.now_s + self.costs.push_s, rank, "push")
        else:
            self.compute_micro(rank, self.now_s)

    def on_push(self, rank: int) -> None:
        """Push and claim are one message, but the coordinator sees two; what the push frees comes after the claim."""
        worker = self.workers[rank]
        assigned, worker.assigned = worker.assigned, None
        assert assigned is not None
        if assigned.spans:
            worker.totals.chunks += 1
            effects = self.coordinator.push(
                rank, assigned.assignment, self.now_s, global_step=worker.global_step, samples=worker.computed
            )
            self.obey(effects, assigned)
        self.on_claim(rank)

    # ---- what the coordinator answers --------------------------------------------------------------------

    def obey(self, effects: Sequence[Effect], pushed: Assigned | None = None) -> None:
        """Carries out what the coordinator decided; ``pushed`` is what was computed, if a push caused it."""
        for effect in effects:
            if isinstance(effect, Assigned):
                self.answered(effect.rank)
                self.begin_chunk(effect)
            elif isinstance(effect, Passed):
                self.answered(effect.rank)
                worker = self.workers[effect.rank]
                worker.global_step = effect.global_step
                worker.finished = effect.global_step >= len(self.coordinator.ends)
                if not worker.finished:
                    self.at(self.now_s, effect.rank, "claim")
            elif isinstance(effect, Accepted):
                assert pushed is not None
                self.workers[effect.rank].totals.samples += effect.samples
                self.staleness[effect.staleness] += effect.samples
                self.hooks.accepted(effect, pushed, head(pushed.spans, effect.samples)[0], self.now_s)
            elif isinstance(effect, Refused):
                self.workers[effect.rank].totals.recomputed += effect.samples
                self.hooks.refused(effect, self.now_s)
            elif isinstance(effect, Updated):
                self.updates_s.append(self.now_s)
                self.hooks.updated(effect, self.now_s)

    def answered(self, rank: int) -> None:
        worker = self.workers[rank]
        assert worker.asked_s is not None, f"worker {rank} is answered at {self.now_s} s and has not asked"
        worker.totals.hold_s += self.now_s - worker.asked_s
        worker.asked_s = None

    def begin_chunk(self, assigned: Assigned) -> None:
        rank, worker = assigned.rank, self.workers[assigned.rank]
        begin_s = self.now_s + (self.costs.pull_s if assigned.base != worker.holds else 0.0)  # another version only
        worker.assigned, worker.computed, worker.holds = assigned, 0, assigned.base
        self.hooks.assigned(assigned, self.now_s)
        if assigned.micro > 0 and assigned.spans:
            self.compute_micro(rank, begin_s)
            return
        # A dummy batch holds one sample that counts nothing.
        end_s = begin_s + self.compute_s(rank, begin_s, assigned.samples or 1)
        worker.computed = assigned.samples
        self.at(end_s + (self.costs.push_s if assigned.spans else 0.0), rank, "push")

    def compute_micro(self, rank: int, from_s: float) -> None:
        worker = self.workers[rank]
        assert worker.assigned is not None
        samples = min(worker.assigned.micro, worker.assigned.samples - worker.computed)
        self.at(from_s + self.compute_s(rank, from_s, samples), rank, "micro")

    def compute_s(self, rank: int, from_s: float, samples: int) -> float:
        """Returns the time of a chunk or micro-batch and notes it as busy."""
        worker = self.workers[rank]
        busy_s = self.work_s(rank, self.steps_before + worker.global_step, from_s, samples)
        worker.totals.busy_s += busy_s
        return busy_s


def simulate(
    coordinator: Coordinator,
    work_s: ChunkTime,
    *,
    workers: Sequence[int],
    epochs: Sequence[Sequence[int]],
    costs: Costs | None = None,
    hooks: Hooks | None = None,
) -> Simulated:
    """Runs epochs to their end and returns what happened.

    At the end of an epoch every worker meets the others: the next begins when the last one has finished its chunk.

    Args:
        coordinator: fresh, with the policy to simulate.
        work_s: time of a chunk.
        workers: ranks, which all live throughout.
        epochs: for each epoch, the ends of its global steps in samples (cumulative, strictly increasing).
        costs: of transfers; none if left out.
        hooks: to compute real gradients.

    Raises:
        RuntimeError: nothing is under way and no worker will be woken (deadlock).
    """
    states = {rank: _SimulatedWorker() for rank in sorted(workers)}
    run = _Simulation(coordinator, work_s, costs or Costs(), hooks or Hooks(), states)
    for epoch, ends in enumerate(epochs):
        run.run_epoch(epoch, ends)
    return Simulated(
        makespan_s=run.now_s,
        workers={rank: worker.totals for rank, worker in states.items()},
        staleness=dict(sorted(run.staleness.items())),
        updates_s=run.updates_s,
    )
