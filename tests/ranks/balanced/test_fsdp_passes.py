"""A rank that runs out of memory anywhere in a pass of a sharded model: its peers finish, and no gradient is lost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hetero.balanced.runtime.fsdp_passes import FSDPPasses, in_reduction
from tests.ranks.balanced.sharded_kit import goes_on_without_memory
from tests.ranks.harness import run_ranks

VERSIONS = f"torch {torch.__version__}, checked with 2.13: what fsdp_passes.py takes from torch's FSDP has changed"

WIDTH, SAMPLES = 6, 8
PARTS = {2: (5, 3), 4: (3, 1, 2, 2)}


class Wall(nn.Module):
    """Memory ends in its forward or its backward pass, once, for the batch that is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: str | None = None

    def check(self, where: str, rows: int) -> None:
        if self.fails == where and rows > 1:
            raise torch.OutOfMemoryError(where)

    def forward(self, x: Tensor) -> Tensor:
        self.check("forward", len(x))
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda g: self.check("backward", len(g)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.wall, self.second = nn.Linear(WIDTH, 5), Wall(), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.wall(torch.tanh(self.first(x))))


class Net(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice
        self.embed, self.begin = nn.Linear(WIDTH, WIDTH), Wall()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.end, self.head = Wall(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(self.embed(x))
        for block in self.blocks:
            x = block(x)
            if self.twice:
                x = block(x)
        return self.head(self.end(x))


def walls(net: nn.Module) -> list[Wall]:
    return [m for m in net.modules() if isinstance(m, Wall)]


def sharded(net: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    for block in net.blocks:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum() / SAMPLES


class Rank:
    """Passes as `ShardedRecovery` makes them, with half as many samples after each failure."""

    def __init__(self, net: nn.Module, passes: FSDPPasses, world: int) -> None:
        self.net, self.passes, self.world, self.failures = net, passes, world, 0

    def attempt(self, x: Tensor, void: float) -> int | None:
        """Returns after how many collectives memory ran out; the pass is over on all ranks."""
        passes = self.passes
        passes.begin(void=void)
        try:
            (loss_of(self.net, x) * self.world).backward()
        except torch.OutOfMemoryError as error:
            assert not in_reduction(error)
        else:
            passes.end()
            return None
        done = passes.done
        with passes.again(done):
            loss_of(self.net, x[:1]).backward()
        passes.end()
        return done

    def step(self, x: Tensor) -> None:
        todo: list[tuple[Tensor, float]] = [(x, 0)]
        while self.anybody(bool(todo)):
            if not todo:
                assert self.attempt(x[:1] * math.nan, math.inf) is None
                continue
            piece, void = todo.pop()
            if (done := self.attempt(piece, void)) is not None:
                self.failures += 1
                todo += [(half, max(void, done)) for half in piece.chunk(2)]

    def anybody(self, more: bool) -> bool:
        flag = torch.tensor(float(more))
        dist.all_reduce(flag)
        return bool(flag)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, of `sharded`, of the test
    "plain": (2, {}, {}),
    "kept after forward": (2, {"reshard_after_forward": False}, {}),
    "checkpointed": (2, {}, {"checkpoint": True}),
    "used twice": (2, {}, {"twice": True}),
    "prefetched": (2, {}, {"prefetch": True}),
    "wide sums": (2, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, {}),
    "replicas": (4, {}, {"mesh": (2, 2)}),
}


def places(net: nn.Module) -> Iterator[tuple[int, str]]:
    for i in range(len(walls(net))):
        yield i, "forward"
        yield i, "backward"


def job(rank: int, world: int, options: dict[str, Any], test: dict[str, Any]) -> list[tuple[str, float, int]]:
    torch.manual_seed(0)
    plain = Net(test.get("twice", False)).double()
    shape = test.get("mesh", (world,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape):])
    net: Any = copy.deepcopy(plain)
    if test.get("checkpoint"):
        net.blocks = nn.ModuleList([checkpoint_wrapper(b) for b in net.blocks])
    sharded(net, mesh, **options)
    if test.get("prefetch"):
        for before, after in zip(net.blocks, list(net.blocks)[1:], strict=False):
            assert isinstance(before, FSDPModule) and isinstance(after, FSDPModule)
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    passes = FSDPPasses(net)
    assert not passes.why_not(), VERSIONS
    parts = PARTS[world]
    start = sum(parts[:rank])
    found: list[tuple[str, float, int]] = []
    for number, (i, where) in enumerate(places(net)):
        failing = {number % world} if number % 3 else {0, world - 1}
        ranks = Rank(net, passes, world)
        net.zero_grad()
        plain.zero_grad()
        if number == 4:  # leaves the root's parameters gathered
            with torch.no_grad():
                net(torch.zeros(1, WIDTH, dtype=torch.float64))
        for micro in range(2):
            x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
            walls(net)[i].fails = where if rank in failing and micro == (number // 2) % 2 else None
            ranks.step(x[start : start + parts[rank]])
            loss_of(plain, x).backward()
        walls(net)[i].fails = None
        worst = 0.0
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and q.grad is not None
            worst = max(worst, float((p.grad.full_tensor() - q.grad).abs().max()))
        found.append((f"{i} {where}", worst, ranks.failures))
        assert (ranks.failures > 0) == (rank in failing and parts[rank] > 1), (i, where)
    passes.close()
    return found


@goes_on_without_memory
@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("used twice", "replicas")
def test_no_gradient_is_lost_wherever_memory_ends(name: str) -> None:
    world, options, test = CASES[name]
    for found in run_ranks(world, job, options, test):
        assert len(found) == 10
        assert all(worst <= 1e-13 for _, worst, _ in found), (found, VERSIONS)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "reduced in each backward pass": ({}, lambda net: net.set_requires_gradient_sync(False)),
    "set_reshard_after_backward(False)": ({}, lambda net: net.set_reshard_after_backward(False)),
    "a hook of set_all_reduce_hook": ({}, lambda net: net.blocks[0].set_all_reduce_hook(print)),
    "tensor-parallel ranks": ({"tensor": True}, lambda net: net),
    "with a number for reshard_after_forward": ({"reshard_after_forward": 2}, lambda net: net),
    "": ({}, lambda net: net),
}


def refused_job(rank: int, world: int) -> dict[str, str]:
    told: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (world,))
    for reason, (options, change) in REFUSED.items():
        meshes = None
        net: Any = Net()
        if options.pop("tensor", False):
            meshes = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(net.blocks[0], meshes["tensor"], plan)
        sharded(net, meshes["data"] if meshes else mesh, **options)
        before = net._get_fsdp_state()._fsdp_param_group._all_gather_comm
        change(net)
        passes = FSDPPasses(net)
        told[reason] = passes.why_not()
        passes.close()
        assert net._get_fsdp_state()._fsdp_param_group._all_gather_comm is before
    return told


def reduced_job(rank: int, world: int) -> bool:
    net = sharded(Net(), init_device_mesh("cpu", (world,)))
    loss = loss_of(net, torch.randn(2, WIDTH))
    place = "torch.distributed.fsdp._fully_shard._fsdp_collectives._to_dtype_if_needed"
    with mock.patch(place, side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError) as error:
        loss.backward()
    return in_reduction(error.value)


def test_it_is_seen_where_reduced_gradients_may_be_lost() -> None:
    assert all(run_ranks(2, reduced_job)), VERSIONS


@goes_on_without_memory
def test_what_passes_cannot_be_finished_with_is_said() -> None:
    for told in run_ranks(4, refused_job):
        assert all(reason in why and bool(reason) == bool(why) for reason, why in told.items()), (told, VERSIONS)

