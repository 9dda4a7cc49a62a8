"""Shards a module that does not do so itself: its repeated blocks, and the rest as one (layer T)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

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
