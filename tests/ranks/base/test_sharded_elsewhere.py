"""A module that shards itself, under each engine: the sharded one trains it, the others name that one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_hetero import AutoStrategy, BatchRebalancer, ShardedBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import ENGINES, Scripted, Toy, rank_trainer, regression

STRATEGIES = {
    **{name: partial(make, monitor=False, **options) for name, (make, options) in ENGINES.items()},
    "auto": lambda: AutoStrategy(engines=["hetero_balanced", "hetero_stale"], monitor=False),
}  # fmt: skip


class InItsHook(Toy):
    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        meshes = [mesh["data_parallel"] for _ in range(1)]
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=meshes[0])


class ByAnother(Toy):
    """Nothing in the hook says what is done."""

    @property
    def mesh(self) -> DeviceMesh:
        assert self.device_mesh is not None
        return self.device_mesh["data_parallel"]

    def configure_model(self) -> None:
        shard(self.net, self.mesh)


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, FSDPModule):
        fully_shard(module, mesh=mesh)


class AtSetup(Toy):
    """On a mesh of its own."""

    def setup(self, stage: str) -> None:
        fully_shard(self.net, mesh=init_device_mesh("cpu", (self.trainer.world_size,)))


class Perhaps(Toy):
    """Shards itself where there is a mesh."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self.net, self.device_mesh["data_parallel"])


def loader(world: int) -> DataLoader:
    return DataLoader(regression(64), batch_size=16 // world)


def ends(rank: int, world: int) -> dict[str, str]:
    """Returns how each training ended."""
    ended = {}
    for kind in (InItsHook, ByAnother, AtSetup):
        for name, make in STRATEGIES.items():
            module = kind()
            try:
                rank_trainer(rank, world, make(), max_epochs=1).fit(module, loader(world))
            except TypeError as error:
                ended[f"{kind.__name__}, {name}"] = str(error)
    return ended


def test_every_other_engine_names_the_one_that_trains_it() -> None:
    for ended in run_ranks(2, ends):
        assert len(ended) == 3 * len(STRATEGIES)
        for case, message in ended.items():
            kind, engine = case.split(", ")
            begun = f"{kind} shards itself (fully_shard, device_mesh), and hetero_{engine} needs the whole model on"
            assert message.startswith(begun) and "use strategy='hetero_sharded'" in message, (case, message)


def alone(rank: int, world: int) -> tuple[int, ...]:
    for kind in (InItsHook, ByAnother):
        with pytest.raises(TypeError, match=r"hetero_balanced needs.*'hetero_sharded'"):
            rank_trainer(rank, world, STRATEGIES["balanced"](), max_epochs=1).fit(kind(), loader(1))
    with pytest.raises(TypeError, match=r"hetero_sharded cannot honour process_group.*no DistributedDataParallel"):
        rank_trainer(rank, world, AutoStrategy(process_group=object())).fit(InItsHook(), loader(1))
    with pytest.warns(UserWarning, match="static_graph=True has no effect with hetero_sharded"):
        trainer = rank_trainer(rank, world, AutoStrategy(static_graph=True, monitor=False), max_epochs=1)
        trainer.fit(ByAnother(), loader(1))
    assert isinstance(trainer.strategy, ShardedBalancedStrategy)
    return trainer.strategy.shares


def test_on_one_device_too() -> None:
    """Where stock DDP has no mesh for it, either; arguments of DDP's are not lost in silence."""
    assert run_ranks(1, alone) == [(16,)]


def taken(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (InItsHook, ByAnother, Perhaps):
        auto = AutoStrategy(
            monitor=False, global_batch_size=16, find_unused_parameters=False, process_group_backend="gloo",
            options={"hetero_sharded": {"save_distributed_checkpoint": False, "policy": Scripted()}},
        )  # fmt: skip
        module, rebalancer = kind(), BatchRebalancer()
        trainer = rank_trainer(rank, world, auto, max_epochs=2, callbacks=[rebalancer])
        trainer.fit(module, loader(world))
        assert trainer.strategy is auto.chosen and isinstance(auto.chosen, ShardedBalancedStrategy)
        assert auto.choice is not None and isinstance(module.net, FSDPModule)
        found[kind.__name__] = auto.choice.line, auto.chosen.shares, auto.chosen.given["save_distributed_checkpoint"]
    module = Perhaps()
    balanced = STRATEGIES["balanced"]()
    rank_trainer(rank, world, balanced, max_epochs=1).fit(module, loader(world))
    assert not isinstance(module.net, FSDPModule) and sum(balanced.shares) == 16
    return found


def test_the_automatic_choice_takes_it_before_the_module_is_sharded() -> None:
    """And a module that needs no mesh trains without one, under an engine that has none."""
    for found in run_ranks(2, taken):
        for kind, (line, shares, whole_file) in found.items():
            assert line == f"hetero_auto takes hetero_sharded: {kind} shards itself in configure_model"
            assert sum(shares) == 16 and len(shares) == 2 and whole_file is False
