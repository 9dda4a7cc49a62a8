"""What ranks reduce and gather although their batches, and so their tensors, differ in size (layer L).

Lightning reduces logged tensors through the strategy, so that is where they are put right. Metric objects of
torchmetrics gather their own states: summed and concatenated ones are right anyway, but `MeanMetric` counts all
updates the same, so give it ``weight=len(x)`` with a batch mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DIMS = 8  # of a tensor, at most


def is_mean(reduce_op: object) -> bool:
    """Returns whether a Lightning ``reduce_op`` asks for a mean over ranks."""
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return reduce_op == dist.ReduceOp.AVG


def weighted_mean_(value: Tensor, weight: float, group: dist.ProcessGroup | None) -> Tensor:
    """Replaces ``value`` by ``sum_r w_r v_r / sum_r w_r`` over the group, in place, and returns it.

    With all weights zero it is the plain mean. Any shape; the arithmetic is float64.
    """
    flat = value.detach().to(torch.float64).reshape(-1)
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


def integer_mean_(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the mean of an integer tensor over the group as a float64 tensor.

    Lightning sums the batch sizes of an epoch as integers and divides in integers: 2.6.6 logs 5.571 where 5.2 is
    true when the sum is no multiple of the world size (upstream issue 21859).
    """
    mean = value.to(torch.float64)
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def gather_unequal(
    tensor: Tensor, gather: Callable[[Tensor], Any], *, group: Any, engine: str,
    counted: Callable[[list[int]], Sequence[int]] = list,
) -> Any:  # fmt: skip
    """Returns what ``gather`` makes of the ranks' tensors: of equal shapes, in front a dimension of the ranks.

    Of tensors that differ in one dimension, e.g. the samples, all entries come along that dimension in the order of the
    ranks, with a dimension of size 1 in front: ``flatten(0, 1)``, ``flatten()``, ``reshape(-1, C)``, ``torch.cat`` of
    its items and means give what they give of equal parts. Differentiable where ``gather`` is.

    Args:
        tensor: this rank's.
        gather: gathers tensors of equal shapes.
        group: of ranks; None: all.
        engine: for the error.
        counted: returns, of the sizes of that dimension, the first one if all are equal, how many entries of each rank
            come; the same on all ranks.

    Raises:
        RuntimeError: the shapes differ in more than one dimension; on all ranks.
    """
    if not 0 < tensor.dim() <= _DIMS:  # numbers have one shape
        return gather(tensor)
    own = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_DIMS - tensor.dim())], device=tensor.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    shapes = [tuple(row[1 : 1 + row[0]]) for row in torch.stack(everyone).tolist()]
    differ = [d for d, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    if len({len(shape) for shape in shapes}) > 1 or len(differ) > 1:
        told = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise RuntimeError(
            f"all_gather of tensors of the shapes {told}: under strategy='hetero_{engine}' ranks have different numbers"
            " of samples, and their tensors may differ in one dimension, not in several: pad the others to a common"
            " length, or gather objects by torch.distributed.all_gather_object"
        )
    dim = differ[0] if differ else 0
    sizes = [shape[dim] for shape in shapes]
    kept = counted(sizes)
    if len({*sizes, *kept}) == 1:
        return gather(tensor)
    missing = list(tensor.shape)
    missing[dim] = max(sizes) - tensor.shape[dim]
    padded = gather(torch.cat([tensor, tensor.new_zeros(missing)], dim=dim))
    parts = [padded[rank].narrow(dim, 0, size) for rank, size in enumerate(kept)]
    return torch.cat(parts, dim=dim).unsqueeze(0)
