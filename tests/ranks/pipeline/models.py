"""Small models around a backbone, training steps of many kinds, and what they compute in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.pipeline.schedules import per_link, proportional
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate
from lightning_hetero.pipeline.decide.schedule import PipelineTimes, Schedule
from lightning_hetero.pipeline.runtime.execute.stage_runner import RunnerSettings, ScheduleOf, StageRunner
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.pipeline.runtime.step.random_streams import layer_seed, stream_seed
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import GroupPlan

WIDTH, LAYERS = 6, 7
SEED = 11


class Block(nn.Module):
    """Linear, ReLU in place, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(functional.relu_(self.linear(x)) + x)


class PairBlock(Block):
    """Passes on a mask and an index, too; also adds a parameter of the activation's own shape, one row."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, pair: tuple[Tensor, tuple[Tensor, Tensor]]) -> Any:
        x, (mask, index) = pair
        x = torch.where(mask, super().forward(x), x)[index] + self.shift.unsqueeze(0)
        return x, (~mask, index)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.backbone = nn.Sequential(*(block() for _ in range(LAYERS)))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(2, 2)


Batch = tuple[Tensor, Tensor]


def loss(net: Net, y: Tensor, target: Tensor) -> Tensor:
    y = functional.dropout(y, 0.1)
    return functional.mse_loss(net.head(y), target)


def plain(net: Net, batch: Batch) -> Any:
    x = functional.dropout(net.embed(batch[0]), 0.1)
    return {"loss": loss(net, net.backbone(x), batch[1]), "size": len(batch[0])}


def skip(net: Net, batch: Batch) -> Any:
    x = net.embed(batch[0])
    return {"loss": loss(net, net.backbone(x) + x * x, batch[1]), "size": len(batch[0])}


def twice(net: Net, batch: Batch) -> Any:
    x = net.embed(batch[0])
    first = net.backbone(x)
    second = net.backbone(net.mixed(first) + x)
    return {"loss": loss(net, second + first * x, batch[1]), "size": len(batch[0])}


def teacher(net: Net, batch: Batch) -> Any:
    """The first of two calls is under no_grad."""
    x = net.embed(batch[0])
    with torch.no_grad():
        goal = net.backbone(x)
    y = net.backbone(x)
    return {"loss": loss(net, y, batch[1]) + functional.mse_loss(y, goal + 1.0), "size": len(batch[0])}


def pair(net: Net, batch: Batch) -> Any:
    x = net.embed(batch[0])
    y, (mask, _) = net.backbone((x, (x.detach() > 0, torch.arange(len(x)).flip(0))))
    return {"loss": loss(net, torch.where(mask, y, -y), batch[1]), "size": len(batch[0])}


def data(net: Net, batch: Batch) -> Any:
    """The backbone's input needs no gradient."""
    return {"loss": loss(net, net.backbone(batch[0]), batch[1]), "size": len(batch[0])}


def apart(net: Net, batch: Batch) -> Any:
    """For odd sizes the loss does not depend on the backbone."""
    y = net.backbone(net.embed(batch[0]))
    if len(batch[0]) % 2:
        y = net.embed(batch[0])
    return {"loss": loss(net, y, batch[1]), "size": len(batch[0])}


def half(net: Net, batch: Batch) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = net.backbone(net.embed(batch[0]))
    return {"loss": loss(net, y.float(), batch[1]), "size": len(batch[0])}


@dataclass(frozen=True)
class Case:
    """One kind of training."""

    step: Callable[[Net, Batch], Any]
    block: type[nn.Module] = Block
    calls: int = 1
    frozen: Sequence[str] = ()  # beginnings of parameters' names
    checkpoint: bool = False
    steps: int = 3
    accumulate: int = 1  # batches per step of the optimizer
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    options: Mapping[str, Any] = field(default_factory=dict)  # of the stage runner

    def net(self) -> Net:
        torch.manual_seed(3)
        net = Net(self.block).to(self.dtype)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(self.frozen)))
        return net

    def batch(self, step: int, samples: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(samples, WIDTH, generator=generator, dtype=self.dtype)
        return x, x.sum(1, keepdim=True).tanh()


def assert_same(a: Any, b: Any) -> None:
    """Compares nested tuples of tensors and other values, bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def schedule_of(
    stages: int, calls: int = 1, policy: Callable[[PipelineTimes], SchedulePolicy] = per_link
) -> ScheduleOf:
    count = stages * calls

    def schedule(samples: tuple[int, ...]) -> Schedule:
        times = proportional(
            samples,
            forward_s=[1.0] * count,
            backward_s=[2.0] * count,
            link_s=[0.5] * (count - 1),
            loop_s=0.5,
            head_s=(0.1, 0.1),
            devices=tuple(range(stages)) * calls,
        )
        return generate(times, policy(times))

    return schedule


def plan(groups: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> list[GroupPlan]:
    """From ranks, cuts and micro-batches of each group."""

    def group(ranks: Sequence[int], cuts: Sequence[int], sizes: Sequence[int]) -> GroupPlan:
        depths = (1,) * len(ranks)
        return GroupPlan(
            ranks=tuple(ranks), cuts=tuple(cuts), samples=sum(sizes), micro_batches=tuple(sizes), depths=depths
        )

    return [group(*one) for one in groups]


def make_runner(case: Case, net: Net, group: GroupPlan, rank: int, name: str, **options: Any) -> StageRunner:
    """A rank's stage on the default group; ``name`` tells runs of one job apart."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    given = {"timeout_s": 30.0, "wire": dist.group.WORLD, "policy": per_link, **case.options, **options}
    policy = given.pop("policy")
    return StageRunner(
        RunnerSettings(
            rank=rank,
            device=torch.device("cpu"),
            seed=SEED,
            failures=FailureBoard(RunStore(store, b""), rank, patience_s=1.0),
            checkpoint_layers=case.checkpoint,
            **given,
        ),
        list(net.backbone),
        group=group,
        cut=BackboneCut(net.backbone) if rank == group.ranks[0] else None,
        schedule=schedule_of(len(group.ranks), case.calls, policy),
        calls=case.calls,
    )


# ---- the oracle --------------------------------------------------------------------------------------------------


@contextmanager
def seeded_layers(net: Net, step: int, number: int) -> Iterator[None]:
    """Each layer draws from its own stream, and what is behind the last one from another."""
    seed = torch.default_generator.manual_seed  # `torch.manual_seed` takes a millisecond for other backends
    seed(stream_seed(SEED, step, number))
    outside: list[Tensor] = []
    calls = [0] * LAYERS
    handles = []
    for i, layer in enumerate(net.backbone):

        def before(_: nn.Module, __: Any, i: int = i) -> None:
            outside.append(torch.get_rng_state())
            later = (calls[i],) if calls[i] else ()
            seed(layer_seed(stream_seed(SEED, step, number, *later), i))
            calls[i] += 1

        def after(*_: Any, i: int = i) -> None:
            torch.set_rng_state(outside.pop())
            if i == LAYERS - 1:  # behind the backbone, a stream for each of its calls
                seed(stream_seed(stream_seed(SEED, step, number), calls[i]))

        handles += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reference(case: Case, sizes: Sequence[int]) -> Net:
    """Trains in one process, micro-batch by micro-batch of the global batch."""
    net = copy.deepcopy(case.net())
    optimizer = optimizer_of([p for p in net.parameters() if p.requires_grad])
    for step in range(case.steps):
        batch = case.batch(step, sum(sizes))
        parts = list(zip(*(part.split(list(sizes)) for part in batch), strict=True))
        for number, part in enumerate(parts):
            with seeded_layers(net, step, number):
                (case.step(net, part)["loss"] * (len(part[0]) / sum(sizes))).backward()
        if (step + 1) % case.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net
