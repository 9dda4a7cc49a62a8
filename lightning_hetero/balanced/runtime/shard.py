"""Shards a module that does not do so itself: its repeated blocks, and the rest as one (layer T).

States of optimizers whose parameters are shards, in files that hold whole tensors.

Torch's optimizers number parameters in the order of their groups, and so does DDP's checkpoint; Lightning's
`ModelParallelStrategy` numbers them as the model does, sorts them in each group, and reads all files in that way.

Norms of gradients that are divided among ranks, those of one model perhaps in different ways.

With tensor parallelism the parameters of some layers are divided over both dimensions of the mesh and those of others
over one. torch adds up the norms of one mesh only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

Sharding = Literal["auto"] | Sequence[type[nn.Module]]


def check_sharding(shard: object) -> None:
    """Checks the argument ``shard``.

    Raises:
        TypeError: it is neither None, nor ``"auto"``, nor classes of modules.
    """
    classes = shard if isinstance(shard, list | tuple) else ()
    if shard in (None, "auto") or (classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)):
        return
    raise TypeError(
        f"shard={shard!r} must be 'auto', a list of module classes, e.g. [nn.TransformerEncoderLayer], or None"
    )


def fully_sharded(module: nn.Module) -> bool:
    """Whether a part of the module was given to ``fully_shard``."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def check_synchronised(module: nn.Module) -> None:
    """Refuses parameters that each rank would train for itself.

    Raises:
        TypeError: some that are trained were not given to ``fully_shard``.
    """
    alone = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and not (isinstance(p, DTensor) and p.device_mesh.mesh_dim_names != ("tensor_parallel",))
    ]
    if alone:
        raise TypeError(
            f"{', '.join(alone[:3])}{f' and {len(alone) - 3} more' if len(alone) > 3 else ''}: trained, and not"
            " sharded, so each data-parallel rank would train its own, without a word under ModelParallelStrategy. End"
            " configure_model with fully_shard(self, mesh=self.device_mesh['data_parallel']), freeze them, or leave out"
            " configure_model and give shard='auto'"
        )


def shard_module(module: nn.Module, mesh: DeviceMesh, shard: Sharding, *, apart: bool = False) -> None:
    """Applies ``fully_shard`` to the blocks of a module, and to the module; nothing, if it is sharded already.

    Args:
        module: the user's.
        mesh: one dimension, of the ranks that share the parameters.
        shard: classes of the blocks; ``"auto"``: see `blocks`.
        apart: whether the rest is not gathered as one, for the length of a step, but each child when it is called: for
            steps with several backward passes, each of which divides the gathered parameters again.

    Raises:
        ValueError: the module has no such block.
    """
    if fully_sharded(module):
        return
    if isinstance(shard, str):
        found = blocks(module)
    elif not (found := [m for m in module.modules() if isinstance(m, tuple(shard))]):
        names = ", ".join(c.__name__ for c in shard)
        raise ValueError(f"shard=[{names}]: {type(module).__name__} has no module of these classes")
    rest = [child for child in _unshared(_called(module), module) if child not in found] if apart else []
    for one in (*reversed(found), *rest, module):  # inner ones first
        fully_shard(one, mesh=mesh)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Returns the children that have a forward pass and parameters; of lists their items."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child


def _unshared(modules: Iterable[nn.Module], root: nn.Module) -> list[nn.Module]:
    """Returns those that share no parameter with the rest of the model."""
    owners: Counter[int] = Counter(id(p) for m in root.modules() for p in m.parameters(recurse=False))
    modules = list(modules)
    inside = [Counter(id(p) for m in one.modules() for p in m.parameters(recurse=False)) for one in modules]
    return [one for one, own in zip(modules, inside, strict=True) if all(owners[p] == n for p, n in own.items())]


def blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks that a model repeats, which hold most of a transformer's parameters.

    They are the items of each `nn.ModuleList` and `nn.Sequential` that has at least two of the same class that hold
    modules; of nested lists the outermost. A block that shares a parameter with the rest of the model is left out.
    """
    found: list[nn.Module] = []
    _find(module, found)
    return _unshared(found, module)


def _find(module: nn.Module, found: list[nn.Module]) -> None:
    items = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    repeated = Counter(type(item) for item in items if any(item.children()) and any(True for _ in item.parameters()))
    chosen = [item for item in items if repeated[type(item)] > 1]
    found += chosen
    for child in module.children():
        if child not in chosen and child not in found:
            _find(child, found)


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether torch would make a step of the optimizer to know what its state looks like."""
    return not optimizer.state and not any(p.grad is not None for p in _trained(optimizer))


def order_groups(saved: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> None:
    """Lists the parameters of a whole state's groups in the optimizer's order, by the model's numbers."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group["params"] = [numbers[id(p)] for p in own["params"]]


def load_whole(saved: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, *, ours: bool) -> None:
    """Puts a whole state into an optimizer; a collective of the ranks that share a parameter.

    Args:
        saved: of a file.
        optimizer: of this rank.
        model: whose parameters it trains.
        ours: a strategy of ours has written the file.

    Raises:
        ValueError: it is of other parameters, or nobody knows of which.
    """
    own, place = _trained(optimizer), _places(saved["param_groups"], optimizer, model, ours)
    state = {
        place[key]: {name: _sharded_as(own[place[key]], value) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    groups = [{**group, "params": sorted(place[key] for key in group["params"])} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_sharded(folder: Path, name: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Puts into an optimizer what a folder has of it, which may be nothing for some parameters; a collective."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if not any(key.startswith(f"{name}.") for key in saved):
        return  # it holds the model only
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state["state"] = {
        parameter: kept
        for parameter, values in state["state"].items()
        if (kept := {key: value for key, value in values.items() if f"{name}.state.{parameter}.{key}" in saved})
    }
    dcp.load({name: state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _places(groups: Any, optimizer: Optimizer, model: nn.Module, ours: bool) -> dict[Any, int]:
    """Returns which parameter of the optimizer each key of a whole state means."""
    keys = [key for group in groups for key in group["params"]]
    in_turn = {key: place for place, key in enumerate(keys)}
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    own = [[numbers[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    by_model = {number: place for place, number in enumerate(number for group in own for number in group)}
    counted, named = keys == [*range(len(keys))], all(isinstance(key, str) for key in keys)
    if [sorted(group["params"]) for group in groups] == [sorted(group) for group in own] and not named:
        if counted and by_model != in_turn and not ours:
            raise ValueError(
                "this file is of DDPStrategy or of ModelParallelStrategy, which number parameters differently where an"
                " optimizer's are not in the model's order: resume once with the strategy that wrote it, and let"
                " hetero_sharded read a distributed checkpoint, or give the optimizer its parameters in the order of"
                " model.parameters()"
            )
        return in_turn if counted else by_model
    if counted or named:
        return in_turn
    raise ValueError("the optimizer's state in this file is of other parameters, or groups of them")


def _sharded_as(parameter: Tensor, value: Any) -> Any:
    """Returns this rank's shard of what an optimizer knows about each element of a parameter."""
    if not isinstance(value, Tensor):
        return value
    value = value.clone()  # the file may be mapped
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


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
