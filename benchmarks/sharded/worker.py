"""One rank of the benchmark; writes what it measured as JSON on rank 0."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks.emulated import Emulated
from benchmarks.kit.training import (
    Clock,
    Compared,
    StaticShares,
    first_gradient,
    fit,
    flat_gradient,
    forgetting,
    gathered,
    gloo,
    synthetic,
)
from benchmarks.ranks import as_rank
from benchmarks.sharded.cases import Case, cases
from lightning_hetero import HeteroPipelineStrategy, ShardedBalancedStrategy

FEATURES, BLOCKS = 32, 6
MEMORY_WIDTH, MEMORY_STEPS = 1024, 6  # 50 million parameters in float32


class Block(nn.Module):
    """A residual block, as in a transformer without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(LightningModule):
    """A small float64 model, so that emulated work dominates and gradients can be compared to 1e-12.

    Args:
        weight: samples of this rank's part over those of an equal one, where the loss is weighted by hand.
        width: of the blocks.
        dtype: of the parameters.
    """

    def __init__(self, *, weight: float = 1.0, width: int = FEATURES, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = weight
        self.blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS))).to(dtype)
        self.head = nn.Linear(width, 1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.weight * nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class ShardedModel(Model):
    """Shards itself, and keeps its first gradient."""

    first_gradient: Tensor | None = None

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.first_gradient is None:
            self.first_gradient = flat_gradient(self)


@contextmanager
def slow_link(seconds: float) -> Iterator[None]:
    """Inside, FSDP's collectives take so much longer, on every rank, as in a ring with one slow link."""
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    real = {name: getattr(dist, name) for name in names}

    def slow(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return real[name](*args, **kwargs)

        return collective

    if seconds:
        for name in names:
            setattr(dist, name, slow(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, name, real[name])


def train(name: str, case: Case, rank: int) -> tuple[Clock, Model, Emulated]:
    """Runs one training with ``"stock"``, ``"static"``, ``"ours"`` or ``"pipeline"``."""
    samples = case.global_batch * (case.steps + 2)
    clock, emulated, weight, data = Clock(), Emulated(case.scenario), 1.0, synthetic(samples, FEATURES)
    loader = DataLoader(data, batch_size=case.per_rank, shuffle=True)
    if name == "static":
        shares = case.best_static()
        loader = DataLoader(data, batch_sampler=StaticShares(samples, shares, rank))
        weight = len(shares) * shares[rank] / sum(shares)
    model = Model() if name == "pipeline" else ShardedModel(weight=weight)
    with slow_link(case.slow_link_s):
        fit(strategy(name), model, loader, steps=case.steps, callbacks=[clock, emulated],
            use_distributed_sampler=name != "static")  # fmt: skip
    return clock, model, emulated


def strategy(name: str) -> Any:
    """Returns a new one."""
    if name == "ours":
        return gloo(ShardedBalancedStrategy)
    if name == "pipeline":
        return gloo(HeteroPipelineStrategy, backbone="blocks")
    return ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, process_group_backend="gloo"
    )


def run_case(case: Case, repeats: int, rank: int) -> dict[str, Any]:
    """Runs every engine ``repeats`` times, interleaved; returns raw steps, shares and gradient errors of rank 0."""
    engines = ["stock", "ours"] + ["ours again", "static"] * (not case.equal) + ["stock again"] * case.equal
    engines += ["pipeline"] * case.pipeline
    data = synthetic(case.global_batch * (case.steps + 2), FEATURES)
    compared = Compared(engines, first_gradient(Model(), data, case.global_batch))
    for _ in range(repeats):
        with forgetting():
            for name in engines:
                clock, model, emulated = train(name.split()[0], case, rank)
                compared.add(name, clock, emulated.taken(), getattr(model, "first_gradient", None))
    return compared.found


class _Adam(ShardedModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is gathered."""


def peak(name: str) -> dict[str, Any]:
    """Returns each rank's peak of resident memory above what it had before the model [bytes]: once per process."""
    data = synthetic(64 * MEMORY_STEPS, MEMORY_WIDTH, torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    own = gloo(ShardedBalancedStrategy, rebalance=False) if name == "ours" else strategy(name)
    model = _Adam(width=MEMORY_WIDTH, dtype=torch.float32)
    fit(own, model, DataLoader(data, batch_size=32), steps=MEMORY_STEPS, callbacks=[])
    return {"bytes": [1024 * kb for kb in gathered(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)]}


def measure(rank: int, name: str, repeats: int, quick: bool) -> dict[str, Any]:
    if name in ("stock", "ours"):
        return peak(name)
    case = next(case for case in cases() if case.name == name)
    return run_case(case.quick() if quick else case, repeats, rank)


if __name__ == "__main__":
    _path, _name, _repeats, _extent = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(rank, _name, int(_repeats), _extent == "quick"))
