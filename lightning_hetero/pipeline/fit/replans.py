"""Other plans while a run trains: measured, decided on rank 0, told to all, carried out between two batches (layer L).

    end of batch t    what all ranks took, in the message that is sent anyway [training]
                      a rank's time has jumped [decide.replanning]: rank 0's controller decides, and says so to all
                      else it decides when it waits in batch t+1, and the next message tells that there is something
    next batch drawn  all: from when on can it hold [decide.replanning]
                      it holds from here on: layers move [place, runtime.ownership.migration], schedules are others
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import planned_batches
from lightning_hetero.controller.controller import Controller
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.controller.replans import Replan, ReplanLog
from lightning_hetero.data.batches import Part
from lightning_hetero.pipeline.decide.plans import check_plan, in_one_piece
from lightning_hetero.pipeline.decide.replanning import BatchReport, Jumps, Position, changeover, reporting_group
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.fit.planning import tied_spans
from lightning_hetero.pipeline.runtime.ownership.migration import CancelledError
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.transport.objects import gathered
from lightning_hetero.types import PipelinePlan


class RankZero:
    """Asks the controller, on rank 0; elsewhere, and without a controller, there is never anything to say.

    Args:
        place: of this rank.
        controller: is started from the plan in force when the first batch has been trained; None: the first plan stays.
        state: of the controller of the run that this one resumes; empty: there was none, or this rank does not know.
        whole: the layers are one, and batches need not be cut where that is spared.

    Attributes:
        controller: as given, until the first plan has to stay.
        unsaid: decisions that the other ranks do not know yet.
    """

    def __init__(
        self, place: RankInPlan, *, controller: LyapunovController | None, state: Mapping[str, Any], whole: bool
    ) -> None:
        self._place, self.controller, self._whole = place, controller, whole
        self.begin_again(state)

    def begin_again(self, state: Mapping[str, Any] | None = None) -> None:
        """What decides is made afresh with the next batch."""
        self._state = state or {}
        self._decider: Controller | None = None
        self._asked = False  # for one
        self._put_off: Callable[[], None] | None = None  # a decision on the last batch
        self.unsaid: list[Decision] = []

    def decide(self, part: Part, observe: Callable[[], Observation]) -> None:
        """A batch has been trained: its decision is put off until `catch_up`; the one before is due."""
        if self._place.run.channel.rank != 0 or self.controller is None:
            return
        self.catch_up()
        if not self._asked:
            self._decider, self._asked = self._started(self.controller), True
        if self._decider is not None:
            self._put_off = partial(self._decide, self._decider, observe(), part)

    def _started(self, controller: LyapunovController) -> Controller | None:
        place, planned, settings = self._place, self._place.planned, self._place.run.settings.planning
        try:
            started = controller.start(
                place.costs, planned.cluster, planned.plan, spans=tied_spans(place.run.module, place.run.backbone),
                micro_batch_size=settings.micro_batch_size, max_groups=settings.max_groups, depth=settings.depth,
                planned_batches=planned_batches(place.run.trainer),
            )  # fmt: skip
        except ValueError as error:
            if settings.watched:
                raise
            rank_zero_warn(f"the first plan stays, because no controller can go on from it: {error}")
            return None
        if self._state:
            with suppress(ValueError):  # of another number of ranks, or another global batch
                started.load_state_dict({**self._state, "plan": plan_to_plain(planned.plan)})
        return started

    def catch_up(self) -> None:
        """Decides on the last batch, if that has been put off: for when this rank would wait for others anyway."""
        put_off, self._put_off = self._put_off, None
        if put_off is not None:
            put_off()

    def _decide(self, decider: Controller, observation: Observation, part: Part) -> None:
        decision = decider.step(observation)
        if decision.queues:
            self._place.run.events.note("queue", part.epoch, part.step, {"queues": dict(decision.queues)})
        if decision.kind != "keep" or decision.outcome is not None:
            plan, planned = decision.plan, self._place.planned
            if self._whole and planned.model is not None:
                plan = in_one_piece(plan, planned.model, planned.cluster)
            self.unsaid.append(replace(decision, plan=plan))

    def withdraw(self, generation: int) -> None:
        """The change of plan to this generation was given up."""
        if self._decider is not None:
            self._decider.withdraw(generation)

    def state_dict(self) -> dict[str, Any]:
        """Returns what has been learned, on rank 0 only; empty before the first batch."""
        self.catch_up()
        return {} if self._decider is None else self._decider.state_dict()


class Replans:
    """Asks for another plan after each batch, and carries out what comes; on every rank of a fit.

    Args:
        place: of this rank.
        rank_zero: asks the controller.
        records: of this run; appended to.

    Attributes:
        rank_zero: as given.
        generation: of the plan in force.
        paused_s: how long this rank stood still before the batch that runs [s].
    """

    def __init__(self, place: RankInPlan, *, rank_zero: RankZero, records: list[Replan]) -> None:
        self._place, self._run, self._binder = place, place.run, place.run.binder
        self.rank_zero = rank_zero
        self._log = ReplanLog(records)
        self._jumps = Jumps()
        self._is_told = False  # rank 0 says before the next batch what it has decided
        self._due: list[tuple[Position, Decision]] = []  # with the batch before which layers move
        self.paused_s = 0.0
        self._at = (-1, -1)  # the batch that began last
        self.generation = 0

    # ---- what is measured, and what is decided by it -----------------------------------------------------------

    def hold(self) -> None:
        """The first plan stays; called by all ranks with the same batch."""
        if self.rank_zero.controller is not None:
            self.rank_zero.controller = None
            rank_zero_warn(
                "training_step changes a number that it keeps on the module, which is right as long as it runs once per"
                " batch on every rank: so the first plan stays. Change it in on_train_batch_start or on_train_batch_end"
                " to let hetero_pipeline replan"
            )

    def observe(self, batch: int, part: Part, told: BatchReport, pause_s: float, *, news: bool) -> None:
        """A batch has been trained: rank 0 decides, now or by `catch_up`; the others hear of it before the next one.

        Args:
            batch: its number in the run.
            part: of this rank; shares are those of all.
            told: by all ranks, the same on all.
            pause_s: for a change of plan before it, the mean of the ranks.
            news: rank 0 has told with the batch that it has decided something before.
        """
        rank_zero = self.rank_zero
        if rank_zero.controller is None:
            return
        if self.paused_s:
            self._log.amend(self.generation, pause_s=pause_s)
        self.paused_s = 0.0
        batch_s = max(compute_s + wait_s for _, compute_s, wait_s in told.work)
        self._note_outcome(part, self._log.batch(self.generation, batch_s))
        groups = self._place.planned.plan.groups

        def observation() -> Observation:
            return Observation(
                batch=batch, generation=self.generation, batch_s=batch_s,
                work_s={rank: compute_s for rank, (samples, compute_s, _) in enumerate(told.work) if samples},
                layer_s=told.layer_s(groups[reporting_group(batch, groups)]), links=told.links,
                rest_s=told.rest_s, micro_batches=self._binder.all_micro_batches(part), pause_s=pause_s,
            )  # fmt: skip

        rank_zero.decide(part, observation)
        jumped = self._jumps.add(self.generation, [(samples, work_s) for samples, work_s, _ in told.work], told.rest_s)
        if jumped or news:  # the same on all ranks
            rank_zero.catch_up()
            self._is_told = True

    # ---- what has been decided, and from when on it holds --------------------------------------------------------

    def begin(self, part: Part, *, gradients: bool) -> None:
        """The next batch is about to be trained; collective if something was decided, and when layers move.

        Args:
            part: this rank's part of it.
            gradients: whether present gradients matter, because the user may keep them.
        """
        heard, now, before = self._heard(), (part.epoch, part.step), self._at
        self._at = now
        if now <= before or self._total(self._binder.plan) != self._total(self._place.planned.plan):
            heard = []  # of another fit within this one, e.g. a learning-rate finder's; or for batches of another size
            self._begin_again()
        for decision in heard:
            if decision.outcome is not None:
                self._note_outcome(part, self._log.settle(decision.outcome))
            if decision.kind != "keep":
                self._schedule(part, decision)
        while self._due and self._due[0][0] <= now:
            _, decision = self._due.pop(0)
            self._change(part, decision, gradients)

    @staticmethod
    def _total(plan: PipelinePlan) -> int:
        return sum(group.samples for group in plan.groups)

    def _begin_again(self) -> None:
        """What decides is made afresh with the next batch, and goes on from the plan in force; on all ranks."""
        self._place.follow(replace(self._place.planned, plan=self._binder.plan))
        self.rank_zero.begin_again()
        self._due, self._log, self.generation = [], ReplanLog(self._log.records), 0

    def _heard(self) -> list[Decision]:
        if not self._is_told:
            return []
        self._is_told, (said, self.rank_zero.unsaid) = False, (self.rank_zero.unsaid, [])
        return gathered(said, self._run.channel.group, self._run.failures.wait)[0]

    def _schedule(self, part: Part, decision: Decision) -> None:
        """Finds out from when on a plan can hold; what is drawn from then on is drawn for it."""
        place, plan = self._place, decision.plan
        layers = place.planned.plan.groups[0].cuts[-1]
        full = self._total(place.planned.plan)
        check_plan(plan, layers=layers, ranks=self._run.channel.world_size, global_batch=full)
        try:
            place.check_move(plan)
        except CancelledError as error:
            return self._note(part, decision, cancelled=str(error))
        now, lag = (part.epoch, part.step), self._binder.lag
        layers_at, shares_at = changeover(
            now, lag=lag, window=self._run.trainer.accumulate_grad_batches,
            drawn_for=self._binder.leaders_drawn_for(now, (part.epoch, part.step + lag + 1)),
            leaders={group.ranks[0] for group in plan.groups}, moves=decision.kind != "shares",
        )  # fmt: skip
        self._binder.draw_for(plan, shares_at)
        self._due.append((layers_at, decision))

    def _change(self, part: Part, decision: Decision, gradients: bool) -> None:
        before, started_s = self._place.planned, time.perf_counter()
        step = compat.batches_of_all_epochs(self._run.trainer)
        ticket = {
            "generation": [self.generation, decision.generation],
            "batch": [part.epoch, part.step, step],
            "plan": repr(decision.plan),
        }
        try:
            sent_bytes = self._place.apply(replace(before, plan=decision.plan), ticket, gradients=gradients)
        except CancelledError as error:
            self._stay(part, before.plan, error)
            became: dict[str, Any] = {"cancelled": str(error)}
        else:
            self._binder.plan = decision.plan
            self.generation = decision.generation
            self._log.in_force()
            became = {"bytes": sent_bytes}
        self.paused_s += time.perf_counter() - started_s
        self._note(part, decision, **became)

    def _note(self, part: Part, decision: Decision, **became: Any) -> None:
        """Records what became of a decision; the controller hears of one that is given up."""
        if "cancelled" in became:
            self.rank_zero.withdraw(decision.generation)
        step = compat.batches_of_all_epochs(self._run.trainer)
        note = replace(Replan.of(decision, step), pause_s=self.paused_s, **became)
        self._log.records.append(note)
        if self._run.channel.rank == 0:
            data = asdict(note)
            del data["step"], data["realised_gain"]
            data |= {"predicted_s": decision.predicted_s, "plan": plan_to_plain(decision.plan)}
            data |= {"cost_gain": dict(decision.cost_gain), "queues": dict(decision.queues)}
            self._run.events.note("decision", part.epoch, part.step, data)

    def _stay(self, part: Part, plan: PipelinePlan, error: CancelledError) -> None:
        """Goes on with the plan in force, if what has been read for the other one can be computed under it.

        Raises:
            RuntimeError: it cannot.
        """
        drawn, free = (part.epoch, part.step), (part.epoch, part.step + self._binder.lag + 1)
        if lost := self._binder.leaders_drawn_for(drawn, free) - {group.ranks[0] for group in plan.groups}:
            raise RuntimeError(
                f"ranks {sorted(lost)} have read samples to lead a group, but the change of plan had to be given up:"
                f" {error}. Resume from the last checkpoint, or pass controller=None"
            ) from error
        self._binder.draw_for(plan, free)

    def _note_outcome(self, part: Part, found: Mapping[str, Any]) -> None:
        if found and self._run.channel.rank == 0:
            self._run.events.note("outcome", part.epoch, part.step, found)

    def metrics(self) -> dict[str, float]:
        """Returns what has become of changes so far, the same on all ranks; nothing without a controller."""
        return {} if self.rank_zero.controller is None else self._log.metrics()
