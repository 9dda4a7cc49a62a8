"""What the ranks take for the user's own step, and what there is between them, before training (layer L).

    every rank   its step, forward and backward, at two sizes; then the loader's batch again and again     all at once
    all ranks    one sum of as many bytes as there are gradients; the links
    rank 0       a `Setup` for the planner

Nothing that a step changes is left changed, logged or drawn, see `Rehearsal`. Under an emulation the times are the
scenario's: a device that is emulated shows its speed in training only. Its changes and faults are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_hetero.base.ddp import HeteroDDPStrategy
from lightning_hetero.cluster.spec import override_cluster
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.fit.planning import probed
from lightning_hetero.pipeline.fit.rehearsal import Rehearsal, measure_model, measure_series
from lightning_hetero.pipeline.runtime.measure.around_backbone import NeverCalledError
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers, undivided
from lightning_hetero.plan.setup import Setup, whole_step
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import AffineCost, Cluster, ModelCost

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_FEWEST, _MOST = 8, 64  # steps of the series
_EMULATED = 64  # steps that are looked at where nothing needs to be run
_LEVEL = 0.05  # speeds that differ by less are taken for equal
_SUMS = 3
_WIRE = 0.25  # of the slowest rank's work: gradients that take longer make it worth while to measure layers


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What is needed to try a module before it trains.

    Attributes:
        strategy: which moves batches, and in whose context a training step runs.
        module: whole, as it will be trained.
        loader: the user's train loader.
        channel: of all ranks.
        global_batch: samples of all ranks per update.
        scenario: emulation in force.
        layers: whether the layers are to be measured, too, where that may be of use.
        budget_s: aimed-at time of the series [s].
    """

    strategy: HeteroDDPStrategy[Any]
    module: LightningModule
    loader: object
    channel: SideChannel
    global_batch: int
    scenario: Scenario | None
    layers: bool
    budget_s: float

    def measure(self) -> Setup:
        """Returns what was measured, the same on all ranks. Collective.

        Raises:
            RuntimeError: a rank could not measure; says which and why, on all ranks.
        """
        rank, ranks = self.channel.rank, self.channel.world_size
        whole = self._together(lambda: self._measured(self._rehearsal(divided=False)))
        cost, share = whole_step(whole[rank]), -(-self.global_batch // ranks)
        if self.scenario is not None and self.scenario.emulated:
            cost, slowness = _emulated(self.scenario, rank, share)
        else:
            slowness = self._slowness(whole[rank])
            if self.scenario is not None:  # real work, stretched
                cost = cost.times(1.0 / self.scenario.speed(rank, 0))
        costs: list[AffineCost] = self.channel.all_gather_object(cost)
        series: list[tuple[float, ...]] = self.channel.all_gather_object(slowness)
        cluster = self._cluster([costs[0].seconds(share) / max(c.seconds(share), 1e-9) for c in costs])
        setup = Setup(
            cluster=cluster, global_batch=self.global_batch, model=_scaled(whole[0], costs[0], share),
            costs=tuple(costs), slowness=tuple(series),
        )  # fmt: skip
        setup = replace(setup, exchange_s=self._exchange(round(setup.param_bytes() / 4)))  # as many float32
        # By bandwidth alone: what else an exchange takes, a pipeline's messages take, too.
        slowest = min(link.bandwidth_bytes_per_s for row in cluster.links for link in row)
        wire_s = 2.0 * (ranks - 1) / ranks * setup.param_bytes() / slowest
        short = any(most < share for most in setup.most_samples())
        if self.layers and (short or wire_s > _WIRE * max(c.seconds(share) for c in costs)):
            setup = replace(setup, model=_scaled(self._by_layers(whole[0]), costs[0], share))
        return setup

    def _together(self, measure: Callable[[], Any]) -> list[Any]:
        """Returns what all ranks have measured; raises on all of them if one could not."""
        try:
            mine: tuple[Any, str] = measure(), ""
        except Exception as error:  # whatever the user's step raises where nothing is set up yet
            mine = None, f"{type(error).__name__}: {error}"
        everyone = self.channel.all_gather_object(mine)
        for rank, (_, said) in enumerate(everyone):
            if said:
                raise RuntimeError(f"rank {rank} could not try the training step: {said}")
        return [value for value, _ in everyone]

    def _rehearsal(self, *, divided: bool) -> Rehearsal:
        whole = undivided(self.module, "only its step as a whole is wanted")
        return Rehearsal(
            module=self.module, backbone=find_layers(self.module, None) if divided else whole, found=True,
            device=self.strategy.root_device, loader=self.loader, optimizers=(),
            to_device=self.strategy.batch_to_device, context=self.strategy.precision_plugin.train_step_context,
        )  # fmt: skip

    def _measured(self, rehearsal: Rehearsal) -> ModelCost:
        return measure_model(rehearsal, micro_batch_size=None, checkpoint_layers=False)[0]

    def _slowness(self, whole: ModelCost) -> tuple[float, ...]:
        """Returns the times of steps over their median; the same number of steps on all ranks."""
        rehearsal = self._rehearsal(divided=False)
        expected_s = whole_step(whole).seconds(getattr(self.loader, "batch_size", None) or 1)
        slowest_s = max(self.channel.all_gather_object(expected_s))
        steps = max(_FEWEST, min(_MOST, int(self.budget_s / max(slowest_s, 1e-4))))
        series_s = self._together(lambda: measure_series(rehearsal, steps))[self.channel.rank]
        middle_s = median(series_s)
        return tuple(seconds / middle_s for seconds in series_s)

    def _exchange(self, size: int) -> float:
        """Returns the time of a sum of so many float32 over all ranks, nobody being late [s]."""
        if not size:
            return 0.0
        data, times_s = torch.zeros(size, device=self.strategy.root_device), []
        for _ in range(1 + _SUMS):
            dist.barrier(self.channel.group)
            began_s = time.perf_counter()
            dist.all_reduce(data)
            device_of(data.device).synchronize()
            times_s.append(time.perf_counter() - began_s)
        return float(max(self.channel.all_gather_object(median(times_s[1:]))))

    def _cluster(self, speeds: list[float]) -> Cluster:
        """Returns the devices and links, with the speeds that the user's step shows."""
        level = [1.0 if abs(speed - 1.0) < _LEVEL else speed for speed in speeds]
        return override_cluster(probed(self.strategy, self.channel.group), speeds=level)

    def _by_layers(self, whole: ModelCost) -> ModelCost:
        """Returns the costs by layer, from rank 0; as a whole, where layers are not known or cannot be measured."""
        found: ModelCost | None = None
        if self.channel.rank == 0:
            try:
                rehearsal = self._rehearsal(divided=True)
                found = None if isinstance(rehearsal.backbone, Undivided) else self._measured(rehearsal)
            except (NotAChainError, NeverCalledError):
                found = None
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                rank_zero_warn(f"hetero_auto leaves out hetero_pipeline: rank 0 could not measure the layers: {said}")
        return self.channel.all_gather_object(found)[0] or whole


def _emulated(scenario: Scenario, rank: int, samples: int) -> tuple[AffineCost, tuple[float, ...]]:
    """Returns what an emulated device takes, and how its steps differ; other draws than those of the run."""
    calm = replace(scenario, changes=(), faults=(), jitter=0.0, spells=None)
    fixed_s = calm.work_s(rank, 0, 0)
    cost = AffineCost(fixed_s=fixed_s, per_sample_s=max(0.0, calm.work_s(rank, 0, samples) - fixed_s) / samples)
    other = replace(scenario, changes=(), faults=(), seed=(scenario.seed + 1) % 2**64)
    return cost, tuple(other.stretch(rank, step) / calm.stretch(rank, step) for step in range(_EMULATED))


def _scaled(model: ModelCost, cost: AffineCost, samples: int) -> ModelCost:
    """Returns the model's costs such that its step takes as long as rank 0's: under an emulation it does not."""
    factor = cost.seconds(samples) / max(whole_step(model).seconds(samples), 1e-12)
    if abs(factor - 1.0) < 1e-9:
        return model
    before, *layers, head = (part.times(factor) for part in model.parts)
    return ModelCost(layers=tuple(layers), before=before, head=head)
