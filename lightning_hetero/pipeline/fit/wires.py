"""What stays as it is while a run lasts, the ways between its ranks, and what is emulated of them (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lightning_hetero.base.run import EventLog, gloo_group
from lightning_hetero.emulate.links import SlowClock, parcels_s, slow, sums_s
from lightning_hetero.emulate.pace import EmulatedPace
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.decide.links import LinkClock, direct_pairs
from lightning_hetero.pipeline.fit.loaders import PipelineBinder
from lightning_hetero.pipeline.fit.plan.planning import PipelineSettings
from lightning_hetero.pipeline.runtime.execute.busy_time import BusyTime
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays, rank_device
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.migration import Migration
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Cluster, PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """What stays as it is while a run lasts.

    Attributes:
        trainer: the running trainer; its module is whole at first.
        backbone: the module's layers.
        optimizers: over all parameters; none, if nothing is trained.
        binder: of the train loader.
        events: of this rank.
        settings: of the run.
        channel: over all ranks.
        failures: of the run.
        scenario: that stages sleep for, where training is emulated.
        scenario_step: returns the scenario's step from the number of batches trained so far.
        watched: a controller decides on other plans, by what is measured.
    """

    trainer: Trainer
    backbone: Backbone
    optimizers: Sequence[torch.optim.Optimizer]
    binder: PipelineBinder
    events: EventLog
    settings: PipelineSettings
    channel: SideChannel
    failures: FailureBoard
    scenario: Scenario | None
    scenario_step: Callable[[int], int] = int
    watched: bool

    @property
    def module(self) -> LightningModule:
        return self.trainer.lightning_module

    def ownership_under(self, plan: PipelinePlan) -> Ownership:
        return Ownership(self.module, self.backbone.layers, plan, rank=self.channel.rank)


class Wires:
    """The ways between ranks, of one run; the constructor is collective.

    Args:
        fixed: of the run.
        plan: that the run begins with.

    Attributes:
        gloo: process group for messages between stages; None: no plan has had several in a group.
        direct: to neighbours, from device to device.
        owners: the process groups of those that hold the same.
    """

    def __init__(self, fixed: Fixed, plan: PipelinePlan) -> None:
        settings, channel = fixed.settings, fixed.channel
        self._devices = channel.all_gather_object(rank_device(settings.device, settings.process_group_backend))
        self._timeout = settings.timeout
        self.gloo: dist.ProcessGroup | None = None
        self._connect(plan)
        self.direct = DirectWays(
            self._pairs(plan),
            rank=channel.rank,
            backend=self._devices[channel.rank].backend,
            timeout=settings.timeout,
            device=settings.device,
        )
        self.owners = OwnerGroups(channel.group, backend=settings.process_group_backend, timeout=settings.timeout)

    def prepare(self, plan: PipelinePlan, ownership: Ownership) -> None:
        """Makes what another plan needs; collective."""
        self.owners.prepare(ownership.holders(name) for name in (*ownership.parameters, *ownership.buffers))
        self.direct.prepare(self._pairs(plan))
        self._connect(plan)

    def _connect(self, plan: PipelinePlan) -> None:
        if self.gloo is None and any(len(group.ranks) > 1 for group in plan.groups):
            self.gloo = gloo_group(self._timeout)

    def _pairs(self, plan: PipelinePlan) -> list[tuple[int, int]]:
        return direct_pairs(self._devices, [group.ranks for group in plan.groups])

    def close(self, *, failed: bool) -> None:
        self.owners.close(failed=failed)
        if not failed:
            self.direct.close()
            if self.gloo is not None:
                dist.destroy_process_group(self.gloo)
            self.gloo = None  # it ends, with its threads, when nothing holds it


class Emulation:
    """Wraps what a rank computes and sends; leaves alone what is not emulated.

    Args:
        fixed: of the run.

    Attributes:
        cluster: whose links count; of the plan in force.
    """

    cluster: Cluster

    def __init__(self, fixed: Fixed) -> None:
        self._fixed, self._rank = fixed, fixed.channel.rank
        self._links = fixed.settings.emulate_links

    def paced(self, busy: BusyTime) -> BusyTime | EmulatedPace:
        """Returns what takes an emulated device's time."""
        fixed = self._fixed
        if fixed.scenario is None:
            return busy
        return EmulatedPace(busy, fixed.scenario, self._rank, step_of=fixed.scenario_step)

    def clock(self, peer: int) -> LinkClock | SlowClock:
        """Returns what times that which comes from a neighbour, global rank."""
        if not self._links:
            return LinkClock()
        return SlowClock(LinkClock(), self.cluster.links[peer][self._rank], self._fixed.failures.check)

    def sums(self, sync: GradientSync) -> Callable[[], None]:
        """Returns what ends the sums of gradients; over emulated links they take their time, behind the real ones."""
        if not self._links:
            return sync.finish
        return slow(sync.finish, lambda: sums_s(self.cluster, sync.sizes_bytes(), self._rank))

    def moves(self, migration: Migration, cluster: Cluster) -> Callable[[object], None]:
        """Returns what sends layers, see `Migration.stage`; over a cluster's emulated links they take their time."""
        if not self._links:
            return migration.stage
        return slow(migration.stage, lambda: parcels_s(cluster, migration.sent_bytes), within=True)

    def stretch(self, step: int) -> float:
        """Returns how many times slower than in reality this rank is in a step."""
        fixed = self._fixed
        return 1.0 if fixed.scenario is None else fixed.scenario.stretch(self._rank, fixed.scenario_step(step))
