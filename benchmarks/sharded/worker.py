"""One rank of the benchmark; started by torchrun, writes what it measured as JSON on rank 0."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.balanced.worker import StaticShares, Stopwatch, forgetting, gathered
from benchmarks.emulated import Emulated
from benchmarks.sharded.cases import Case, cases
from benchmarks.torchrun import as_rank
from lightning_hetero import HeteroPipelineStrategy, ShardedBalancedStrategy

FEATURES, BLOCKS = 32, 6


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


def flat_gradient(model: nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().detach().reshape(-1).clone() for g in found])


def dataset(samples: int, width: int = FEATURES, dtype: torch.dtype = torch.float64) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(samples, width, generator=g, dtype=dtype)
    return TensorDataset(x, x.sin().sum(1, keepdim=True) + x[:, :1] * (torch.arange(samples) % 7).unsqueeze(1))


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


def train(engine: str, case: Case, rank: int) -> tuple[Stopwatch, Model, Emulated]:
    """Runs one training with ``"stock"``, ``"static"``, ``"ours"`` or ``"pipeline"``."""
    samples = case.global_batch * (case.steps + 2)
    watch, emulated = Stopwatch(), Emulated(case.scenario)
    loader, weight = DataLoader(dataset(samples), batch_size=case.per_rank, shuffle=True), 1.0
    options: dict[str, Any] = {}
    if engine == "static":
        shares = case.best_static()
        loader = DataLoader(dataset(samples), batch_sampler=StaticShares(samples, shares, rank))
        weight = len(shares) * shares[rank] / sum(shares)
        options["use_distributed_sampler"] = False
    model = Model() if engine == "pipeline" else ShardedModel(weight=weight)
    world = len(case.scenario.speeds)
    if engine == "ours":
        options["strategy"] = ShardedBalancedStrategy(process_group_backend="gloo")
    elif engine == "pipeline":
        options["strategy"] = HeteroPipelineStrategy(backbone="blocks", process_group_backend="gloo")
    else:
        options["strategy"] = ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
        )
    trainer = Trainer(
        accelerator="cpu", devices=world, max_steps=case.steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watch, emulated], **options,
    )  # fmt: skip
    gc.collect()  # of the imports' and the last run's, or it comes in some step of some engine
    with slow_link(case.slow_link_s):
        trainer.fit(model, loader)
    return watch, model, emulated


def true_gradient(case: Case) -> Tensor:
    """Gradient of the mean over the first global batch, in one process."""
    data = dataset(case.global_batch * (case.steps + 2))
    first = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: case.global_batch]
    model = Model()
    x, y = data.tensors
    nn.functional.mse_loss(model(x[first]), y[first]).backward()
    return flat_gradient(model)


def run_case(case: Case, repeats: int, rank: int) -> dict[str, Any]:
    """Runs every engine ``repeats`` times, interleaved; returns raw steps, shares and gradient errors of rank 0."""
    engines = ["stock", "ours"] + ["ours again", "static"] * (not case.equal) + ["stock again"] * case.equal
    engines += ["pipeline"] * case.pipeline
    out: dict[str, Any] = {e: {f: [] for f in ("steps_s", "samples", "gradient_error", "taken")} for e in engines}
    reference = true_gradient(case)
    for _ in range(repeats):
        with forgetting():
            for engine in engines:
                watch, model, emulated = train(engine.split()[0], case, rank)
                out[engine]["steps_s"].append(watch.steps_s())
                if engine == "pipeline":
                    continue
                assert isinstance(model, ShardedModel) and model.first_gradient is not None
                error = float((model.first_gradient - reference).norm() / reference.norm())
                samples = gathered(watch.samples)
                out[engine]["samples"].append([list(step) for step in zip(*samples, strict=True)])
                out[engine]["gradient_error"].append(error)
                out[engine]["taken"].append(max(gathered(emulated.taken())))
    return out


def measure(rank: int, repeats: int, quick: bool) -> dict[str, Any]:
    chosen = [case.quick() if quick else case for case in cases()]
    return {case.name: run_case(case, repeats, rank) for case in chosen}


if __name__ == "__main__":
    _path, _repeats, _extent = sys.argv[1:]
    as_rank(Path(_path), lambda rank: measure(rank, int(_repeats), _extent == "quick"))
