"""Norms of gradients that are divided among ranks, those of one model perhaps in different ways (layer T).

With tensor parallelism the parameters of some layers are divided over both dimensions of the mesh and those of others
over one. torch adds up the norms of one mesh only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def total_norm(gradients: Sequence[Tensor], order: float) -> Tensor | None:
    """Returns the norm of all gradients together; None: they are of one mesh, and torch's is right."""
    meshes = {getattr(gradient, "device_mesh", None) for gradient in gradients}
    if len(meshes) < 2:
        return None
    parts = [[one for one in gradients if getattr(one, "device_mesh", None) == mesh] for mesh in meshes]
    return torch.stack([_whole(get_total_norm(part, order)) for part in parts]).norm(order)


def each_norm(parameters: Sequence[Tensor], order: float) -> list[float | None]:
    """Returns the norm of each parameter's gradient, None without one."""
    return [None if p.grad is None else float(_whole(p.grad.norm(order))) for p in parameters]


def clip_by_norm(parameters: Iterable[Tensor], most: float) -> bool:
    """Clips gradients of several meshes, as `torch.nn.utils.clip_grad_norm_` does those of one; whether it did."""
    having = [p for p in parameters if p.grad is not None]
    norm = total_norm([p.grad for p in having if p.grad is not None], 2.0)
    if norm is None:
        return False
    for parameter in having:
        clip_grads_with_norm_(parameter, most, norm)
    return True


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
