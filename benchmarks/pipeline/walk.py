"""Runs plans by our walker, and an even chain by `torch.distributed.pipelining`, without Lightning (layer T)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.pipeline.emulation import Sleeping
from benchmarks.pipeline.models import Net, dataset, make
from benchmarks.pipeline.plans import Entry, policy_of
from benchmarks.pipeline.scenarios import Case
from lightning_hetero import Scenario
from lightning_hetero.emulate.throttle import Pacer
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.generate import generate
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.decide.plans import parts_of
from lightning_hetero.pipeline.decide.schedule import Schedule
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime, EmulatedPace, SlowClock
from lightning_hetero.pipeline.runtime.execute.stage_runner import MicroBatch, RunnerSettings, StageRunner
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import AffineCost, GroupPlan, LayerCost, ModelCost, PipelinePlan

SEED = 0
CPU = torch.device("cpu")
TIMEOUT_S = 120.0


class Walk:
    """One rank of a plan at work. Constructor and `close` are collective over all ranks.

    Args:
        case: what is emulated.
        model: its costs.
        entry: the plan.
        wire: process group of all ranks, for activations and gradients.
        name: of this run, another one each time.
        sleeps_inside: layers sleep by themselves, see `emulation`, and links are real; else the rank does, and links
            are emulated, as under the strategy.
        emulated: False: only the real work and the real wire.
    """

    def __init__(
        self,
        case: Case,
        model: ModelCost,
        entry: Entry,
        *,
        wire: dist.ProcessGroup,
        name: str,
        sleeps_inside: bool = False,
        emulated: bool = True,
    ) -> None:
        self.rank = rank = dist.get_rank()
        self.net = net = make(case.model)
        self.entry = entry
        plan = PipelinePlan(groups=entry.groups)
        ownership = Ownership(net, list(net.layers), plan, rank=rank)
        self.owner_groups = OwnerGroups(dist.group.WORLD)  # type: ignore[arg-type]
        self.sync = GradientSync(net, ownership, groups=self.owner_groups)
        self.group = next((group for group in entry.groups if rank in group.ranks), None)
        self.leads = self.group is not None and self.group.ranks[0] == rank
        self.sync_s = entry.sync_s[rank] if emulated else 0.0
        self.batch, self.emulated = case.global_batch, emulated
        self.runner: StageRunner | None = None
        self.busy = BusyTime()
        self.optimizer: torch.optim.Optimizer | None = None
        if self.group is not None:
            own = [p for name, p in net.named_parameters() if rank in ownership.owners(name)]
            self.optimizer = torch.optim.SGD(own, lr=1e-3)
            self.runner = self._stage_runner(case, model, self.group, wire, name, sleeps_inside, emulated)
        inputs, targets = dataset(case.model, case.global_batch).tensors
        sizes = [size for group in entry.groups for size in group.micro_batches]
        self.parts = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))

    def _stage_runner(
        self,
        case: Case,
        model: ModelCost,
        group: GroupPlan,
        wire: dist.ProcessGroup,
        name: str,
        sleeps_inside: bool,
        emulated: bool,
    ) -> StageRunner:
        net, rank, links = self.net, self.rank, case.cluster.links

        def schedule(samples: tuple[int, ...]) -> Schedule:
            times = times_of(model, case.cluster, replace(group, micro_batches=samples))
            return generate(times, policy_of(self.entry.policy, group, times))

        if emulated and sleeps_inside:
            speed = case.cluster.devices[rank].speed
            pacer = Pacer()  # one device: what the head really takes, its layers' sleep makes up for, as with `torch`
            for i, cost in enumerate(model.layers):
                net.layers[i] = _sleeping(net.layers[i], [cost], speed, pacer)
            net.head = _sleeping(net.head, [model.head], speed, pacer)
        elif emulated:
            speeds = [device.speed for device in case.cluster.devices]
            scenario = Scenario(speeds=speeds, sample_s=case.sample_s, step_s=case.fixed_s)
            self.busy = busy = EmulatedPace(CPU, scenario, rank)  # as under the strategy
            busy.parts = parts_of(model, group, rank)
        failures = FailureBoard(
            RunStore(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()), b""), rank
        )

        def clock(peer: int) -> LinkClock:
            if not emulated or sleeps_inside:
                return LinkClock()
            return SlowClock(links[peer][rank], failures.check)

        return StageRunner(
            RunnerSettings(
                rank=rank,
                device=CPU,
                seed=SEED,
                failures=failures,
                wire=wire,
                clock=clock,
                timeout_s=TIMEOUT_S,
                pace=self.busy,
            ),
            list(net.layers),
            group=group,
            cut=BackboneCut(net.layers) if self.leads else None,
            schedule=schedule,
        )

    def step(self, step: int) -> None:
        """One training step: micro-batches, gradients across groups, optimizer."""
        self.busy.begin(step)
        groups = self.entry.groups
        arm = None if self.emulated else self.sync.arm  # as under the strategy: see `pipeline.fit.training`
        if self.runner is not None and self.group is not None:
            first = sum(len(group.micro_batches) for group in groups[: groups.index(self.group)])
            sizes = self.group.micro_batches
            if self.leads:
                self.runner.train(
                    step,
                    [
                        MicroBatch(
                            body=self._body(first + i), samples=n, weight=n / self.batch, number=first + i
                        )
                        for i, n in enumerate(sizes)
                    ],
                    before_last_backward=arm,
                )
            else:
                self.runner.serve(step, sizes, before_last_backward=arm)
        self.busy.end()
        self.sync.finish()
        if self.sync_s:
            time.sleep(self.sync_s)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _body(self, number: int) -> Callable[[], Tensor]:
        return lambda: self.net.training_step(self.parts[number], 0)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()
        self.owner_groups.close()


@dataclass(frozen=True, slots=True)
class Timed:
    """What measured steps took.

    Attributes:
        steps_s: each: of the slowest leader, from its start to its next one's.
        processor_s: of all threads of all ranks, per step: on a machine that others use, too, the steadier figure.
    """

    steps_s: list[float]
    processor_s: float


def timed(step: Callable[[int], None], steps: int, warm_up: int = 1, *, leads: bool = True) -> Timed:
    """Runs steps and returns what they took. Collective."""
    starts: list[float] = []
    processor_s = 0.0
    for i in range(warm_up + steps):
        if i == warm_up:
            dist.barrier()
            processor_s = time.process_time()
        starts.append(time.perf_counter())
        step(i)
    starts.append(time.perf_counter())
    processor_s = time.process_time() - processor_s
    own = [b - a for a, b in zip(starts[warm_up:], starts[warm_up + 1 :], strict=False)] if leads else []
    everyone: list[tuple[list[float], float]] = [([], 0.0) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, (own, processor_s))
    return Timed(
        [max(times) for times in zip(*(times for times, _ in everyone if times), strict=True)],
        sum(spent_s for _, spent_s in everyone) / steps,
    )


def _sleeping(part: nn.Module, costs: Sequence[LayerCost], speed: float, pacer: Pacer) -> Sleeping:
    def together(each: Sequence[AffineCost]) -> AffineCost:
        fixed_s, per_sample_s = sum(c.fixed_s for c in each), sum(c.per_sample_s for c in each)
        return AffineCost(fixed_s=fixed_s / speed, per_sample_s=per_sample_s / speed)

    return Sleeping(part, together([c.forward for c in costs]), together([c.backward for c in costs]), pacer)


def run_stock(
    case: Case,
    model: ModelCost,
    cuts: Sequence[int],
    micro_batches: int,
    steps: int,
    *,
    warm_up: int = 1,
    emulated: bool = True,
) -> Timed:
    """Returns what steps took of one chain over all ranks by `torch.distributed.pipelining`, textbook 1F1B.

    Devices are emulated, links are not: it sends and receives as fast as the machine does. Loss and head are on the
    last stage, as it is made for. Collective.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    net: Net = make(case.model)
    speed = case.cluster.devices[rank].speed

    own = slice(cuts[rank], cuts[rank + 1])
    modules, costs = list(net.layers)[own], list(model.layers[own])
    if rank == world - 1:
        modules.append(net.head)
        costs.append(model.head)
    if emulated:  # part by part, as ours
        pacer = Pacer()
        modules = [_sleeping(module, [cost], speed, pacer) for module, cost in zip(modules, costs, strict=True)]
    if rank == 0:
        modules.insert(0, net.before)
    part = nn.Sequential(*modules)
    stage = PipelineStage(part, rank, world, CPU)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=net.loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    inputs, targets = dataset(case.model, case.global_batch).tensors

    def step(_: int) -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == world - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps, warm_up, leads=rank == 0)
