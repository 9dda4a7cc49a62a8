"""The arguments that the strategies of all engines share, and those of `DDPStrategy` (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_hetero.base.checks import check_choice, check_counts
from lightning_hetero.types import LossReduction

BatchSampling = Literal["refuse", "pool"]
BatchWeight = Callable[[Any], float]


class DDPArguments(TypedDict, total=False):
    """The arguments of `DDPStrategy`, and of the `DistributedDataParallel` that it makes, as in Lightning and torch.

    An engine without DDP's all-reduce refuses the ``ddp_comm_*`` on several devices. One without
    `DistributedDataParallel` refuses those of its arguments that change what is trained, and names the others in one
    warning. Parameters that a loss does not use need no ``find_unused_parameters`` there.
    """

    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    ddp_comm_state: object | None
    ddp_comm_hook: Callable[..., Any] | None
    ddp_comm_wrapper: Callable[..., Any] | None
    model_averaging_period: int | None
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    # of DistributedDataParallel, but for what Lightning sets itself
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: Any
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: list[tuple[str, Any]] | None
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class ModelParallelArguments(TypedDict, total=False):
    """The arguments of `ModelParallelStrategy` that need no words of ours, as in Lightning."""

    save_distributed_checkpoint: bool
    process_group_backend: str | None
    timeout: timedelta | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSettings:
    """The arguments on batches that mean the same to every engine; see `HeteroStrategy`.

    Raises:
        ValueError, TypeError: one is no such argument.
    """

    global_batch_size: int | None = None
    batch_sampler: BatchSampling = "refuse"
    loss_reduction: LossReduction = "mean"
    batch_weight: BatchWeight | None = None
    own_data: bool | None = None

    def __post_init__(self) -> None:
        check_counts(global_batch_size=self.global_batch_size)
        check_choice("batch_sampler", self.batch_sampler, ("refuse", "pool"))
        check_choice("loss_reduction", self.loss_reduction, ("mean", "sum"))
        check_choice("own_data", self.own_data, (None, True, False))
        if not (self.batch_weight is None or callable(self.batch_weight)):
            raise TypeError(f"batch_weight={self.batch_weight!r} must be a function of the batch, or None")

    def weight_in(self, module: nn.Module) -> BatchWeight | None:
        """Returns what counts a batch, as given or the module's own method; None: samples count."""
        return self.batch_weight or getattr(module, "batch_weight", None)
