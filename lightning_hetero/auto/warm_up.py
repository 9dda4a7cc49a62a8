"""What the ranks take for the user's own step, and what there is between them, before training (layer L).

    every rank   at most `STEPS` of its steps at two sizes; reading a batch, the optimizer's step, Lightning's loop
    all ranks    sums of as many bytes as there are gradients, copied to and fro; where that is long, the links
    rank 0       the layers, where links are slow or memory is short; a `Setup` for the planner

Nothing that a step changes is left changed, logged or drawn, see `Rehearsal`. Under an emulation the times are the
scenario's: a device that is emulated shows its speed in training only. Its changes and faults are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_hetero.auto.loop import loop_s
from lightning_hetero.base.ddp import HeteroDDPStrategy
from lightning_hetero.cluster.spec import override_cluster
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.fit.planning import probed, tied_spans
from lightning_hetero.pipeline.fit.rehearsal import Measured, Rehearsal, measure_model, usual_s
from lightning_hetero.pipeline.runtime.measure.around_backbone import NeverCalledError
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers, undivided
from lightning_hetero.plan.setup import Setup, whole_step
from lightning_hetero.solvers.tied_layers import Span
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import AffineCost, Cluster, ModelCost

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_RUNS = (2, 12)  # steps of a quarter of a batch and of a whole one; one more of each does not count
_RUNS_BY_LAYERS = (1, 1)
STEPS = 20  # of the user's at most, on a CPU; a GPU that so few samples do not fill gets more of them
_LEVEL = 0.05  # speeds that differ by less are taken for equal
_LONG = 0.25  # of the slowest rank's work: where an exchange takes longer, links and layers are worth a look


_Tried = tuple[ModelCost, AffineCost, tuple[float, ...], float, float]
"""What a rank measures for itself: the module; its step, how steps differ; reading and stepping; Lightning's loop."""


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
    """

    strategy: HeteroDDPStrategy[Any]
    module: LightningModule
    loader: object
    channel: SideChannel
    global_batch: int
    scenario: Scenario | None
    layers: bool

    def measure(self) -> Setup:
        """Returns what was measured, the same on all ranks. Collective.

        Raises:
            RuntimeError: a rank could not measure; says which and why, on all ranks.
        """
        share = -(-self.global_batch // self.channel.world_size)
        (model, *_), costs, series, owns_s, loops_s = zip(*self._together(lambda: self._tried(share)), strict=True)
        work_s = [cost.seconds(share) for cost in costs]
        exchange_s = self._exchange(round(math.fsum(part.param_bytes for part in model.parts) / 4))  # as many float32
        cluster = self._cluster([work_s[0] / max(s, 1e-9) for s in work_s], exchange_s > _LONG * max(work_s))
        setup = Setup(
            cluster=cluster, global_batch=self.global_batch, model=_scaled(model, costs[0], share), costs=costs,
            exchange_s=exchange_s, own_s=max(owns_s), loop_s=median(loops_s),
            slowness=tuple(one[: min(map(len, series))] for one in series),
        )  # fmt: skip
        # By bandwidth alone: what else an exchange takes, a pipeline's messages take, too.
        slowest = min(link.bandwidth_bytes_per_s for row in cluster.links for link in row)
        wire_s = 2.0 * (1.0 - 1.0 / setup.ranks) * setup.param_bytes() / slowest
        short = any(most < share for most in setup.most_samples())
        if self.layers and (short or wire_s > _LONG * max(work_s)):
            model, spans = self._by_layers(model)
            setup = replace(setup, model=_scaled(model, costs[0], share), spans=spans)
        return setup

    def _tried(self, samples: int) -> _Tried:
        """Returns what this rank has measured for itself; ``samples``: of an equal share."""
        (model, _, series_s, own_s), scenario, rank = self._measured(divided=False), self.scenario, self.channel.rank
        cost, middle_s = whole_step(model), median(series_s)
        slowness = tuple(seconds / middle_s for seconds in series_s)
        if scenario is not None and scenario.emulated:
            cost, slowness = _emulated(scenario, rank, samples)
        elif scenario is not None:  # real work, stretched
            cost = cost.times(1.0 / scenario.speed(rank, 0))
        return model, cost, slowness, own_s, loop_s()

    def _together(self, measure: Callable[[], _Tried]) -> list[_Tried]:
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

    def _measured(self, *, divided: bool) -> Measured:
        whole = undivided(self.module, "only its step as a whole is wanted")
        rehearsal = Rehearsal(
            module=self.module, backbone=find_layers(self.module, None) if divided else whole, found=True,
            device=self.strategy.root_device, loader=self.loader, optimizers=(),
            to_device=self.strategy.batch_to_device, context=self.strategy.precision_plugin.train_step_context,
        )  # fmt: skip
        repeats = _RUNS_BY_LAYERS if divided else _RUNS
        return measure_model(
            rehearsal, micro_batch_size=None, checkpoint_layers=False, repeats=repeats, own=not divided
        )

    def _exchange(self, size: int) -> float:
        """Returns the time of a sum of so many float32 over all ranks, in a copy as DDP's, nobody being late [s]."""
        if not size:
            return 0.0
        own, copy = torch.zeros((2, size), device=self.strategy.root_device)
        seconds = usual_s(
            lambda: (copy.copy_(own), dist.all_reduce(copy), own.copy_(copy)), copy.device,
            before=lambda: dist.barrier(self.channel.group),
        )  # fmt: skip
        return float(max(self.channel.all_gather_object(seconds)))

    def _cluster(self, speeds: list[float], links: bool) -> Cluster:
        """Returns the devices, with the speeds that the user's step shows, and the links, where they are asked for."""
        level = [1.0 if abs(speed - 1.0) < _LEVEL else speed for speed in speeds]
        return override_cluster(probed(self.strategy, self.channel.group, links=links), speeds=level)

    def _by_layers(self, whole: ModelCost) -> tuple[ModelCost, tuple[Span, ...]]:
        """Returns the costs by layer, from rank 0, and the layers that stay together; as a whole, where layers are not
        known or cannot be measured."""
        found: tuple[ModelCost, tuple[Span, ...]] = whole, ()
        if self.channel.rank == 0:
            try:
                if not isinstance(layers := find_layers(self.module, None), Undivided):
                    found = self._measured(divided=True).model, tuple(tied_spans(self.module, layers))
            except (NotAChainError, NeverCalledError):
                pass
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                rank_zero_warn(f"hetero_auto leaves out hetero_pipeline: rank 0 could not measure the layers: {said}")
        return self.channel.all_gather_object(found)[0]


def _emulated(scenario: Scenario, rank: int, samples: int) -> tuple[AffineCost, tuple[float, ...]]:
    """Returns what an emulated device takes, and how its steps differ; other draws than those of the run."""
    calm = replace(scenario, changes=(), faults=(), jitter=0.0, spells=None)
    fixed_s = calm.work_s(rank, 0, 0)
    cost = AffineCost(fixed_s=fixed_s, per_sample_s=max(0.0, calm.work_s(rank, 0, samples) - fixed_s) / samples)
    other = replace(scenario, changes=(), faults=(), seed=(scenario.seed + 1) % 2**64)
    return cost, tuple(other.stretch(rank, step) / calm.stretch(rank, step) for step in range(_RUNS[1]))


def _scaled(model: ModelCost, cost: AffineCost, samples: int) -> ModelCost:
    """Returns the model's costs such that its step is rank 0's: a part has its share of what so many samples take."""
    whole_s = max(whole_step(model).seconds(samples), 1e-12)

    def shared(own: AffineCost) -> AffineCost:
        return cost.times(own.seconds(samples) / whole_s)

    before, *layers, head = (replace(p, forward=shared(p.forward), backward=shared(p.backward)) for p in model.parts)
    return ModelCost(layers=tuple(layers), before=before, head=head)
