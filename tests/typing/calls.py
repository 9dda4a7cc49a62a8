"""What a type checker says of users' code: never run, read by pyright in ``scripts/lint``.

A wrong call below is marked with the error that it must be; a mark without an error fails the check.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
from lightning.pytorch import Trainer

from lightning_hetero import (
    AutoStrategy,
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    ShardedBalancedStrategy,
)
from lightning_hetero.optim import UnevenZeroOptimizer


def right() -> None:
    balanced = LoadBalancedStrategy(
        global_batch_size=512, loss_reduction="sum", batch_weight=lambda batch: batch["mask"].sum().item(),
        batch_sampler="pool", monitor=False, own_data=False, timeout=timedelta(minutes=5), find_unused_parameters=True,
        parallel_devices=[torch.device("cpu")], process_group_backend="gloo",
    )  # fmt: skip
    Trainer(strategy=balanced)
    print(balanced.shares, balanced.step_report(), balanced.global_batch_size)
    trainer = Trainer(strategy="hetero_balanced")
    print(cast("LoadBalancedStrategy", trainer.strategy).shares)
    BoundedStalenessStrategy(global_batch_size=64, bound=2, start_method="spawn")
    HeteroPipelineStrategy(global_batch_size=64, backbone="blocks", gradient_as_bucket_view=True)
    FederatedStrategy(global_batch_size=64, local_steps=5)
    AutoStrategy(global_batch_size=64, engines=["hetero_balanced"])
    ShardedBalancedStrategy(
        data_parallel_size=2, tensor_parallel_size="auto", shard=[torch.nn.TransformerEncoderLayer],
        save_distributed_checkpoint=False, timeout=timedelta(minutes=5), batch_weight=lambda batch: len(batch),
    )  # fmt: skip
    layer = torch.nn.Linear(1, 1)
    UnevenZeroOptimizer(layer.parameters(), torch.optim.AdamW, lr=1e-3)
    UnevenZeroOptimizer([{"params": [layer.bias], "lr": 0.1}], torch.optim.SGD, capacities=[24, 10]).step()


def wrong() -> None:
    LoadBalancedStrategy(64)  # pyright: ignore[reportCallIssue]
    LoadBalancedStrategy(global_batchsize=512)  # pyright: ignore[reportCallIssue]
    LoadBalancedStrategy(global_batch_size="512")  # pyright: ignore[reportArgumentType]
    LoadBalancedStrategy(loss_reduction="average")  # pyright: ignore[reportArgumentType]
    LoadBalancedStrategy(batch_weight=5)  # pyright: ignore[reportArgumentType]
    LoadBalancedStrategy(policy="tunning")  # pyright: ignore[reportArgumentType]
    LoadBalancedStrategy(find_unused_parameter=True)  # pyright: ignore[reportCallIssue]
    LoadBalancedStrategy(timeout=30)  # pyright: ignore[reportArgumentType]
    BoundedStalenessStrategy(batch_sampler="pools")  # pyright: ignore[reportArgumentType]
    BoundedStalenessStrategy(start_method="popn")  # pyright: ignore[reportArgumentType]
    HeteroPipelineStrategy(monitor="no")  # pyright: ignore[reportArgumentType]
    HeteroPipelineStrategy(static_graph="yes")  # pyright: ignore[reportArgumentType]
    FederatedStrategy(global_batch_size=6.4)  # pyright: ignore[reportArgumentType]
    UnevenZeroOptimizer([], torch.optim.SGD, capacities="equal")  # pyright: ignore[reportArgumentType]
    UnevenZeroOptimizer([], torch.nn.Linear)  # pyright: ignore[reportArgumentType]
    AutoStrategy(own_data="no")  # pyright: ignore[reportArgumentType]
    ShardedBalancedStrategy(shard="all")  # pyright: ignore[reportArgumentType]
    ShardedBalancedStrategy(find_unused_parameters=True)  # pyright: ignore[reportCallIssue]
    AutoStrategy(globl_batch_size=4)  # pyright: ignore[reportCallIssue]
