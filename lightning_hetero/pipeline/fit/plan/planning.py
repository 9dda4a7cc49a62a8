"""From a module, its data and the devices to a plan, before training starts (layer L).

    the cluster: given, or known from an emulation, or probed        all ranks
    the costs:   given, or measured on the first rank's device       rank 0: the user's step on a few samples
    the plan:    given, or the best one found (`solvers.placement`)  rank 0, told to all
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.base.precision import trained_dtype
from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster, override_cluster
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.pipeline.decide.costs import recorded
from lightning_hetero.pipeline.decide.links import MOST_COMMUNICATORS
from lightning_hetero.pipeline.decide.plans import best_plan, check_plan, emulated, in_one_piece, unit_costs
from lightning_hetero.pipeline.fit.plan.fitting import first_finds, plan_with_room
from lightning_hetero.pipeline.fit.plan.rehearsal import Rehearsal, calls_in, measure_model
from lightning_hetero.pipeline.runtime.execute.direct_ways import rank_device
from lightning_hetero.pipeline.runtime.measure.around_backbone import NeverCalledError
from lightning_hetero.pipeline.runtime.measure.memory import tensor_bytes
from lightning_hetero.pipeline.runtime.ownership.ownership import tied
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.record import read_events
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.placement import place
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.transport.side_channel import SideChannel
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """What a run follows: the strategy's own arguments, see `HeteroPipelineStrategy`, and where it runs.

    Attributes:
        device: of this rank's layers.
        process_group_backend: of the groups that sum gradients.
        main_address: of the host that rank 0 is on.
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
    main_address: str
    controller: LyapunovController | None

    @property
    def timeout_s(self) -> float:
        """How long this rank waits for what another one owes it; torch's own default if ``timeout`` is None."""
        return 1800.0 if self.timeout is None else self.timeout.total_seconds()

    def fingerprint(self) -> dict[str, str]:
        """Returns what must be the same on all ranks, as words."""
        return {
            **{name: repr(getattr(self.planning, name)) for name in PlanSettings.__slots__},
            "global_batch_size": str(self.shared.global_batch_size),
            "loss_reduction": self.shared.loss_reduction,
            "backbone": repr(self.backbone),
            "seed": str(self.seed),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """What decides how fast devices and links will be.

    Attributes:
        direct: backend of messages from device to device; empty: they pass through the hosts' memory.
        dtype: in which training computes.
    """

    direct: str
    dtype: torch.dtype


def carried_by(strategy: DDPStrategy) -> Carried:
    """Returns what a strategy's training will use, once its process group is there."""
    direct = rank_device(strategy.root_device, strategy.process_group_backend).backend
    return Carried(direct=direct, dtype=trained_dtype(strategy.precision_plugin.precision))


class CannotDivideError(RuntimeError):
    """The layers that were found cannot be divided, as the first try showed; says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """What was decided before training, the same on all ranks.

    Attributes:
        plan: which rank computes what.
        cluster: the devices it was made for.
        model: the costs it was made from; None if a plan was given and nothing had to be measured.
        calls: of the backbone in one training step.
        seconds: how long it took to measure and to plan.
    """

    plan: PipelinePlan
    cluster: Cluster
    model: ModelCost | None
    calls: int
    seconds: float


def make_plan(
    step: Rehearsal,
    settings: PlanSettings,
    *,
    channel: SideChannel,
    global_batch: int,
    scenario: Scenario | None,
    carried: Carried,
) -> PlanResult:
    """Measures what is not given and plans. Collective.

    Args:
        step: the user's training step; only rank 0 runs it.
        settings: what the user says.
        channel: of all ranks.
        global_batch: samples of all ranks per step.
        scenario: emulation in force; its speeds are the devices', its times the model's.
        carried: what training carries messages with, and computes in.

    Raises:
        CannotDivideError: the step does with the layers what a pipeline cannot do; on all ranks.
        ValueError: no plan is possible (with the reason), or the one given does not fit.
        RuntimeError: the step fails on the example; ranks other than 0 name rank 0's reason. Or a rank does not get the
            memory that plans take; on all ranks.
    """
    started_s = time.monotonic()
    cluster = _cluster(settings, channel, step.device, scenario, carried)
    cannot = (NotAChainError, NeverCalledError) if step.found else NotAChainError

    def costs() -> Any:
        try:
            return _costs(step, settings, scenario)
        except cannot as caught:
            return str(caught)

    costed = first_finds(channel, costs)
    if settings.plan is None:
        # Measuring leaves graphs in reference cycles. And a full collection, due some time after all imports, takes
        # hundreds of milliseconds: in a step, all ranks would wait for each one's.
        gc.collect()
    if isinstance(costed, str):
        raise CannotDivideError(costed)
    model, calls = costed
    plan = settings.plan
    if plan is None:
        plan, cluster = _planned(step, settings, model, cluster, global_batch, channel)
    check_plan(plan, layers=len(step.backbone.layers), ranks=channel.world_size, global_batch=global_batch)
    return PlanResult(plan=plan, cluster=cluster, model=model, calls=calls, seconds=time.monotonic() - started_s)


def _cluster(
    settings: PlanSettings,
    channel: SideChannel,
    device: torch.device,
    scenario: Scenario | None,
    carried: Carried,
) -> Cluster:
    given = settings.cluster
    world = channel.world_size
    if given is None and scenario is not None:
        speeds = [scenario.speed(rank, 0) for rank in range(world)]
        return override_cluster(equal_cluster(world), speeds=speeds)
    if given is None and settings.plan is not None and not settings.watched:
        return equal_cluster(world)  # nothing is decided by it
    known = given if isinstance(given, Cluster) else None
    return probe_cluster(
        channel.group,
        device,
        given=known,
        direct=carried.direct,
        communicators=MOST_COMMUNICATORS,
        dtype=carried.dtype,
    )


def read_cluster(given: Cluster | Mapping[str, Any] | str | Path | None) -> Cluster | Literal["probe"] | None:
    """Returns the cluster that was given, however it was.

    Args:
        given: a description, see `cluster_from_plain`, or the path of a trace with one; ``"probe"`` and ``None`` stay.

    Raises:
        TypeError, ValueError: it is none of these, or the description is wrong.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "probe":
        return "probe"
    return _recorded_cluster(given) if isinstance(given, str | Path) else cluster_from_plain(given)


def _recorded_cluster(path: str | Path) -> Cluster:
    """Reads the cluster that an earlier run wrote into its trace."""
    try:
        found = recorded(read_events(path))
    except FileNotFoundError as error:
        raise ValueError(
            f"cluster={str(path)!r} must be 'probe', a description (see conf/cluster), a Cluster, None, or a trace"
            f" written by HeteroTrace ({error})"
        ) from error
    if found is None:
        raise ValueError(f"the trace {str(path)!r} is of no pipeline: it holds no description of a cluster")
    return found[0]


def _costs(
    step: Rehearsal, settings: PlanSettings, scenario: Scenario | None
) -> tuple[ModelCost | None, int]:
    """Returns the costs, if they are given or needed, and the calls of the backbone."""
    module, backbone = step.module, step.backbone
    model = settings.profile
    needs_times = scenario is not None and scenario.emulated
    if model is not None and len(model.layers) != len(backbone.layers):
        raise ValueError(f"profile has {len(model.layers)} layers, but the backbone has {len(backbone.layers)}")
    if model is None and (settings.plan is None or settings.watched or needs_times):
        model, calls = measure_model(
            step,
            micro_batch_size=settings.micro_batch_size,
            checkpoint_layers=settings.checkpoint_layers,
        )
    else:
        calls = declared_calls(module) or calls_in(step)
    if needs_times and model is not None:
        assert scenario is not None
        model = emulated(model, scenario)
    return model, calls


def _planned(
    step: Rehearsal,
    settings: PlanSettings,
    model: ModelCost,
    cluster: Cluster,
    global_batch: int,
    channel: SideChannel,
) -> tuple[PipelinePlan, Cluster]:
    """Returns the best plan, and the cluster it was made for. Collective."""
    backbone = step.backbone

    def plan_for(cluster: Cluster) -> PipelinePlan:
        plan = best_plan(
            model,
            cluster,
            global_batch,
            spans=tied_spans(step.module, backbone),
            micro_batch_size=settings.micro_batch_size,
            max_groups=settings.max_groups,
            depth=settings.depth,
        )
        if not plan.ok:
            raise ValueError(f"no plan fits these devices: {plan.reason}{_undivided(backbone)}")
        if isinstance(backbone, Undivided) and settings.micro_batch_size is None:
            plan = in_one_piece(plan, model, cluster)
        return plan

    return plan_with_room(plan_for, model, cluster, device=step.device, channel=channel)


def tied_spans(module: nn.Module, backbone: Backbone) -> list[tuple[int, int]]:
    """Returns the layers that must stay on one device, because they share weights, as `best_plan` takes them."""
    ties = tied(module, backbone.layers)
    return [(0 if tie.outside else min(tie.layers), max(tie.layers)) for tie in ties if tie.layers]


def _undivided(backbone: Backbone) -> str:
    return f"; and {backbone.reason}" if isinstance(backbone, Undivided) else ""


def evaluation_plan(
    module: nn.Module,
    backbone: Backbone,
    settings: PlanSettings,
    channel: SideChannel,
    device: torch.device,
    carried: Carried,
) -> PlanResult:
    """Plans validation, test or prediction without a fit before it: as in a fit, if a plan was given. Collective.

    Otherwise whole replicas where the model fits every device, which is fastest: no stage waits for another. Where it
    does not fit, one pipeline by parameters.
    """
    started_s = time.monotonic()
    cluster = _cluster(settings, channel, device, None, carried)
    layers, world = len(backbone.layers), channel.world_size
    sizes = [float(tensor_bytes([*layer.parameters(), *layer.buffers()])) for layer in backbone.layers]
    if settings.plan is not None:
        plan = settings.plan
    elif tensor_bytes([*module.parameters(), *module.buffers()]) <= min(d.mem_bytes for d in cluster.devices):
        plan = replicas(layers, [1] * world)
    else:
        plan = place(unit_costs(backbone.names, sizes), cluster, 1, max_groups=1)
        if not plan.ok:
            raise ValueError(f"no plan fits these devices: {plan.reason}{_undivided(backbone)}")
    check_plan(plan, layers=layers, ranks=world)
    return PlanResult(plan=plan, cluster=cluster, model=None, calls=1, seconds=time.monotonic() - started_s)


def declared_calls(module: nn.Module) -> int | None:
    """Returns how often a step calls the backbone as the module says, by ``backbone_calls``; None: it does not.

    Raises:
        ValueError: it is no such number.
    """
    calls = getattr(module, "backbone_calls", None)
    if calls is not None and (type(calls) is not int or calls < 1):
        raise ValueError(f"backbone_calls={calls!r} of {type(module).__name__} must be a whole number >= 1")
    return calls
