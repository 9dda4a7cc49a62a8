"""What ranks gather although their parts, and so their tensors, are of unequal size (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DIMS = 8  # of a tensor, at most


def gather_unequal(tensor: Tensor, gather: Callable[[Tensor], Any], *, group: Any, engine: str) -> Any:
    """Returns what ``gather`` makes of the ranks' tensors: of equal shapes, in front a dimension of the ranks.

    Of tensors that differ in one dimension, e.g. the samples, all entries come along that dimension in the order of the
    ranks, with a dimension of size 1 in front: ``flatten(0, 1)``, ``flatten()``, ``reshape(-1, C)``, ``torch.cat`` of
    its items and means give what they give of equal parts. Differentiable where ``gather`` is.

    Args:
        tensor: this rank's.
        gather: gathers tensors of equal shapes.
        group: of ranks; None: all.
        engine: for the error.

    Raises:
        RuntimeError: the shapes differ in more than one dimension; on all ranks.
    """
    if not 0 < tensor.dim() <= _DIMS:  # numbers have one shape
        return gather(tensor)
    own = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_DIMS - tensor.dim())], device=tensor.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    shapes = [tuple(row[1 : 1 + row[0]]) for row in torch.stack(everyone).tolist()]
    if len(set(shapes)) == 1:
        return gather(tensor)
    differ = [d for d, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]
    if len({len(shape) for shape in shapes}) > 1 or len(differ) > 1:
        told = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise RuntimeError(
            f"all_gather of tensors of the shapes {told}: under strategy='hetero_{engine}' ranks have different numbers"
            " of samples, and their tensors may differ in one dimension, not in several: pad the others to a common"
            " length, or gather objects by torch.distributed.all_gather_object"
        )
    dim, sizes = differ[0], [shape[differ[0]] for shape in shapes]
    missing = list(tensor.shape)
    missing[dim] = max(sizes) - tensor.shape[dim]
    padded = gather(torch.cat([tensor, tensor.new_zeros(missing)], dim=dim))
    parts = [padded[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)]
    return torch.cat(parts, dim=dim).unsqueeze(0)
