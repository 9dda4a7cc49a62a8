"""Several small sums over all ranks in one message, by the shortest way there is (layer T).

    on one node      memory that all map [one_node.near_round]
    between nodes    everyone sends everyone [one_round]
    not small        each by itself, as torch.distributed sums
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.transport.one_node.near_round import NearRound
from lightning_hetero.transport.one_round import SMALL_BYTES, Sum, start_gather, start_sum

__all__ = ["start_sums"]

_ALIGNED_BYTES = 8  # where a tensor may begin in a message: no dtype takes more


def start_sums(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, near: NearRound | None = None
) -> list[Sum]:
    """Starts to sum several tensors over the ranks of a group, in one message if they are small together; collective.

    Args:
        tensors: not empty ones, on one kind of device; each as for `start_sum`.
        group: that takes all of them.
        near: the ranks of the group, if they are on one node: small ones need no message of the group's then.

    Returns:
        Their sums, in order.
    """
    size_bytes = sum(map(_room, tensors))
    kinds = {tensor.device.type for tensor in tensors}
    assert len(kinds) == 1, f"tensors on {sorted(kinds)}: no group of NCCL takes those of the CPU"
    if kinds != {"cpu"} or (dist.get_world_size(group) - 1) * size_bytes > SMALL_BYTES:
        return [start_sum(tensor, group) for tensor in tensors]
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    gaps = [row.new_zeros(_room(tensor) - tensor.nbytes) for tensor, row in zip(tensors, rows, strict=True)]
    pieces = [piece for pair in zip(rows, gaps, strict=True) for piece in pair]
    if near is not None and near.takes(size_bytes):
        work, parts = near.start(pieces)
    else:
        work, parts = start_gather(torch.cat(pieces), group)
    sums: list[Sum] = []
    for tensor, part in zip(tensors, parts.split([*map(_room, tensors)], dim=1), strict=True):
        values = part[:, : tensor.nbytes].view(tensor.dtype).view(-1, *tensor.shape)
        sums.append(Sum(work, tensor, values))
    return sums


def _room(tensor: Tensor) -> int:
    """What a tensor takes in a message with others [bytes]."""
    return -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
