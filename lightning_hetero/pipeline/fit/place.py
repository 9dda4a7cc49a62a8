"""A rank's place in the plan: what it holds, what runs it, and whom it shares gradients with (layer L).

    plan ──► ownership ──► prune: others' layers leave this rank's memory
                       ├─► stage runner: this rank's layers at work      [runtime.execute]
                       ├─► gradient sums, buffers, whole states          [runtime.own]
                       └─► logs, averaged weights, evaluation            [fit]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.glue.run import gloo_group
from lightning_hetero.pipeline.decide.direct_links import direct_pairs
from lightning_hetero.pipeline.decide.plan_times import called, times_of, work_s
from lightning_hetero.pipeline.decide.plans import unit_costs
from lightning_hetero.pipeline.decide.schedule import PipelineTimes, SchedulePolicy
from lightning_hetero.pipeline.fit.averaged_weights import Averages
from lightning_hetero.pipeline.fit.evaluation import EvaluationBatches
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.fit.plan.planning import PipelineSettings, PlanResult
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays, device_of
from lightning_hetero.pipeline.runtime.execute.emulated_pace import BusyTime, ScenarioPace, parts_of
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stage_runner import StageRunner
from lightning_hetero.pipeline.runtime.execute.whole_step import WholeStep
from lightning_hetero.pipeline.runtime.own.full_state import WholeState
from lightning_hetero.pipeline.runtime.own.gradients import GradientSync
from lightning_hetero.pipeline.runtime.own.owner_groups import OwnerGroups, share_buffers, share_initial
from lightning_hetero.pipeline.runtime.own.ownership import Ownership
from lightning_hetero.pipeline.runtime.own.pruning import prune, restore, to_device
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import GroupPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Place"]


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

    Attributes:
        planned, settings, channel, failures: as given.
        group_index: of this rank's group in the plan; None for a rank at rest.
        leads: whether this rank runs the training step of its group.
        ownership: who holds what.
        whole: collects and divides state dicts.
        averages: averaged weights, divided as the module is.
        owner_groups: the process groups of those that hold the same.
        ways: to neighbours, from device to device.
        sync: sums gradients over them.
        logs: what steps log.
        busy: this rank's own work.
        runner: this rank's stage, or the whole step; None for a rank at rest.
        evaluation: runs validation, test and prediction steps.
        predicted_s: per rank, what its own work for a full batch should take by the plan's costs [s]; NaN if unknown.
        own: the parameters that this rank holds.
    """

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
    ) -> None:
        module, plan, world = trainer.lightning_module, planned.plan, channel.group
        folder = trainer.default_root_dir
        self.planned, self.settings, self.channel, self.failures = planned, settings, channel, failures
        self.ownership = Ownership(module, backbone.layers, plan, rank=channel.rank)
        share_initial(module, self.ownership, world)
        prune(module, optimizers, self.ownership)
        self.averages = Averages(trainer, self.ownership, world)
        self.averages.divide()
        to_device(module, optimizers, settings.device)
        self.whole = WholeState(
            module, self.ownership, group=world, folder=folder if os.access(folder, os.W_OK) else None
        )
        self.group_index = next((i for i, group in enumerate(plan.groups) if channel.rank in group.ranks), None)
        group = None if self.group_index is None else plan.groups[self.group_index]
        self.leads = group is not None and group.ranks[0] == channel.rank
        self._wire = gloo_group(settings.timeout)
        self.ways = self._direct_ways()
        self.owner_groups = OwnerGroups(
            world, backend=settings.process_group_backend, timeout=settings.timeout
        )
        wait = partial(failures.wait, polled=settings.device.type != "cpu")
        self.sync = GradientSync(module, self.ownership, groups=self.owner_groups, wait=wait)
        self.logs = StepLogs(module, channel, wait=failures.wait)
        self.busy = BusyTime()
        if group is not None and scenario is not None:
            model = planned.model or unit_costs(backbone.names)
            parts = parts_of(model, group, channel.rank, max(group.micro_batches))
            stages, calls = len(group.ranks), planned.calls
            self.busy.pace = ScenarioPace(scenario, channel.rank, parts=parts, stages=stages, calls=calls)
        self._module, self._optimizers, self._backbone = module, optimizers, backbone
        self.runner = None if group is None else self._runner_of(group)
        self.predicted_s = work_s(plan, planned.model, planned.cluster, ranks=channel.world_size)
        self.own = [p for p in module.parameters() if not p.is_meta]
        self.evaluation = EvaluationBatches(
            module, plan, self.runner, channel=channel, failures=failures, logs=self.logs, device=settings.device
        )
        if trainer.predicting:
            self.evaluation.expect()

    def _direct_ways(self) -> DirectWays:
        """Finds out which ranks have a device to themselves, and connects those that the plan makes neighbours."""
        settings, groups = self.settings, [group.ranks for group in self.planned.plan.groups]
        own = device_of(settings.device, settings.process_group_backend)
        devices = self.channel.all_gather_object(own)
        return DirectWays(
            direct_pairs(devices, groups),
            rank=self.channel.rank,
            backend=own.backend,
            timeout=settings.timeout,
            device=settings.device,
        )

    def _runner_of(self, group: GroupPlan) -> StageRunner | WholeStep:
        if isinstance(self._backbone, Undivided):
            return WholeStep(failures=self.failures, seed=self.settings.seed, pace=self.busy)
        return self._stage_runner(group)

    def _stage_runner(self, group: GroupPlan) -> StageRunner:
        settings, cluster, calls = self.settings, self.planned.cluster, self.planned.calls
        model = self.planned.model or unit_costs(self._backbone.names)

        def times(samples: tuple[int, ...], calls: int) -> PipelineTimes:
            part = replace(group, samples=sum(samples), micro_batches=samples)
            return called(times_of(model, cluster, part), calls)

        def policy(times: PipelineTimes) -> SchedulePolicy:
            depths = group.depths * (times.stages // len(group.ranks))
            return SchedulePolicy(depths=depths, priority="HFB")

        emulated = {(a, b): cluster.links[a][b] for a in group.ranks for b in group.ranks if a != b}
        return StageRunner(
            self._backbone.layers,
            group=group,
            rank=self.channel.rank,
            cut=self._backbone.cut() if self.leads else None,
            wire=self._wire,
            failures=self.failures,
            times=times,
            seed=settings.seed,
            calls=calls,
            carrier=settings.carrier,
            checkpoint_layers=settings.planning.checkpoint_layers,
            policy=policy,
            overlap=settings.planning.overlap,
            pace=self.busy,
            emulated_links=emulated if settings.emulate_links else None,
            timeout_s=1800.0 if settings.timeout is None else settings.timeout.total_seconds(),
            device=settings.device,
            ways=self.ways.by_peer,
        )

    def share_buffers(self) -> None:
        """Before an evaluation: statistics such as BatchNorm's are those of the first group, as rank 0's under DDP."""
        share_buffers(self._module, self.ownership, self.owner_groups)

    def close(self) -> None:
        """Makes the module whole again on every rank, on the CPU; after a failure, does only what needs no peer."""
        self.logs.close()
        self.sync.disarm()
        self.averages.release()
        try:
            if not self.failures.reported:
                self.evaluation.finish()
            if self.runner is not None:
                self.runner.close()
            if not self.failures.reported:
                to_device(self._module, self._optimizers, torch.device("cpu"))
                restore(self._module, self.ownership, self.channel.group)
                self.averages.restore()
        except Exception as error:
            if not self.failures.reported:  # else there is a cause already, which this would hide
                self.failures.report(error)
                raise
        finally:
            if not self.failures.reported:
                self.owner_groups.close()
                self.ways.close()
                dist.destroy_process_group(self._wire)
