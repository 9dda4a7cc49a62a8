"""Hands out samples, counts what arrives, decides when it becomes an update: one object for server and simulator (P).

Events go in (`claim`, `push`, `give_back`, `lost`, `joined`, `wake`), effects come out; no clock, no thread, no tensor.
The policy decides who gets how much and when the pool becomes an update; the rules below, and those of `dispatch`
for answers to claims, hold whatever it decides, and make every policy exact and free of deadlock:

- *Witness.* A global step ends only with a contribution of a worker that is in it. Learning rates come with the pushes
  of workers in that step, and no rank can be at a synchronisation point before it.
- *Strict bound.* The pool is emptied by every update, so staleness at arrival is staleness at application. Assignments
  that have become too old are issued again at once; what still comes of them is refused.
- *Liveness.* An assignment without a push for long is issued again, and no worker waits longer for one without an
  assignment to claim one; that one stays welcome.

A coordinator that bounds staleness without waiting is SaPS's idea (abstract only); the rules are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_hetero.predictors import Predictor
from lightning_hetero.stale.decide.dispatch import Dispatch
from lightning_hetero.stale.decide.effects import Accepted, Effect, Passed, Refused, Reissued, Span, Updated
from lightning_hetero.stale.decide.epoch import Epoch, check_update
from lightning_hetero.stale.decide.intervals import head
from lightning_hetero.stale.decide.ledger import Ledger
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.decide.speeds import Speeds
from lightning_hetero.stale.decide.streams import Streams
from lightning_hetero.stale.decide.workers import Assignment, HeldClaim, Workers, WorkerState

_STEP_WEIGHT = 0.5  # of the newest step in the smoothed one


class Coordinator(Dispatch):
    """See the module. Times are of any one monotonic clock [s].

    Args:
        policy: which worker waits, which computes what, what counts.
        workers: ranks that take part from the start.
        ahead: fix slices so many global steps early, so that workers can fetch them (`Assigned.hint`).
        predictor: model of a worker's time; None: `Kalman`.
        liveness_s: an assignment is issued again when it takes ten times its predicted time, but not before so long
            [s]. Before anything is known, and for a claim that others wait for, it is ten times this.

    Attributes:
        workers: what is known of each.
        version: of the parameters: number of updates so far.
        speeds: how fast they are.
    """

    def __init__(
        self, policy: Policy, *, workers: Iterable[int], ahead: int = 0, predictor: Predictor | None = None,
        liveness_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.speeds = Speeds(predictor)
        super().__init__(policy, Workers(workers, speeds=self.speeds, liveness_s=liveness_s), ahead=ahead)
        self._resumed: Mapping[int, Any] = {}  # epoch -> sub-steps that count in it, from a checkpoint

    @property
    def epoch(self) -> int:
        """The present epoch; -1: none has begun."""
        return self._books.number

    @property
    def ends(self) -> Sequence[int]:
        """Cumulative samples behind each global step of the epoch."""
        return self._books.ends

    @property
    def global_step(self) -> int:
        """The present one; ``len(ends)``: the epoch is over."""
        return self._books.global_step

    @property
    def ledger(self) -> Ledger:
        """Which samples are free, assigned, arrived."""
        return self._books.ledger

    @property
    def live(self) -> set[int]:
        """Ranks that are connected and not silent for longer than the limit."""
        return self.workers.ranks()

    # --- events -----------------------------------------------------------------------------------------------

    def begin(
        self, epoch: int, ends: Sequence[int], *, applied: Iterable[Span] = (), global_step: int = 0, now: float,
        streams: Streams | None = None,
    ) -> list[Effect]:  # fmt: skip
        """Begins an epoch; assignments of the one before are void.

        Args:
            epoch: its number.
            ends: cumulative samples behind each of its global steps, strictly increasing.
            applied: samples that are applied already, when an epoch is resumed at ``global_step``.
            global_step: the first one.
            now: time [s].
            streams: of the ranks' own, which add to ``ends``.

        Raises:
            ValueError: ``ends`` or ``applied`` make no epoch, or too few samples are left for what is to come.
        """
        if epoch < 0 or not ends:
            raise ValueError(f"epoch {epoch} with {len(ends)} batches: give a number >= 0 and at least one batch")
        books = Epoch(epoch, ends, applied=applied, global_step=global_step, now=now, streams=streams)
        if global_step:  # resumed
            books.ledger.resume_substeps(self._resumed.get(epoch, {}))
        self._resumed = {}
        last = len(self.ends)
        effects: list[Effect] = [Passed(rank=w.rank, global_step=last) for w in self.workers if w.held is not None]
        self.workers.begin(now)
        self._books = books
        return effects

    def claim(self, rank: int, global_step: int, now: float) -> list[Effect]:
        """A worker in a global step asks for work; it is assigned, passed, or held (no effect for it yet).

        An epoch has begun, and ``global_step`` is not ahead of the server's.
        """
        worker = self.workers.speaks(rank, now)
        effects = self._free(worker, "abandoned: its worker asks for other work")
        worker.assignment, worker.held = None, None
        if worker.assignments and (global_step < self.global_step or self._books.over):
            effects.append(Passed(rank=rank, global_step=self.global_step))
        else:
            worker.held = HeldClaim(global_step, now)
        return effects + self.answer(now)

    def told(self, rank: int, read: int, through: bool) -> None:
        """A worker, which claims or pushes next, has read so many samples of its own stream; see `Streams`."""
        self._books.told(rank, read, through)

    @property
    def streams(self) -> Streams | None:
        """The workers' own streams in this epoch; None: any worker can have any sample."""
        return self._books.streams

    def push(
        self, rank: int, assignment: int, now: float, *, global_step: int, samples: int | None = None,
        finite: bool = True,
    ) -> list[Effect]:  # fmt: skip
        """A worker has the gradients of its assignment, or of the first ``samples`` of it.

        Args:
            rank: the worker.
            assignment: its number.
            now: time [s].
            global_step: where the worker is; what counts as being in the present one.
            samples: computed samples, if it returns early; None: all. The rest is issued again.
            finite: False: the gradients have NaN or Inf; the samples are used up all the same.

        Raises:
            ValueError: ``samples`` is not in 1 to the size of the assignment.
        """
        worker = self.workers.get(rank)
        held = worker.assignment if worker is not None else None
        if worker is None or held is None or held.number != assignment:
            return [Refused(rank=rank, assignment=assignment, samples=samples or 0, reason="gone")]
        count = held.samples if samples is None else samples
        self._check_samples(held, count)
        self.workers.speaks(rank, now)
        worker.clock += 1
        # What lay still for long (a stopped process) says little about speed: not more than the limit is learned.
        self.speeds.learn(rank, count, min(now - held.assigned_s, held.limit_s))
        if held.claimed == self.global_step and count == held.samples:
            self.workers.ended(held, now)
        effects = self._receive(worker, held, count, finite, in_step=global_step == self.global_step)
        effects += self._update(now)
        return effects + self.answer(now)

    def _receive(
        self, worker: WorkerState, held: Assignment, count: int, finite: bool, *, in_step: bool
    ) -> list[Effect]:
        staleness = self.version - held.base
        effects: list[Effect] = []
        if not self.within_bound(held.base):
            effects += self._free(worker, "stale")
        worker.assignment = None
        rank, number = worker.rank, held.number
        if held.void:
            return [Refused(rank=rank, assignment=number, samples=count, reason=held.void), *effects]
        if held.twin is not None:
            held.twin.void = "gone"
            held.part_from_twin()
        done, rest = head(held.spans, count)
        accepted = None
        if finite:
            scale = self.policy.scale(staleness, len(self.workers.crew))
            accepted = Accepted(rank=rank, assignment=number, samples=count, staleness=staleness, scale=scale)
        self._books.arrive(rank, done, accepted, in_step=in_step)
        effects.append(accepted or Refused(rank=rank, assignment=number, samples=count, reason="nonfinite"))
        if rest:
            self.ledger.release(rest)
            left = held.samples - count
            effects.append(Reissued(rank=rank, assignment=number, samples=left, reason="returned early"))
        return effects

    def substep(self, assignment: Assignment, number: int, samples: int) -> bool:
        """Whether the gradients of a push that is not the last of its batch count; if so, that is noted.

        They do not if that step counts already for these samples: it came from a worker that died or was late with the
        last push, so that the samples were issued again, or from the assignment's twin. ValueError if ``samples`` is
        not in 1 to the size of the assignment.
        """
        self._check_samples(assignment, samples)
        return self.ledger.first(number, head(assignment.spans, samples)[0])

    def _check_samples(self, assignment: Assignment, samples: int) -> None:
        if not 1 <= samples <= assignment.samples:
            raise ValueError(
                f"rank {assignment.rank} pushes samples={samples} of assignment {assignment.number}, which has"
                f" {assignment.samples}: give 1 to {assignment.samples}, or give it back"
            )

    def give_back(self, rank: int, assignment: int | None, now: float) -> list[Effect]:
        """A worker will not compute its assignment of that number (None: any): the samples are free again."""
        worker = self.workers.get(rank)
        held = None if worker is None else worker.assignment
        if worker is None or held is None or assignment not in (None, held.number):
            return []
        self.workers.speaks(rank, now)
        worker.assignments -= 1
        effects = self._free(worker, "given back")
        worker.assignment = None
        return effects + self.answer(now)

    def lost(self, rank: int, now: float) -> list[Effect]:
        """A worker is dead: its assignment is issued again, and no worker counts on it."""
        worker = self.workers.remove(rank)
        if worker is None:
            return []
        effects = self._free(worker, "its worker is dead")
        return effects + self._update(now) + self.answer(now)

    def joined(self, rank: int, now: float) -> list[Effect]:
        """A worker connected, perhaps again; it takes part at once. Unknown ranks that claim join, too."""
        self.workers.speaks(rank, now)
        return self.answer(now)

    def wake(self, now: float) -> list[Effect]:
        """Does what is due by now: ends of holds, assignments or workers without a sign of life, second issues."""
        effects: list[Effect] = []
        for worker in self.workers:
            if worker.live and worker.assignment is not None and now >= worker.assignment.deadline_s:
                worker.live = False
                effects += self._free(worker, "stalled")
                worker.assignment.void = worker.assignment.void or "gone"
        self.workers.fall_asleep(now)
        return effects + self._update(now) + self.answer(now)

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        return self.workers.wake_s()

    # --- questions --------------------------------------------------------------------------------------------

    def assignment(self, rank: int, number: int) -> Assignment | None:
        """Returns what a worker computes on in this epoch, valid or not, if that has this number; else None."""
        worker = self.workers.get(rank)
        own = None if worker is None else worker.assignment
        return own if own is not None and own.number == number else None

    def within_bound(self, base: int, *, later: int = 0) -> bool:
        """Whether gradients computed with version ``base`` may be applied now, or so many versions later."""
        bound = self.policy.bound_for(len(self.workers.crew))
        return bound is None or self.version + later - base <= bound

    def bases(self) -> set[int]:
        """Returns the versions that a worker computes with in this epoch."""
        present = (worker.assignment for worker in self.workers)
        return {one.base for one in present if one is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types only; ``applied`` leaves out what is pooled: it will be computed again."""
        return {
            "version": self.version,
            "epoch": self.epoch,
            "tick": self.global_step,
            "applied": self._books.applied(),
            "used": self._books.used(),
            "substeps": self.ledger.substeps(),
            "step_s": self._step_s,
            "speeds": self.speeds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over version and speeds; `begin` with the state's ``applied`` and ``global step`` resumes its epoch."""
        self.version = int(state["version"])
        self._resumed = {int(state.get("epoch", -1)): state.get("substeps", {})}
        self._step_s = float(state["step_s"])
        self.speeds.load_state_dict(state["speeds"])

    # --- bookkeeping ------------------------------------------------------------------------------------------

    def _free(self, worker: WorkerState, reason: str) -> list[Effect]:
        """Makes a valid assignment void, its samples free unless issued a second time."""
        one = worker.valid
        if one is None:
            return []
        one.void = "stale" if reason == "stale" else "gone"
        if one.part_from_twin():
            return []
        self.ledger.release(one.spans)
        return [Reissued(rank=worker.rank, assignment=one.number, samples=one.samples, reason=reason)]

    def _update(self, now: float) -> list[Effect]:
        """Asks the policy whether the pool becomes an update, and makes it one."""
        if self._books.over:
            return []
        pool = self._books.pool(len(self.live))
        verdict = self.policy.update(pool)
        if verdict is None:
            return []
        check_update(verdict, pool, type(self.policy).__name__)
        self.version += 1
        contributions = self._books.empty()
        if verdict.ends_step:
            if self.global_step > self._books.opening:  # an epoch's first one does not begin with the end of another
                took_s, known_s = now - self._books.began_s, self._step_s
                # Clipped: a validation in between is no step.
                self._step_s = known_s + _STEP_WEIGHT * (min(took_s, 2.0 * known_s) - known_s) if known_s else took_s
            self._books.advance(now)
            self.workers.begin_step()
        updated = Updated(
            version=self.version, global_step=self.global_step, samples=pool.samples, contributions=contributions,
            worth=verdict.worth, ends_step=verdict.ends_step,
        )  # fmt: skip
        effects: list[Effect] = [updated]
        for worker in self.workers:
            if worker.valid is not None and not self.within_bound(worker.valid.base):
                effects += self._free(worker, "stale")
        return effects
