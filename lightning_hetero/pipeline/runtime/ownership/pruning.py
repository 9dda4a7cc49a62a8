"""Each rank keeps what it owns: the rest of the model loses its memory, not its shape (layer T).

    rank 1 of a 1x2 plan    embed.weight   layers.0.weight   layers.1.weight   head.weight
    before                  real           real              real              real
    after `prune`           stand-in       stand-in          real              stand-in

A `StandIn` has the name, shape and dtype. So `named_parameters`, ``state_dict``'s keys and the positions in
``optimizer.param_groups`` stay those of the whole model, and an optimizer skips it: it finds no gradient there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.ownership.owner_groups import as_bytes
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership, named
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here, StandIn, leave, stand_in_for
from lightning_hetero.transport.objects import gathered


@torch.no_grad()
def prune(
    module: nn.Module, optimizers: Iterable[Optimizer], ownership: Ownership, here: Here | None = None, *,
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """Replaces what other ranks hold by stand-ins, in the module and in its optimizers, and frees the memory.

    Attributes of the parameters and ``requires_grad`` are kept, gradients and optimizer state are dropped. Code
    that still uses a replaced parameter gets an error. What this rank holds stays the very object.

    Args:
        module: the whole model.
        optimizers: all that were made from its parameters.
        ownership: which rank holds what.
        here: what runs on this rank, for what stand-ins may do.
        device: of this rank's layers; None: where the tensors are.
    """
    here = Here(ownership.rank) if here is None else here
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    gone: list[tuple[Tensor, str]] = []
    for name, tensor in ownership.tensors(module).items():
        if ownership.holds(name):
            continue
        holders = ownership.holders(name)
        if isinstance(tensor, StandIn):
            tensor.held = replace(tensor.held, name=name, ranks=holders)
            here.made.pop(id(tensor), None)  # it may be a copy that the user has put there
            continue
        gone.append((tensor, name))
        now = stand_in_for(tensor, name, holders, here, device=device or tensor.device)
        replaced[id(tensor)] = tensor, _as_before(tensor, now)
    put_in_place(module, optimizers, replaced)
    for tensor, name in gone:
        leave(tensor, name)


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """Returns ``data`` as a parameter or buffer with the attributes of ``tensor``, and its hooks.

    So a hook that the user has registered on a parameter is where the parameter is, when a later plan moves it.
    """
    if isinstance(tensor, nn.Parameter):
        kind = tensor.held.kind if isinstance(tensor, StandIn) else type(tensor)
        data = torch.Tensor._make_subclass(kind, data, tensor.requires_grad)
    return _as_before(tensor, data)


def _as_before(tensor: Tensor, now: Tensor) -> Tensor:
    for key, value in vars(tensor).items():
        if key not in StandIn.own:
            vars(now)[key] = value
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if found := getattr(tensor, hooks):
            setattr(now, hooks, found)
    return now


def put_in_place(
    module: nn.Module, optimizers: Iterable[Optimizer], replaced: Mapping[int, tuple[Tensor, Tensor]]
) -> None:
    """Puts new tensors under all names of the old ones, and in the optimizers, which forget the old ones' state.

    Args:
        module: the whole model.
        optimizers: of it.
        replaced: by the id of the old one: old, new.
    """
    for part in module.modules():
        parameters = list(part.named_parameters(recurse=False, remove_duplicate=False))
        buffers = list(part.named_buffers(recurse=False, remove_duplicate=False))
        for name, tensor in (*parameters, *buffers):
            if id(tensor) in replaced:  # by setattr: recurrent modules keep further references and follow it
                setattr(part, name, replaced[id(tensor)][1])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [replaced[id(p)][1] if id(p) in replaced else p for p in group["params"]]
        for tensor, _ in replaced.values():
            optimizer.state.pop(tensor, None)


@torch.no_grad()
def restore(
    module: nn.Module, optimizers: Iterable[Optimizer], ownership: Ownership, group: dist.ProcessGroup
) -> list[str]:
    """Undoes `prune`: afterwards all ranks have all parameters and buffers, with the values of the lowest group.

    Collective. For the end of training, when the model is used or divided again. Optimizers have all parameters, and
    the state of those that this rank held. What this rank gets lies on the CPU.

    Args:
        module: the whole model, pruned by the same ownership; what has been changed since does not matter.
        optimizers: made from its parameters.
        group: over all ranks, one that takes CPU tensors (gloo).

    Returns:
        The names of parameters that are not in the ownership, and of those that have no values: the module has been
        changed since it was divided.
    """
    tensors, rank = ownership.tensors(module), ownership.rank
    mine = {n: (t.shape, t.dtype) for n, t in tensors.items() if ownership.owners(n)[0] == rank and not t.is_meta}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for source, offered in enumerate(gathered(mine, group, dist.Work.wait)):
        for name, (shape, dtype) in offered.items():
            tensor = tensors.get(name)
            data = torch.empty(shape, dtype=dtype)
            if source == rank and tensor is not None:
                data = tensor.detach().to("cpu").contiguous()
            if data.numel():
                dist.broadcast(as_bytes(data), source, group=group)
            if tensor is not None and tensor.is_meta:
                replaced[id(tensor)] = (tensor, like(tensor, data))
            elif tensor is not None and source != rank:
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    tensor.data = tensor.new_empty(shape, dtype=dtype)
                tensor.copy_(data)
    put_in_place(module, optimizers, replaced)
    return [
        name
        for name, tensor in named(module).items()
        if tensor.is_meta or (isinstance(tensor, nn.Parameter) and name not in ownership.layer_of)
    ]


@contextmanager
def moved_by(module: nn.Module, move: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Iterator[None]:
    """Inside, ``module.to`` moves each of its tensors as ``move`` does, which is given the stock way besides.

    Modules that do more there do it, such as a LightningModule's ``device`` or the states of metrics.
    """

    def apply(module: nn.Module, stock: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        return type(module)._apply(module, lambda tensor: move(tensor, stock), *args, **kwargs)

    vars(module)["_apply"] = types.MethodType(apply, module)
    try:
        yield
    finally:
        del vars(module)["_apply"]


def movable(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, ``module.to`` leaves out stand-ins, which have nothing to move."""
    return moved_by(module, lambda tensor, stock: tensor if tensor.is_meta else stock(tensor))


def to_device(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Moves parameters, gradients, buffers and optimizer state to a device; stand-ins are unchanged.

    It calls ``module.to(device)``, so modules that do more there, such as a LightningModule's ``device``, do it.
    ``step`` counters of optimizers stay where torch wants them: on the CPU unless the optimizer is fused or capturable.
    """
    with movable(module):
        module.to(device)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            steps_too = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if parameter in optimizer.state and not parameter.is_meta:
                    state: dict[str, Any] = optimizer.state[parameter]
                    moved = {key: value for key, value in state.items() if key != "step" or steps_too}
                    state.update(pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), moved))
