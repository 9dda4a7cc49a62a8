"""State of one run of the pipeline engine: everything that exists only between set-up and teardown (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import gloo_group
from lightning_hetero.callbacks.reporting import RequeueTogether
from lightning_hetero.cluster.spec import cluster_to_plain
from lightning_hetero.controller.replans import Replan
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.pipeline.fit.gradients import WholeNorms
from lightning_hetero.pipeline.fit.leader_step import rank_zero_acts
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.fit.planning import PlanResult
from lightning_hetero.pipeline.fit.rehearsal import agree_layout
from lightning_hetero.pipeline.fit.replans import RankZero, Replans
from lightning_hetero.pipeline.fit.training import TrainBatches
from lightning_hetero.pipeline.fit.wires import PipelineSettings, RunOnRank
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.transport.alone import guard_groups
from lightning_hetero.transport.one_round import start_sum
from lightning_hetero.types import StepReport


class PipelineRun(RunOnRank):
    """One fit, validation, test or prediction on one rank.

    Args:
        trainer, settings: see `RunOnRank`.

    Attributes:
        place: in the plan, once there is one.
        batches: of training, from then on.
        replans: changes of plan, so far.
    """

    def __init__(self, trainer: Trainer, settings: PipelineSettings) -> None:
        super().__init__(trainer, settings)
        self.place: RankInPlan | None = None
        self.batches: TrainBatches | None = None
        self.replans: list[Replan] = []
        self._decided: Mapping[str, Any] = {}  # what decided in the run that this one resumes had learned
        self._requeue: RequeueTogether | None = None
        self.undo.callback(guard_groups())
        if self.fitting:
            self._requeue = RequeueTogether(trainer, self.channel.rank)
            self.undo.callback(self._requeue.close)
            # Rank 0 tells all with each batch whether it has received the signal.
            told = compat.replace_sigterm_broadcast(trainer, lambda _: bool(self.batches and self.batches.sigterm))
            self.undo.callback(told)

    def sizes_differ(self, error: BaseException, *again: Callable[..., Any]) -> bool:
        """Also on ranks that hear of rank 0's rehearsal."""
        return self.batches is None or super().sizes_differ(error, *again)

    # ---- set-up -----------------------------------------------------------------------------------------------

    def install(self, planned: PlanResult, backbone: Backbone, *, to_device: Callable[[Any], Any]) -> RankInPlan:
        """Takes this rank's place in the plan: others' layers leave its memory, links and groups are made.

        Args:
            planned: the same on all ranks.
            backbone: the layers; the module is whole.
            to_device: moves a batch to this rank's device, with all hooks of the user.
        """
        whole = isinstance(backbone, Undivided) and self.settings.planning.micro_batch_size is None
        controller = self.settings.controller if self.fitting else None
        learn = partial(
            agree_layout, module=self.module, channel=self.channel, leader=planned.plan.groups[0].ranks[0],
            device=self.settings.device, to_device=to_device,
            needed=controller is not None or any(len(group.micro_batches) > 1 for group in planned.plan.groups),
        )  # fmt: skip
        known = whole or callable(getattr(self.module, "split_batch", None))
        self.binder.settle(planned.plan, whole=whole, learn=None if known else learn)
        self.backbone, self.watched = backbone, controller is not None
        if not self.fitting:
            self.scenario = None
        self.place = place = RankInPlan(self, planned)
        self.undo.enter_context(rank_zero_acts(self.channel.rank))
        norms = WholeNorms(place)
        self.undo.enter_context(compat.norms_by(norms.total, norms.each))
        if self.channel.rank == 0 and self.fitting:
            model = None if planned.model is None else model_to_plain(planned.model)
            made_from = {"cluster": cluster_to_plain(planned.cluster), "profile": model, "seconds": planned.seconds}
            self.events.note("plan", 0, 0, {"plan": plan_to_plain(planned.plan), **made_from})

        rank_zero = RankZero(place, controller=controller, state=self._decided, whole=whole)
        replans = Replans(place, rank_zero=rank_zero, records=self.replans)
        self.batches = TrainBatches(place, replans, self._requeue)
        if self.fitting:
            self.undo.callback(compat.wrap_training(self.trainer, self.batches.outputs, self.batches.epoch_ended))
        return place

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types; the plan as a hint."""
        plan = plan_to_plain(self.place.planned.plan) if self.place is not None else {}
        learned = self.batches.replans.rank_zero.state_dict() if self.batches is not None else {}
        return {**self.binder.state_dict(), "plan": plan, "controller": learned}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.binder.resume(state)
        self._decided = state.get("controller") or {}

    def whole(self, *, look: bool = False) -> WholeState | None:
        """Returns what collects the model; None if ranks are missing after an exception. Collective, if all come.

        What was under way between them is left: after an exception they meet in a new process group.

        Args:
            look: the user's code may have changed the module; see `RankInPlan.look`.
        """
        assert self.place is not None
        if self.interrupted:
            return self._met
        if look and self.batches is not None:
            self.batches.look()
        return self.place.held.whole

    @cached_property
    def _met(self) -> WholeState | None:
        """What the ranks that meet after an exception save with."""
        if not self.meet_interrupted():
            return None
        assert self.place is not None
        return WholeState(self.module, self.place.held.ownership, group=gloo_group(self.settings.timeout))

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy: a member's, or an idle rank's."""
        return None if self.batches is None or self.batches.part is None else self.batches.part.samples

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each group, at its leader; 0 for members and idle ranks."""
        if self.place is None:
            return ()
        led = {group.ranks[0]: sum(group.micro_batches) for group in self.place.planned.plan.groups}
        return tuple(led.get(rank, 0) for rank in range(self.channel.world_size))

    def step_report(self) -> StepReport | None:
        """Per rank samples, own work and the rest of the last step; ``None`` before the first one."""
        return None if self.batches is None else self.batches.report

    def take_reports(self) -> list[StepReport] | None:
        """Stages differ in what an item costs, so ranks compare only where each is a separate pipeline."""
        groups = () if self.place is None else self.place.planned.plan.groups
        return None if groups and all(len(group.ranks) == 1 for group in groups) else []

    @property
    def meets(self) -> bool:
        """Where each rank is a separate pipeline; a pipeline of several ranks has bubbles."""
        return self.take_reports() is None

    def engine_metrics(self) -> dict[str, float]:
        """Changes of plan so far; nothing without a controller."""
        return {} if self.batches is None else self.batches.replans.metrics()

    def summary(self) -> str | None:
        """One line on what the last step took, against the plan; ``None`` before the first one."""
        report = self.step_report()
        if report is None or self.place is None:
            return None
        plan = self.place.planned.plan
        step_s = max(record.compute_s + record.wait_s for record in report.records)
        busiest = max(report.records, key=lambda record: record.compute_s)
        modelled = f" (modelled: {plan.total_s * 1e3:.1f} ms)" if plan.total_s > 0 else ""
        share = 100.0 * busiest.compute_s / max(step_s, 1e-9)
        return (
            f"hetero_pipeline: {len(plan.groups)} groups, {step_s * 1e3:.1f} ms per batch{modelled}; the"
            f" busiest rank, {busiest.rank}, works {share:.0f} % of it"
        )

    # ---- end --------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether this rank has told the others that it stops."""
        return self.failures.reported

    def finish(self) -> None:
        """Training is over: what was put off is done, and a signal is heard that asks for a requeue and came behind the
        last batch's exchange."""
        if self.batches is not None:
            self.batches.replans.rank_zero.catch_up()
        if self._requeue is None:
            return
        asked = start_sum(torch.tensor([self._requeue.take()], dtype=torch.float64), self.channel.group)
        self.failures.wait(asked.work)
        self._requeue.finish(asked.result().item())

    def close(self) -> None:
        """Ends the run: the module is whole again on every rank, on the CPU; if it failed, only what needs no peer."""
        try:
            self.undo.close()
            if self.place is not None:
                self.place.close()
        finally:
            super().close()
