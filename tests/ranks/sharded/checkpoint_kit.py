"""Runs of one model under every strategy, sharded or not, which save on their way and go on from what was saved."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hetero import (
    BoundedStalenessStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    ShardedBalancedStrategy,
)
from lightning_hetero.balanced.runtime.shard import fully_sharded
from tests.ranks.kit import FEATURES, Scripted, Weights, rank_trainer
from tests.ranks.resume_kit import BATCH, Noting, Result, loader

WIDTH, SAMPLES = 8, 64  # no tail: stock Lightning would repeat samples


class Layers(Noting):
    """Layers of one shape, so that no state of one may go to another unnoticed; groups are not in the model's order.

    Args:
        optimizer: ``"adam"``; ``"odd"``, the same with the groups' parameters from last to first; ``"sgd"``, which has
            no state.
    """

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
        self.net = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))).double()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.optimizer = optimizer
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def configure_optimizers(self) -> Any:
        named = list(self.net.named_parameters())[:: -1 if self.optimizer == "odd" else 1]
        first = [p for name, p in named if name.endswith("bias")]
        groups = [
            {"params": first, "lr": 3e-2},
            {"params": [p for name, p in named if not name.endswith("bias")]},
        ]
        if unused := [p for name, p in self.named_parameters() if name.startswith("unused")]:
            groups.append({"params": unused})
        kind = torch.optim.SGD if self.optimizer == "sgd" else torch.optim.AdamW
        optimizer = kind(groups, lr=1e-2, weight_decay=1e-2, foreach=True)  # as on a GPU: quicker for shards
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Sharded(Layers):
    """The same, sharded by its own hook."""

    def configure_model(self) -> None:
        if not fully_sharded(self):
            assert self.device_mesh is not None
            mesh, across = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
            if across.size() > 1:
                parallelize_module(self.net, across, {"2": ColwiseParallel(), "4": RowwiseParallel()})
            for layer in [m for m in self.net if isinstance(m, nn.Linear)][1:3]:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def strategy(name: str, world: int, **given: Any) -> Any:
    """Returns a strategy by the words of a test.

    Ours over shards are ``"whole"`` and ``"folder"``, and with two ranks that share each part ``"tp-..."``.
    """
    if world == 1 and name == "one":
        return "auto"
    if name in ("stock-whole", "stock-folder"):
        return ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=name == "stock-folder",
            process_group_backend="gloo",
        )  # fmt: skip
    ours = {"monitor": False, "process_group_backend": "gloo", "global_batch_size": BATCH, **given}
    if name == "stale":
        return BoundedStalenessStrategy(policy="bsp", **ours)
    if name == "pipeline":
        return HeteroPipelineStrategy(backbone="net", **ours)
    ours = {"policy": Scripted(), "exchange_every": 1, **ours}
    if name.startswith("tp-"):
        ours["tensor_parallel_size"] = 2
    if name == "balanced":
        return LoadBalancedStrategy(**ours)
    return ShardedBalancedStrategy(save_distributed_checkpoint=name.endswith("folder"), **ours)


def whole(module: nn.Module) -> Weights:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}
    return Weights({k: v.detach().clone() for k, v in state.items() if k != "count"})


def fit(
    rank: int, world: int, name: str, *, optimizer: str = "adam", ckpt: str | None = None, epochs: int = 2,
    batch_size: int | None = None, given: Any = None, accumulate: int = 2, **trainer: Any,
) -> Result:  # fmt: skip
    gc.collect()
    each = batch_size or BATCH // world
    how = strategy(name, world, **(given or {}))
    module = (Sharded if isinstance(how, ModelParallelStrategy) else Layers)(optimizer)
    trains = rank_trainer(rank, world, how, max_epochs=epochs, accumulate_grad_batches=accumulate, **trainer)
    trains.fit(module, loader(each, samples=SAMPLES), ckpt_path=ckpt)
    return whole(module), [[int(i) for i in batch] for batch in module.seen]
