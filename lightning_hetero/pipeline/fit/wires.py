"""What stays as it is while a run lasts: settings, the ways between ranks, what is emulated of them (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.run import EngineRun, gloo_group
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.emulate.links import parcels_s, slow, sums_s
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.decide.links import LinkClock, direct_pairs
from lightning_hetero.pipeline.decide.plans import check_plan
from lightning_hetero.pipeline.fit.loaders import PipelineBinder
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWays, rank_device
from lightning_hetero.pipeline.runtime.execute.pace import SlowClock
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.migration import Migration
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """The strategy's arguments that concern the plan; see `HeteroPipelineStrategy`.

    Attributes:
        watched: a controller is to go on from ``plan``, and needs costs.
    """

    cluster: Cluster | Literal["probe"] | None = None
    profile: ModelCost | None = None
    plan: PipelinePlan | None = None
    micro_batch_size: int | None = None
    max_groups: int | None = None
    depth: Literal["auto"] | DepthRule = "auto"
    checkpoint_layers: bool = False
    watched: bool = False

    def check_ranks(self, world_size: int) -> None:
        """Checks what can be known before the module is.

        Raises:
            ValueError: the cluster or the plan is not one for so many ranks.
        """
        if isinstance(self.cluster, Cluster) and len(self.cluster.devices) != world_size:
            raise ValueError(
                f"cluster= describes {len(self.cluster.devices)} devices, but the Trainer has {world_size}: describe"
                " one device per rank"
            )
        if self.plan is not None:
            check_plan(self.plan, layers=self.plan.groups[0].cuts[-1], ranks=world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """What a run follows: the strategy's own arguments, see `HeteroPipelineStrategy`, and where it runs.

    Attributes:
        device: of this rank's layers.
        process_group_backend: of the groups that sum gradients.
        controller: decides on other plans while a fit trains; None: nothing does.
    """

    shared: SharedSettings
    planning: PlanSettings
    backbone: str | Sequence[str] | None
    emulate_links: bool
    seed: int
    stream: Literal["shared"] | None
    device: torch.device
    process_group_backend: str | None
    timeout: timedelta | None
    controller: LyapunovController | None

    @property
    def timeout_s(self) -> float:
        """How long this rank waits for what another one owes it; torch's own default if ``timeout`` is None."""
        return 1800.0 if self.timeout is None else self.timeout.total_seconds()

    @property
    def gloo_timeout(self) -> timedelta:
        """The timeout of process groups: gloo counts suspended time, too; the failure board ends waits before."""
        return timedelta(seconds=10 * self.timeout_s)

    def fingerprint(self) -> dict[str, str]:
        """Returns what must be the same on all ranks, as words."""
        return {
            **{name: repr(getattr(self.planning, name)) for name in PlanSettings.__slots__},
            "global_batch_size": str(self.shared.global_batch_size),
            "loss_reduction": self.shared.loss_reduction,
            "backbone": repr(self.backbone),
            "seed": str(self.seed),
        }


class RunOnRank(EngineRun[PipelineBinder]):
    """What stays as it is while a run lasts, on one rank. The default process group exists.

    Args:
        trainer: the running trainer.
        settings: the same on all ranks, except the device.

    Attributes:
        settings: as given.
        scenario: that stages sleep for, where a `ThrottleCallback` emulates training.
        scenario_step: returns the scenario's step from the number of batches trained so far.
        backbone: the module's layers; the module is whole at first.
        watched: a controller decides on other plans, by what is measured.
        watch_layers: called when the backbone's layers are others.
    """

    backbone: Backbone
    watched = False
    watch_layers: Callable[[Backbone], object] = staticmethod(lambda _: None)

    def __init__(self, trainer: Trainer, settings: PipelineSettings) -> None:
        super().__init__(
            trainer, timeout=settings.timeout, settings=settings.fingerprint(), gloo_timeout=settings.gloo_timeout
        )
        self.settings = settings
        self.binder = PipelineBinder(trainer, self.channel, shared=settings.shared, stream=settings.stream)
        self.scenario: Scenario | None = None
        self.scenario_step: Callable[[int], int] = int

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Over all parameters, the present ones; none, if nothing is trained."""
        return self.trainer.optimizers if self.fitting else ()

    def ownership_under(self, plan: PipelinePlan, without: Container[str] = ()) -> Ownership:
        """Returns which rank holds what under a plan; ``without``: see there."""
        return Ownership(self.module, self.backbone.layers, plan, rank=self.channel.rank, without=without)


class Wires:
    """The ways between ranks, of one run; the constructor is collective.

    Args:
        run: of this rank.
        plan: that the run begins with.

    Attributes:
        gloo: process group for messages between stages; None: no plan has had several in a group.
        direct: to neighbours, from device to device.
        owners: the process groups of those that hold the same.
    """

    def __init__(self, run: RunOnRank, plan: PipelinePlan) -> None:
        settings, channel = run.settings, run.channel
        self._devices = channel.all_gather_object(rank_device(settings.device, settings.process_group_backend))
        self._timeout = settings.gloo_timeout
        self.gloo: dist.ProcessGroup | None = None
        backend = self._devices[channel.rank].backend
        self.direct = DirectWays(channel.rank, backend=backend, timeout=settings.timeout, device=settings.device)
        self.owners = OwnerGroups(channel.group, backend=settings.process_group_backend, timeout=settings.gloo_timeout)
        self.prepare(plan)

    def prepare(self, plan: PipelinePlan) -> None:
        """Makes what a plan's stages need to send to one another; collective."""
        self.direct.prepare(direct_pairs(self._devices, [group.ranks for group in plan.groups]))
        if self.gloo is None and any(len(group.ranks) > 1 for group in plan.groups):
            self.gloo = gloo_group(self._timeout)

    def close(self, *, failed: bool) -> None:
        self.owners.close(failed=failed)
        if not failed:
            self.direct.close()
            if self.gloo is not None:
                dist.destroy_process_group(self.gloo)
            self.gloo = None  # it ends, with its threads, when nothing holds it


class Emulation:
    """Wraps what a rank sends; leaves alone what is not emulated.

    Args:
        run: of this rank.

    Attributes:
        cluster: whose links count; of the plan in force.
    """

    cluster: Cluster

    def __init__(self, run: RunOnRank) -> None:
        self._run, self._rank = run, run.channel.rank
        self._links = run.settings.emulate_links

    def clock(self, peer: int) -> LinkClock:
        """Returns what times that which comes from a neighbour, global rank."""
        if not self._links:
            return LinkClock()
        return SlowClock(self.cluster.links[peer][self._rank], self._run.failures.check)

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
