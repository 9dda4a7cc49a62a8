"""A rank's place in the plan: what it holds, what runs it, and whom it shares gradients with (layer L).

    plan ──► ownership ──► prune: others' layers leave this rank's memory
                       ├─► stage runner: this rank's layers at work      [runtime.execute]
                       ├─► gradient sums, buffers, whole states          [runtime.ownership]
                       └─► logs, evaluation                              [fit]

    another plan ──► migration: what this rank holds from now on, from those that hold it [runtime.ownership]
                     or, if only the shares are others: the times that schedules are made from
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.timer import RestProbe
from lightning_hetero.pipeline.decide.costs import times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate
from lightning_hetero.pipeline.decide.plans import parts_of, unit_costs
from lightning_hetero.pipeline.decide.schedule import Schedule
from lightning_hetero.pipeline.fit.evaluation import EvaluationBatches
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.fit.planning import PlanResult
from lightning_hetero.pipeline.fit.refusals import changed_late, refuse_change, refuse_kept
from lightning_hetero.pipeline.fit.wires import Emulation, RunOnRank, Wires
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime, EmulatedPace
from lightning_hetero.pipeline.runtime.execute.stage_runner import RunnerSettings, ScheduleOf, StageRunner
from lightning_hetero.pipeline.runtime.ownership.changes import Known, divide_anew
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.migration import CancelledError, Migration, refuse_copies
from lightning_hetero.pipeline.runtime.ownership.owner_groups import share_buffers, share_initial, together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.ownership.pruning import movable, prune, restore, to_device
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here
from lightning_hetero.pipeline.runtime.step.backbone import find_backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.transport.one_round import start_sum
from lightning_hetero.types import GroupPlan, ModelCost, PipelinePlan

_LEAST_BYTES = 128 * 2**10  # of gradients: take 1 ms at 1 Gbit/s, as does a message between ranks that are busy


class Holdings:
    """What follows from which rank holds which layers; the constructor is collective.

    Attributes:
        ownership: which rank holds what.
        whole: collects and divides state dicts.
        sync: sums gradients.
        own: the parameters that this rank holds.
        known: what the module consists of.
        in_between: no batch has been trained since the module was looked at, see `RankInPlan.look`.
    """

    in_between = True

    def __init__(self, run: RunOnRank, ownership: Ownership, wires: Wires, former: Sequence[Tensor] = ()) -> None:
        module, failures = run.module, run.failures
        self.ownership = ownership
        self.whole = WholeState(module, ownership, group=run.channel.group)
        wait = partial(failures.wait, polled=device_of(run.settings.device).asynchronous)
        self.sync = GradientSync(module, ownership, groups=wires.owners, least_bytes=_LEAST_BYTES, wait=wait)
        self.own = [p for p in module.parameters() if not p.is_meta]
        self.known = Known(module, run.backbone, former)


class RankInPlan:
    """Takes this rank's place in a plan; the constructor is collective.

    Args:
        run: of this rank.
        planned: the plan, and what it was made from.

    Attributes:
        run: as given.
        planned: the plan in force, and what it was made from.
        held: what follows from which rank holds what under it.
        group: of this rank; None for an idle rank.
        elsewhere: the ids of the modules in layers that other ranks run for a group that this one leads.
        runner: this rank's stage, or the whole step; None for an idle rank.
        predicted_s: per rank, what its own work for a full batch should take by the plan's costs [s]; NaN if unknown.
        here: what runs on this rank, for what stands for tensors that others hold.
        copies: of the module that callbacks keep to average weights, divided as the module is: they make them before
            training, when it is whole, and from then on go through both parameter by parameter.
        logs: what steps log.
        emulation: what is put around all this where devices or links are emulated.
        busy: this rank's own work.
        evaluation: runs validation, test and prediction steps.
    """

    predicted_s: tuple[float, ...]
    elsewhere: set[int]

    def __init__(self, run: RunOnRank, planned: PlanResult) -> None:
        self.run, self.planned = run, planned
        module, channel, device = run.module, run.channel, run.settings.device
        ownership = run.ownership_under(planned.plan)
        share_initial(module, ownership, channel.group)
        self.here = Here(channel.rank, partial(compat.running_hook, run.trainer))
        prune(module, run.optimizers, ownership, self.here, device=device)
        self.copies = [copy for _, copy in compat.averaging_callbacks(run.trainer)]
        self._undo = ExitStack()
        for copy in self.copies:
            share_initial(copy, ownership, channel.group)
            prune(copy, (), ownership, self.here)
            self._undo.enter_context(movable(copy))  # a callback moves its copy when averaging begins
        to_device(module, run.optimizers, device)
        self._wires = Wires(run, planned.plan)
        self.logs = StepLogs(module, channel, wait=run.failures.wait)
        self.emulation = Emulation(run)
        self.busy = BusyTime(device)
        if run.scenario is not None:
            self.busy = EmulatedPace(device, run.scenario, channel.rank, step_of=run.scenario_step)
        self._rest_probe: RestProbe | None = None
        self.group: GroupPlan | None = None
        self.runner: StageRunner | None = None
        self.evaluation = EvaluationBatches(run, self.logs)
        self.held = Holdings(run, ownership, self._wires)
        self.follow(planned)
        if run.trainer.predicting:
            self.evaluation.expect()

    @property
    def group_index(self) -> int | None:
        """Number of this rank's group in the plan; None for an idle rank."""
        return None if self.group is None else self.planned.plan.groups.index(self.group)

    @property
    def costs(self) -> ModelCost:
        """What layers cost; all equal where nothing was measured."""
        return self.planned.model or unit_costs(self.run.backbone.names)

    @property
    def leads(self) -> bool:
        """Whether this rank runs the training step of its group."""
        return self.group is not None and self.group.ranks[0] == self.run.channel.rank

    # ---- what the user's code changes of the module ----------------------------------------------------------------

    def look(self) -> bool:
        """Looks whether the module has been changed, and divides it again if it has been; collective.

        Hooks before the first batch may have changed it, or hooks between two epochs. What hooks between two batches
        change of layers and parameters is found too late: nobody knows when that was.

        Returns:
            Whether layers or parameters are others.

        Raises:
            RuntimeError: on all ranks, with the names, why it cannot be divided again, and the ways out.
        """
        run, held, in_between = self.run, self.held, self.held.in_between
        change, group, wait = held.known.change(run.module), run.channel.group, run.failures.wait
        own, held.in_between = {*map(id, run.module.parameters()), *held.known.ids}, True
        strangers = [parameter for parameter in self._optimized() if id(parameter) not in own]
        some = start_sum(torch.tensor([float(bool(change.names or strangers))]), group)
        wait(some.work)
        if not some.result().item():
            return False
        with changed_late(run.channel.rank):
            with together(group, wait=wait):
                refuse_change(change, strangers, in_between=in_between, copies=bool(self.copies))
                found = find_backbone(run.module, run.settings.backbone) if change.layers else run.backbone
                if (number := len(found.layers)) != len(run.backbone.layers):
                    raise ValueError(f"{number} layers, and the plan was made for {len(run.backbone.layers)}")
                run.backbone = found
            under = partial(run.ownership_under, self.planned.plan)
            ownership = divide_anew(
                run.module, run.optimizers, held.known, under, self.here,
                device=run.settings.device, group=group, wait=wait,
            )  # fmt: skip
        held.sync.close()
        self._wires.prepare(self.planned.plan)
        self.held = Holdings(run, ownership, self._wires, self._optimized())
        self.group = None  # the runner is made anew, too
        self.follow(self.planned)
        return change.trained

    def refuse_changed(self) -> None:
        """Checks, when an evaluation begins or layers are to move, that these are the layers that were divided.

        Raises:
            RuntimeError: they are not, with the names and the ways out.
        """
        with changed_late(self.run.channel.rank):
            refuse_change(self.held.known.change(self.run.module), in_between=False)

    def _optimized(self) -> list[Tensor]:
        return [p for optimizer in self.run.optimizers for group in optimizer.param_groups for p in group["params"]]

    # ---- what a plan gives this rank -------------------------------------------------------------------------------

    def apply(self, planned: PlanResult, ticket: object, *, gradients: bool = False) -> int:
        """Goes over to another plan, between two training batches; collective.

        If only shares differ, nothing is sent and no rank is waited for.

        Args:
            planned: the same on all ranks, for the same model and devices.
            ticket: where the run stands, see `Migration.stage`.
            gradients: whether present gradients matter.

        Returns:
            What all ranks together have sent [bytes].

        Raises:
            CancelledError: on all ranks, if one could not do its part; the plan before is in force still.
            RuntimeError: another rank is lost, or has failed; a checkpoint from before is valid still.
        """
        if _structure(planned.plan) == _structure(self.planned.plan):
            self.follow(planned)
            return 0
        self.refuse_changed()
        new = self.run.ownership_under(planned.plan)
        self._wires.prepare(planned.plan)
        migration = Migration(
            self.run.module, self.run.optimizers, self.held.ownership, new, copies=self.copies,
            gradients=gradients, device=self.run.settings.device, group=self.run.channel.group,
            wait=self.run.failures.wait, wait_for_peer=self.run.failures.wait_for_peer, here=self.here,
        )  # fmt: skip
        self.emulation.moves(migration, planned.cluster)(ticket)
        migration.commit()
        self.held = Holdings(self.run, new, self._wires, self._optimized())
        self.follow(planned)
        return migration.size_bytes

    def check_move(self, plan: PipelinePlan) -> None:
        """Finds out, before samples are read for other leaders, whether layers can move to a plan; collective.

        Raises:
            CancelledError: on all ranks, if the layers of one of them have to stay where they are.
        """
        if _structure(plan) != _structure(self.planned.plan):
            with together(self.run.channel.group, wait=self.run.failures.wait, error=CancelledError):
                refuse_copies(self.run.module, self.run.optimizers, self.held.ownership, self.here)

    def follow(self, planned: PlanResult) -> None:
        """What follows from a plan besides; without a division for one of the same structure, between two batches."""
        plan, rank, before = planned.plan, self.run.channel.rank, self.group
        called_before, self.planned = self.planned.calls, planned
        self.group = group = next((group for group in plan.groups if rank in group.ranks), None)
        others = self.run.backbone.layers[group.cuts[1] :] if group is not None and group.ranks[0] == rank else []
        self.elsewhere = {id(part) for layer in others for part in layer.modules()}
        self.emulation.cluster = planned.cluster
        if isinstance(self.busy, EmulatedPace):
            self.busy.parts = {} if group is None else parts_of(self.costs, group, rank, planned.calls)
        same = group is not None and before is not None and (group.ranks, group.cuts) == (before.ranks, before.cuts)
        same &= planned.calls == called_before
        if same and self.runner is not None:
            assert group is not None
            self.runner.follow(self._schedule_of(group))
        elif not same:
            if self.runner is not None:
                self.runner.close()
            self.runner = None if group is None else self._runner_of(group)
        self.predicted_s = work_s(plan, planned.model, planned.cluster, ranks=self.run.channel.world_size)
        self.evaluation.settle(plan, self.runner)
        self._hide_example()

    def _hide_example(self) -> None:
        """A forward pass of the whole module, as summaries and graphs make with this, has no layers to run on."""
        module = self.run.module
        example = getattr(module, "example_input_array", None)
        if example is not None and any(len(group.ranks) > 1 for group in self.planned.plan.groups):
            module.example_input_array = None
            self._undo.callback(setattr, module, "example_input_array", example)

    def _schedule_of(self, group: GroupPlan) -> ScheduleOf:
        costs, cluster, calls = self.costs, self.planned.cluster, self.planned.calls

        def schedule(samples: tuple[int, ...]) -> Schedule:
            part = replace(group, samples=sum(samples), micro_batches=samples)
            return generate(times_of(costs, cluster, part, calls), SchedulePolicy(depths=group.depths * calls))

        return schedule

    def _runner_of(self, group: GroupPlan) -> StageRunner:
        run, settings = self.run, self.run.settings
        for_all_plans = RunnerSettings(
            rank=run.channel.rank, device=settings.device, seed=settings.seed, failures=run.failures,
            wire=self._wires.gloo, ways=self._wires.direct.by_peer, clock=self.emulation.clock,
            timeout_s=settings.timeout_s, pace=self.busy,
            checkpoint_layers=settings.planning.checkpoint_layers,
            time_layers=run.watched and run.scenario is None,
        )  # fmt: skip
        return StageRunner(
            for_all_plans, run.backbone.layers, group=group,
            cut=run.backbone.cut() if self.leads and not isinstance(run.backbone, Undivided) else None,
            schedule=self._schedule_of(group), calls=self.planned.calls,
        )  # fmt: skip

    def measured(self) -> tuple[list[LinkTime], list[float]]:
        """Returns what was timed since it was last asked: messages to this rank, and its layers [s]; or nothing.

        Emulated devices are not timed; their links are, where those are emulated, too.
        """
        if self.runner is None:
            return [], []
        links, layer_s = self.runner.measured()
        return links if self.run.scenario is None or self.run.settings.emulate_links else [], layer_s

    def rest_s(self, step: int) -> float:
        """Returns what a computation that is always the same takes, if this rank rests and is watched; else 0 [s].

        Args:
            step: batches trained so far; of an emulated device it determines how fast that is.
        """
        if self.group is not None or not self.run.watched:
            return 0.0
        scenario, stretch = self.run.scenario, 1.0
        if scenario is not None:
            stretch = scenario.stretch(self.run.channel.rank, self.run.scenario_step(step))
            if scenario.emulated:
                return stretch
        if self._rest_probe is None:
            self._rest_probe = RestProbe(self.run.settings.device)
        return self._rest_probe.seconds() * stretch

    def time_layers(self, now: bool) -> None:
        """Whether this rank's layers are timed one by one from here on."""
        if self.runner is not None:
            self.runner.time_layers(now)

    def refuse_kept(self) -> None:
        """Checks what layers keep of the first batch, where they are divided or may be; see there."""
        if self.run.watched or any(len(group.ranks) > 1 for group in self.planned.plan.groups):
            refuse_kept(self.run.backbone)

    def share_buffers(self) -> None:
        """Before an evaluation: statistics such as BatchNorm's are those of the first group, as rank 0's under DDP."""
        share_buffers(self.run.module, self.held.ownership, self._wires.owners)

    def close(self) -> None:
        """Makes the module whole again on every rank, on the CPU; after a failure, does only what needs no peer."""
        self.logs.close()
        self.held.sync.close()
        self._undo.close()
        try:
            if not self.run.failures.reported:
                self.evaluation.finish()
            if self.runner is not None:
                self.runner.close()
            if not self.run.failures.reported:
                with suppress(RuntimeError):  # what cannot be divided anew is named below; a rank that is lost, there
                    self.look()
                to_device(self.run.module, self.run.optimizers, torch.device("cpu"))
                lost = restore(self.run.module, self.run.optimizers, self.held.ownership, self.run.channel.group)
                for copy in self.copies:
                    lost += restore(copy, (), self.held.ownership, self.run.channel.group)
                if lost:
                    rank_zero_warn(
                        "the module has been changed since its layers were divided last. Each rank has its own"
                        f" {', '.join(sorted(set(lost)))}; the rest is whole on all ranks"
                    )
        except Exception as error:
            if not self.run.failures.reported:  # else there is a cause already, which this would hide
                self.run.failures.report(error)
                raise
        finally:
            self._wires.close(failed=self.run.failures.reported)
            if not self.run.failures.reported:
                del self.copies, self.held  # Trainer's loaders still hold this place


def _structure(plan: PipelinePlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Who holds which layers."""
    return [(group.ranks, group.cuts) for group in plan.groups]
