"""From a module, its data and the devices to a plan, before training starts (layer L).

    the cluster: given, or known from an emulation, or probed        all ranks
    the costs:   given, or measured on the first rank's device       rank 0: the user's step on a few samples
    the plan:    given, or the best one found (`solvers.placement`)  rank 0, told to all
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_hetero.base.checks import trained_dtype
from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster, override_cluster
from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.measure.device import device_of, is_out_of_memory
from lightning_hetero.measure.probe import probe_cluster
from lightning_hetero.pipeline.decide.links import MOST_COMMUNICATORS
from lightning_hetero.pipeline.decide.plans import (
    beside_bytes,
    best_plan,
    check_plan,
    emulated,
    held_bytes,
    in_one_piece,
    unit_costs,
    with_room,
)
from lightning_hetero.pipeline.fit.rehearsal import Rehearsal, calls_in, first_finds, measure_model
from lightning_hetero.pipeline.fit.wires import PlanSettings
from lightning_hetero.pipeline.runtime.execute.direct_ways import rank_device
from lightning_hetero.pipeline.runtime.measure.around_backbone import NeverCalledError
from lightning_hetero.pipeline.runtime.measure.memory import tensor_bytes
from lightning_hetero.pipeline.runtime.ownership.ownership import tied
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.record import read_events
from lightning_hetero.solvers.placement import place
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan

_TRIES, _LESS = 3, 0.8  # further plans, with so much of the memory that could not be had


def probed(strategy: DDPStrategy, group: dist.ProcessGroup, *, links: bool = True) -> Cluster:
    """Returns the devices and links as a strategy's training will use them; collective, behind its set-up.

    Args:
        strategy: whose training it is.
        group: of all ranks.
        links: whether speeds and links are measured; else they are equal, and free.
    """
    direct = rank_device(strategy.root_device, strategy.process_group_backend).backend
    dtype = trained_dtype(strategy.precision_plugin.precision)
    return probe_cluster(
        group, strategy.root_device, direct=direct, communicators=MOST_COMMUNICATORS, dtype=dtype, links=links
    )


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


class Planner:
    """Decides which rank computes what, before a run; its methods are collective.

    Args:
        step: the user's training step, of which an evaluation needs the module, its layers and the device.
        settings: what the user says.
        channel: of all ranks.
        scenario: emulation in force; its speeds are the devices', its times the model's.
        probe: measures the devices and links.
    """

    def __init__(
        self, step: Rehearsal, settings: PlanSettings, *, channel: SideChannel, scenario: Scenario | None,
        probe: Callable[[], Cluster],
    ) -> None:  # fmt: skip
        self._step, self._backbone, self._settings = step, step.backbone, settings
        self._channel, self._scenario, self._probe = channel, scenario, probe

    def plan(self, global_batch: int) -> PlanResult:
        """Measures what is not given and plans a fit.

        Args:
            global_batch: samples of all ranks per step.

        Raises:
            CannotDivideError: the step does with the layers what a pipeline cannot do; on all ranks.
            ValueError: no plan is possible (with the reason), or the one given does not fit.
            RuntimeError: the step fails on the example; ranks other than 0 name rank 0's reason. Or a rank does not get
                the memory that plans take; on all ranks.
        """
        started_s = time.monotonic()
        cluster, plan = self._cluster(), self._settings.plan
        cannot = (NotAChainError, NeverCalledError) if self._step.found else NotAChainError

        def costs() -> tuple[ModelCost | None, int] | str:
            try:
                return self._costs()
            except cannot as caught:
                return str(caught)

        costed = first_finds(self._channel, costs)
        if plan is None:
            # Measuring leaves graphs in reference cycles. And a full collection, due some time after all imports,
            # takes hundreds of milliseconds: in a step, all ranks would wait for each one's.
            gc.collect()
        if isinstance(costed, str):
            raise CannotDivideError(costed)
        model, calls = costed
        if plan is None:
            assert model is not None
            plan, cluster = self._with_room(model, cluster, global_batch)
        return self._result(plan, cluster, started_s, model=model, calls=calls, global_batch=global_batch)

    def plan_evaluation(self) -> PlanResult:
        """Plans validation, test or prediction without a fit before it: as in a fit, if a plan was given.

        Otherwise whole replicas where the model fits every device, which is fastest: no stage waits for another. Where
        it does not fit, one pipeline by parameters.
        """
        started_s, cluster, module, layers = time.monotonic(), self._cluster(), self._step.module, self._backbone.layers
        plan = self._settings.plan
        if plan is None and _held_bytes(module) <= min(device.mem_bytes for device in cluster.devices):
            plan = replicas(len(layers), [1] * self._channel.world_size)
        elif plan is None:
            plan = place(unit_costs(self._backbone.names, list(map(_held_bytes, layers))), cluster, 1, max_groups=1)
            self._check_found(plan)
        return self._result(plan, cluster, started_s)

    def _result(
        self, plan: PipelinePlan, cluster: Cluster, started_s: float, *, model: ModelCost | None = None, calls: int = 1,
        global_batch: int | None = None,
    ) -> PlanResult:
        ranks = self._channel.world_size
        check_plan(plan, layers=len(self._backbone.layers), ranks=ranks, global_batch=global_batch)
        return PlanResult(plan=plan, cluster=cluster, model=model, calls=calls, seconds=time.monotonic() - started_s)

    def _cluster(self) -> Cluster:
        """Returns the devices: given, emulated or probed."""
        given, scenario, world = self._settings.cluster, self._scenario, self._channel.world_size
        if given is None and scenario is not None:
            return override_cluster(equal_cluster(world), speeds=[scenario.speed(rank, 0) for rank in range(world)])
        if given is None and self._settings.plan is not None and not self._settings.watched:
            return equal_cluster(world)  # nothing is decided by it
        return given if isinstance(given, Cluster) else self._probe()

    def _costs(self) -> tuple[ModelCost | None, int]:
        """Returns the costs, if they are given or needed, and the calls of the backbone."""
        step, settings, scenario, layers = self._step, self._settings, self._scenario, self._backbone.layers
        model, times = settings.profile, scenario if scenario is not None and scenario.emulated else None
        if model is not None and len(model.layers) != len(layers):
            raise ValueError(f"profile has {len(model.layers)} layers, but the backbone has {len(layers)}")
        if model is None and (settings.plan is None or settings.watched or times is not None):
            sizes, again = settings.micro_batch_size, settings.checkpoint_layers
            model, calls, *_ = measure_model(step, micro_batch_size=sizes, checkpoint_layers=again)
        else:
            calls = declared_calls(step.module) or calls_in(step)
        return model if model is None or times is None else emulated(model, times), calls

    def _best(self, model: ModelCost, cluster: Cluster, global_batch: int) -> PipelinePlan:
        settings = self._settings
        plan = best_plan(
            model, cluster, global_batch, spans=tied_spans(self._step.module, self._backbone),
            micro_batch_size=settings.micro_batch_size, max_groups=settings.max_groups, depth=settings.depth,
        )  # fmt: skip
        self._check_found(plan)
        whole = isinstance(self._backbone, Undivided) and settings.micro_batch_size is None
        return in_one_piece(plan, model, cluster) if whole else plan

    def _check_found(self, plan: PipelinePlan) -> None:
        if not plan.ok:
            why = f"; and {self._backbone.reason}" if isinstance(self._backbone, Undivided) else ""
            raise ValueError(f"no plan fits these devices: {plan.reason}{why}")

    def _with_room(self, model: ModelCost, cluster: Cluster, global_batch: int) -> tuple[PipelinePlan, Cluster]:
        """Returns rank 0's plan, and the cluster that it was made for; on accelerators one whose memory all ranks get.

        Args:
            model: costs by layer.
            cluster: with the memory that ranks may use.
            global_batch: samples of all ranks per step.

        Raises:
            ValueError: no plan is possible.
            RuntimeError: the same, on ranks other than 0; or a rank does not get the memory of any plan, on all ranks.
        """
        channel, device, on = self._channel, self._step.device, device_of(self._step.device)
        if not on.asynchronous:
            return first_finds(channel, lambda: self._best(model, cluster, global_batch)), cluster
        budget, ranks, lacking = cluster, len(cluster.devices), ""

        def found() -> tuple[PipelinePlan, Cluster]:
            try:
                return with_room(lambda left: self._best(model, left, global_batch), model, budget)
            except ValueError as error:
                less = f"; with less memory than was free, because {lacking}" if lacking else ""
                raise ValueError(f"{error}{less}") from error

        for _ in range(1 + _TRIES):
            plan, left = first_finds(channel, found)
            peaks = list(map(sum, zip(held_bytes(plan, model, ranks), beside_bytes(plan, model, ranks), strict=True)))
            held, problem = _allocated(device, peaks[channel.rank])
            said: list[str] = channel.all_gather_object(problem)  # all hold theirs now: some may share a device
            del held
            on.empty_cache()
            short = [rank for rank in range(ranks) if said[rank]]
            if not short:
                return plan, left
            memory = [one.mem_bytes for one in budget.devices]
            for rank in short:
                memory[rank] = min(memory[rank], _LESS * peaks[rank])
            budget, first = override_cluster(budget, mem_bytes=memory), short[0]
            named = f"rank {first} ({cluster.devices[first].name})"
            lacking = f"{named} did not get {bytes_text(peaks[first])} for its part: {said[first]}"
        raise RuntimeError(
            f"no plan fits these devices, of {1 + _TRIES} that took less and less: {lacking}. Is something else on the"
            " device? Give memory in cluster=, or a smaller micro_batch_size=, or use strategy='hetero_balanced'"
        )


def _held_bytes(module: nn.Module) -> float:
    """Returns the size of a module's parameters and buffers."""
    return float(tensor_bytes([*module.parameters(), *module.buffers()]))


def _allocated(device: torch.device, size_bytes: float) -> tuple[Tensor | None, str]:
    """Returns so much of the device's memory; or why it cannot be had."""
    try:
        return torch.empty(int(size_bytes), dtype=torch.uint8, device=device), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


def tied_spans(module: nn.Module, backbone: Backbone) -> list[tuple[int, int]]:
    """Returns the layers that must stay on one device, because they share weights, as `best_plan` takes them."""
    ties = [tie for tie in tied(module, backbone.layers) if tie.layers]
    return [(0 if None in tie.units else min(tie.layers), max(tie.layers)) for tie in ties]


def read_cluster(given: Cluster | Mapping[str, Any] | str | Path | None) -> Cluster | Literal["probe"] | None:
    """Returns the cluster that was given, however it was.

    Args:
        given: a description, see `cluster_from_plain`, or the path of a YAML file or a trace with one; ``"probe"`` and
            ``None`` stay.

    Raises:
        TypeError, ValueError: it is none of these, or the description is wrong.
    """
    if given is None:
        return None
    if isinstance(given, str) and given == "probe":
        return "probe"
    if not isinstance(given, str | Path):
        return cluster_from_plain(given)
    try:
        if Path(given).suffix in (".yaml", ".yml"):
            described = yaml.safe_load(Path(given).read_text())
            return cluster_from_plain(described.get("spec", described) if isinstance(described, dict) else described)
        plans = [event.data for event in read_events(given) if event.kind == "plan"]
        if plans:
            return cluster_from_plain(plans[-1]["cluster"])
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"cluster={str(given)!r} must be 'probe', a description or a YAML file with one (devices: ..., see"
            f" docs/reference/plan.md), a Cluster, None, or a trace written by HeteroTrace ({why})"
        ) from error
    raise ValueError(f"the trace {str(given)!r} is of no pipeline: it holds no description of a cluster")


def declared_calls(module: nn.Module) -> int | None:
    """Returns how often a step calls the backbone as the module says, by ``backbone_calls``; None: it does not.

    Raises:
        ValueError: it is no such number.
    """
    calls = getattr(module, "backbone_calls", None)
    if calls is not None and (type(calls) is not int or calls < 1):
        raise ValueError(f"backbone_calls={calls!r} of {type(module).__name__} must be a whole number >= 1")
    return calls
