"""A rank's place in the plan: what it holds, what runs it, and whom it shares gradients with (layer L).

    plan ──► ownership ──► prune: others' layers leave this rank's memory
                       ├─► stage runner: this rank's layers at work      [runtime.execute]
                       ├─► gradient sums, buffers, whole states          [runtime.ownership]
                       └─► logs, averaged weights, evaluation            [fit]

    another plan ──► migration: what this rank holds from now on, from those that hold it [runtime.ownership]
                     or, if only the shares are others: the times that schedules are made from
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import gloo_group
from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.rest_probe import RestProbe
from lightning_hetero.pipeline.decide.costs import called, times_of, work_s
from lightning_hetero.pipeline.decide.direct_links import direct_pairs
from lightning_hetero.pipeline.decide.generate import SchedulePolicy
from lightning_hetero.pipeline.decide.plans import unit_costs
from lightning_hetero.pipeline.decide.schedule import PipelineTimes
from lightning_hetero.pipeline.fit.averaged_weights import Averages
from lightning_hetero.pipeline.fit.emulation import Emulation
from lightning_hetero.pipeline.fit.evaluation import EvaluationBatches
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.fit.plan.planning import PipelineSettings, PlanResult
from lightning_hetero.pipeline.fit.refusals import refuse_kept
from lightning_hetero.pipeline.runtime.execute.busy_time import BusyTime
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays, rank_device
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stage_runner import RunnerSettings, StageRunner, TimesOf
from lightning_hetero.pipeline.runtime.execute.whole_step import WholeStep
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.migration import Migration
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups, share_buffers, share_initial
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.ownership.pruning import prune, restore, to_device
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import GroupPlan, PipelinePlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Place"]

_LEAST_BYTES = 128 * 2**10  # of gradients: take 1 ms at 1 Gbit/s, as does a message between ranks that are busy


class Place:
    """Takes this rank's place in a plan; the constructor is collective.

    Args:
        trainer: the running trainer; its module is whole.
        planned: the plan, and what it was made from.
        backbone: the module's layers.
        optimizers: over all parameters; none, if nothing is trained.
        settings: of the run.
        channel: over all ranks.
        failures: of the run.
        scenario: that stages sleep for, where training is emulated.
        watched: somebody decides on other plans, by what is measured.
        scenario_step: returns the scenario's step from the number of batches trained so far.

    Attributes:
        module: of which this rank has a part.
        backbone: its layers, as given.
        planned: the plan in force, and what it was made from.
        settings, channel, failures, watched: as given.
        group_index: of this rank's group in the plan; None for a rank at rest.
        leads: whether this rank runs the training step of its group.
        ownership: who holds what.
        here: what runs on this rank, for what stands for tensors that others hold.
        whole: collects and divides state dicts.
        averages: averaged weights, divided as the module is.
        owner_groups: the process groups of those that hold the same.
        ways: to neighbours, from device to device.
        sync: sums gradients over them.
        finish_sums: see `GradientSync.finish`.
        emulation: what is put around all this where devices or links are emulated.
        logs: what steps log.
        busy: this rank's own work.
        runner: this rank's stage, or the whole step; None for a rank at rest.
        evaluation: runs validation, test and prediction steps.
        predicted_s: per rank, what its own work for a full batch should take by the plan's costs [s]; NaN if unknown.
        own: the parameters that this rank holds.
    """

    whole: WholeState
    sync: GradientSync
    finish_sums: Callable[[], None]
    evaluation: EvaluationBatches
    predicted_s: tuple[float, ...]
    own: list[nn.Parameter]

    def __init__(
        self,
        trainer: Trainer,
        planned: PlanResult,
        backbone: Backbone,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        settings: PipelineSettings,
        channel: SideChannel,
        failures: FailureBoard,
        scenario: Scenario | None,
        watched: bool,
        scenario_step: Callable[[int], int] = int,
    ) -> None:
        module, world = trainer.lightning_module, channel.group
        self.module, self._optimizers, self.backbone = module, optimizers, backbone
        self.emulation = Emulation(
            scenario, scenario_step, links=settings.emulate_links, rank=channel.rank, failures=failures
        )
        self.planned, self.settings, self.channel, self.failures = planned, settings, channel, failures
        self.watched = watched
        self.ownership = self._ownership_under(planned.plan)
        share_initial(module, self.ownership, world)
        self.here = Here(channel.rank, partial(compat.running_hook, trainer))
        prune(module, optimizers, self.ownership, self.here, device=settings.device)
        self.averages = Averages(trainer, self.ownership, world, self.here)
        self.averages.divide()
        to_device(module, optimizers, settings.device)
        self._devices = channel.all_gather_object(rank_device(settings.device, settings.process_group_backend))
        self._wire: dist.ProcessGroup | None = None
        self.ways = DirectWays(
            self._pairs(planned.plan),
            rank=channel.rank,
            backend=self._devices[channel.rank].backend,
            timeout=settings.timeout,
            device=settings.device,
        )
        self.owner_groups = OwnerGroups(world, backend=settings.process_group_backend, timeout=settings.timeout)
        self.logs = StepLogs(module, channel, wait=failures.wait)
        self.busy = self.emulation.paced(BusyTime(settings.device))
        self._rest_probe: RestProbe | None = None
        self.group: GroupPlan | None = None
        self.runner: StageRunner | WholeStep | None = None
        self.evaluation = EvaluationBatches(
            module, channel=channel, failures=failures, logs=self.logs, device=settings.device
        )
        self._connect(planned.plan)
        self._hold()
        self.follow(planned)
        if trainer.predicting:
            self.evaluation.expect()

    def elsewhere(self) -> list[tuple[str, nn.Module]]:
        """Returns the layers that other ranks of the group run which this one leads, by their names."""
        assert self.group is not None
        layers = list(zip(self.backbone.names, self.backbone.layers, strict=True))
        return layers[self.group.cuts[1] :] if len(self.group.ranks) > 1 else []

    # ---- what a plan gives this rank -------------------------------------------------------------------------------

    def apply(self, planned: PlanResult, ticket: object, *, gradients: bool = False) -> int:
        """Goes over to another plan, between two training batches; collective.

        If only shares differ, nothing is sent and nobody is waited for.

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
        new = self._ownership_under(planned.plan)
        self.owner_groups.prepare(new.holders(name) for name in (*new.parameters, *new.buffers))
        self.ways.prepare(self._pairs(planned.plan))
        self._connect(planned.plan)
        migration = Migration(
            self.module,
            self._optimizers,
            self.ownership,
            new,
            copies=self.averages.copies,
            gradients=gradients,
            device=self.settings.device,
            group=self.channel.group,
            wait=self.failures.wait,
            wait_for_peer=self.failures.wait_for_peer,
            here=self.here,
        )
        self.emulation.moves(migration, planned.cluster)(ticket)
        migration.commit()
        self.ownership = self.averages.ownership = new
        self._hold()
        self.follow(planned)
        return migration.size_bytes

    def _ownership_under(self, plan: PipelinePlan) -> Ownership:
        return Ownership(self.module, self.backbone.layers, plan, rank=self.channel.rank)

    def _pairs(self, plan: PipelinePlan) -> list[tuple[int, int]]:
        """Between which ranks of a plan there are direct ways."""
        return direct_pairs(self._devices, [group.ranks for group in plan.groups])

    def _connect(self, plan: PipelinePlan) -> None:
        """Makes the group of processes for a plan's links, if it is the first one that has any; collective."""
        if self._wire is None and any(len(group.ranks) > 1 for group in plan.groups):
            self._wire = gloo_group(self.settings.timeout)

    def _hold(self) -> None:
        """What follows from who holds what."""
        self.whole = WholeState(self.module, self.ownership, group=self.channel.group)
        wait = partial(self.failures.wait, polled=device_of(self.settings.device).asynchronous)
        self.sync = GradientSync(
            self.module,
            self.ownership,
            groups=self.owner_groups,
            least_bytes=_LEAST_BYTES,
            wait=wait,
        )
        self.finish_sums = self.emulation.sums(self.sync)
        self.own = [p for p in self.module.parameters() if not p.is_meta]

    def follow(self, planned: PlanResult) -> None:
        """What follows from a plan besides; by itself for one of the same structure, between two batches."""
        plan, rank, before = planned.plan, self.channel.rank, self.group
        called_before, self.planned, self.emulation.cluster = self.planned.calls, planned, planned.cluster
        self.group_index = next((i for i, group in enumerate(plan.groups) if rank in group.ranks), None)
        self.group = group = None if self.group_index is None else plan.groups[self.group_index]
        self.leads = group is not None and group.ranks[0] == rank
        model = planned.model or unit_costs(self.backbone.names)
        self.emulation.follow(self.busy, model, group, planned.calls)
        same = group is not None and before is not None and (group.ranks, group.cuts) == (before.ranks, before.cuts)
        same &= planned.calls == called_before
        if same and isinstance(self.runner, StageRunner):
            assert group is not None
            self.runner.follow(self._times_of(group), self._policy_of(group))
        elif not same:
            if self.runner is not None:
                self.runner.close()
            self.runner = None if group is None else self._runner_of(group)
        self.predicted_s = work_s(plan, planned.model, planned.cluster, ranks=self.channel.world_size)
        self.evaluation.settle(plan, self.runner)

    def _times_of(self, group: GroupPlan) -> TimesOf:
        model, cluster = self.planned.model or unit_costs(self.backbone.names), self.planned.cluster

        def times(samples: tuple[int, ...], calls: int) -> PipelineTimes:
            part = replace(group, samples=sum(samples), micro_batches=samples)
            return called(times_of(model, cluster, part), calls)

        return times

    @staticmethod
    def _policy_of(group: GroupPlan) -> Callable[[PipelineTimes], SchedulePolicy]:
        def policy(times: PipelineTimes) -> SchedulePolicy:
            depths = group.depths * (times.stages // len(group.ranks))
            return SchedulePolicy(depths=depths, priority="HFB")

        return policy

    def _runner_of(self, group: GroupPlan) -> StageRunner | WholeStep:
        settings = self.settings
        if isinstance(self.backbone, Undivided):
            return WholeStep(failures=self.failures, seed=settings.seed, pace=self.busy)
        fixed = RunnerSettings(
            rank=self.channel.rank,
            device=settings.device,
            seed=settings.seed,
            failures=self.failures,
            wire=self._wire,
            ways=self.ways.by_peer,
            clock=self.emulation.clock,
            timeout_s=settings.timeout_s,
            pace=self.busy,
            checkpoint_layers=settings.planning.checkpoint_layers,
            time_layers=self.watched and self.emulation.scenario is None,
        )
        return StageRunner(
            fixed,
            self.backbone.layers,
            group=group,
            cut=self.backbone.cut() if self.leads else None,
            times=self._times_of(group),
            policy=self._policy_of(group),
            calls=self.planned.calls,
        )

    def measured(self) -> tuple[list[LinkTime], list[float]]:
        """Returns what was timed since it was last asked: messages to this rank, and its layers [s]; or nothing.

        Of emulated devices that is what is emulated, links or nothing.
        """
        if not isinstance(self.runner, StageRunner):
            return [], []
        links, layer_s = self.runner.measured()
        return links if self.emulation.scenario is None or self.settings.emulate_links else [], layer_s

    def rest_s(self, step: int) -> float:
        """Returns what a computation that is always the same takes, if this rank rests and is watched; else 0 [s].

        Args:
            step: batches trained so far; of an emulated device it tells how fast that is.
        """
        if self.group is not None or not self.watched:
            return 0.0
        scenario, stretch = self.emulation.scenario, self.emulation.stretch(step)
        if scenario is not None and scenario.emulated:
            return stretch
        if self._rest_probe is None:
            self._rest_probe = RestProbe(self.settings.device)
        return self._rest_probe.seconds() * stretch

    def time_layers(self, now: bool) -> None:
        """Whether this rank's layers are timed one by one from here on."""
        if isinstance(self.runner, StageRunner):
            self.runner.time_layers(now)

    def refuse_kept(self) -> None:
        """Checks what layers keep of the first batch, where they are divided or may be; see there."""
        if self.watched or any(len(group.ranks) > 1 for group in self.planned.plan.groups):
            refuse_kept(self.backbone)

    def share_buffers(self) -> None:
        """Before an evaluation: statistics such as BatchNorm's are those of the first group, as rank 0's under DDP."""
        share_buffers(self.module, self.ownership, self.owner_groups)

    def close(self) -> None:
        """Makes the module whole again on every rank, on the CPU; after a failure, does only what needs no peer."""
        self.logs.close()
        self.sync.close()
        self.averages.release()
        try:
            if not self.failures.reported:
                self.evaluation.finish()
            if self.runner is not None:
                self.runner.close()
            if not self.failures.reported:
                to_device(self.module, self._optimizers, torch.device("cpu"))
                restore(self.module, self._optimizers, self.ownership, self.channel.group)
                self.averages.restore()
        except Exception as error:
            if not self.failures.reported:  # else there is a cause already, which this would hide
                self.failures.report(error)
                raise
        finally:
            self.owner_groups.close(failed=self.failures.reported)
            if not self.failures.reported:
                self.ways.close()
                if self._wire is not None:
                    dist.destroy_process_group(self._wire)
                # A process group ends, with its threads, when nobody holds it; Trainer's loaders still hold this place.
                del self._wire, self.averages, self.whole


def _structure(plan: PipelinePlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Who holds which layers."""
    return [(group.ranks, group.cuts) for group in plan.groups]
