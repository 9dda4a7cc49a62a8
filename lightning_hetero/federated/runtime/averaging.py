"""The weighted average of the ranks' tensors, and FedProx's pull towards it (layer T).

    average = sum_r w_r t_r / sum_r w_r        floating and complex tensors: in float64, rounded once at the end
    largest of all ranks                       whole numbers and flags, e.g. BatchNorm's count of batches

In float64, so that what is equal on all ranks stays what it is, to the bit.

FedProx (Li et al., MLSys 2020): local loss + mu / 2 |w - w_average|^2, added as its gradient, mu (w - w_average).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.measure.device import device_of

_BUCKET = 4_000_000  # numbers that travel at once: 32 MB


def average_(tensors: Iterable[Tensor], part: float, group: dist.ProcessGroup) -> None:
    """Replaces tensors by their average over the ranks, in place; a collective.

    Args:
        tensors: the same number, shapes and types on all ranks; what is no floating number gets the largest value.
        part: this rank's part of the average; the ranks' sum up to 1. A rank of part 0 adds nothing, be it NaN.
        group: of the ranks.
    """
    means: list[Tensor] = []
    counts: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            means.append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        else:
            counts.append(tensor)
    for bucket in _buckets(means):
        packed = torch.cat([_wide(tensor).reshape(-1) for tensor in bucket])
        packed = packed * part if part else torch.zeros_like(packed)
        dist.all_reduce(packed, group=group)
        _unpack(packed, bucket)
    for bucket in _buckets(counts):
        packed = torch.cat([tensor.detach().to(torch.int64).reshape(-1) for tensor in bucket])
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
        _unpack(packed, bucket)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device_of(tensor.device).widest_float())


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in groups of one device and not too many numbers, in order."""
    bucket: list[Tensor] = []
    numbers = 0
    for tensor in tensors:
        if bucket and (tensor.device != bucket[0].device or numbers + tensor.numel() > _BUCKET):
            yield bucket
            bucket, numbers = [], 0
        bucket.append(tensor)
        numbers += tensor.numel()
    if bucket:
        yield bucket


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        tensor.detach().copy_(packed[start:end].reshape(tensor.shape))
        start = end


@torch.no_grad()
def add_proximal_(parameters: Sequence[Tensor], average: Sequence[Tensor], mu: float) -> None:
    """Adds the term's gradient to those of the parameters; one without a gradient is not trained and gets none.

    Args:
        parameters: as they are.
        average: as they were after the last average.
        mu: strength; under a loss scale, times the scale.
    """
    for parameter, before in zip(parameters, average, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - before, alpha=mu)
