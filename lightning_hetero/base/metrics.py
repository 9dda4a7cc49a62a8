"""Means of logged values that stay right when the ranks' batches differ in size (layer L).

Lightning reduces logged tensors through the strategy, so that is where they are put right. Metric objects of
torchmetrics gather their own states: summed and concatenated ones are right anyway, but `MeanMetric` counts updates
alike, so give it ``weight=len(x)`` with a batch mean.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.measure.device import device_of


def is_mean(reduce_op: object) -> bool:
    """Tells whether a Lightning ``reduce_op`` asks for a mean over ranks."""
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return reduce_op == dist.ReduceOp.AVG


def weighted_mean_(value: Tensor, weight: float, group: dist.ProcessGroup) -> Tensor:
    """Replaces ``value`` by ``sum_r w_r v_r / sum_r w_r`` over the group, in place, and returns it.

    With all weights zero it is the plain mean. Any shape; the arithmetic is float64 where the device has it.
    """
    wide = device_of(value.device).widest_float()
    flat = value.detach().to(wide).reshape(-1)
    weighted = flat * weight if weight else torch.zeros_like(flat)  # a dummy batch may be NaN
    packed = torch.cat([weighted, flat.new_full((1,), weight), flat])
    dist.all_reduce(packed, group=group)
    n = flat.numel()
    total = packed[n]
    plain = packed[n + 1 :] / dist.get_world_size(group)
    mean = torch.where(total > 0, packed[:n] / torch.where(total > 0, total, torch.ones_like(total)), plain)
    with torch.no_grad():
        value.copy_(mean.reshape(value.shape))
    return value


def integer_mean_(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the mean of an integer tensor over the group as a float64 tensor.

    Lightning sums the batch sizes of an epoch as integers and divides in integers: 2.6.6 logs 5.571 where 5.2 is
    true when the sum is no multiple of the world size (upstream issue 21859).
    """
    mean = value.to(torch.float64)
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)
