"""What the user's code has changed of a module whose layers are divided, and how it is divided then (layer T).

    before     embed  | layer 0 | layer 1 | head             rank 0 holds all but layer 1, which rank 1 holds
    changed    embed  | layer 0 | another | head | scale     on all ranks alike: they run the same hooks
    divided    rank 0 |         | rank 1  | rank 0           one rank's values go to those that hold it now

Nothing that a rank holds moves to another one, and no optimizer's state does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.pipeline.runtime.ownership.owner_groups import as_bytes, refuse_different, together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership, named
from lightning_hetero.pipeline.runtime.ownership.pruning import like, prune, put_in_place
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here, stand_in_for
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.transport.objects import Wait, gathered


class Known:
    """What a module and its optimizers consist of, to see later what has been changed.

    Args:
        module: the whole model, pruned.
        backbone: its layers.
        optimizers: over its parameters.

    Attributes:
        ids: of its parameters and buffers.
    """

    def __init__(self, module: nn.Module, backbone: Backbone, optimizers: Iterable[Optimizer]) -> None:
        self._backbone = backbone
        self._parts = _parts(module, backbone)
        self._tensors = named(module)
        self._kinds = {name: (t.shape, t.dtype) for name, t in self._tensors.items() if isinstance(t, nn.Parameter)}
        self._former = _strange(module, optimizers)
        self.ids = set(map(id, self._tensors.values()))

    def change(self, module: nn.Module) -> Change:
        """Returns what has been added, removed or replaced since; values do not count, nor do buffers' new tensors."""
        tensors, parts, kinds = named(module), _parts(module, self._backbone), self._kinds
        trained = {name for name, t in {**self._tensors, **tensors}.items() if isinstance(t, nn.Parameter)}
        others = {name for name in kinds.keys() & tensors.keys() if tensors[name] is not self._tensors[name]}
        others |= {n for n in kinds.keys() & tensors.keys() if kinds[n] != (tensors[n].shape, tensors[n].dtype)}
        names = others | (tensors.keys() ^ self._tensors.keys())
        layers = {name for name in {**self._parts, **parts} if self._parts.get(name) is not parts.get(name)}
        return Change([*sorted(layers), *sorted(names)], trained=bool(layers or names & trained), layers=bool(layers))

    def strangers(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        """Returns parameters that optimizers have and the module has not, nor has had."""
        own = self.ids | self._former.keys()
        return [parameter for key, parameter in _strange(module, optimizers).items() if key not in own]


class Change(NamedTuple):
    """What is different, by name; false: nothing.

    Attributes:
        names: of layers, parameters and buffers.
        trained: there are layers or parameters among them.
        layers: the layers are others.
    """

    names: list[str]
    trained: bool
    layers: bool

    def __bool__(self) -> bool:
        return bool(self.names)


def _strange(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    own = {id(parameter) for parameter in module.parameters()}
    found = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return {id(parameter): parameter for parameter in found if id(parameter) not in own}


def _parts(module: nn.Module, backbone: Backbone) -> dict[str, nn.Module | None]:
    """Returns the layers, and what is in the lists that they are in, by name."""
    if backbone.layers == (module,):
        return {}
    found: dict[str, nn.Module | None] = {}
    lists: set[str] = set()
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in backbone.names:
        found[name] = modules.get(name)
        *above, _ = name.split(".")
        lists |= {".".join(above[: i + 1]) for i in range(len(above))}
    for path in lists:
        if isinstance(part := modules.get(path), nn.Sequential | nn.ModuleList):
            found.update((f"{path}.{name}", child) for name, child in part.named_children())
    return found


# ---- another division ----------------------------------------------------------------------------------------------


class _Told(NamedTuple):
    """What a rank tells of one of its tensors: whether it has values, and whether it had this very tensor before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    is_real: bool
    is_known: bool


@torch.no_grad()
def divide_anew(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    known: Known,
    own: Callable[[Container[str]], Ownership],
    here: Here,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    wait: Wait,
) -> Ownership:
    """Divides a module that has been changed on all ranks; collective.

    A new parameter has rank 0's values, as under DDP when training begins, a new buffer those of the rank that uses it.

    Args:
        module: the whole model, pruned before.
        optimizers: over its parameters.
        known: what it was.
        own: returns the ownership from then on, of all but these buffers, which only some ranks have.
        here, device: see `prune`.
        group: over all ranks, one that takes CPU tensors (gloo).
        wait: for a collective.

    Raises:
        RuntimeError: on all ranks: they have changed different things, or what cannot be divided without a move.
    """
    tensors = named(module)
    told = {
        name: _Told(tuple(t.shape), t.dtype, isinstance(t, nn.Parameter), not t.is_meta, id(t) in known.ids)
        for name, t in tensors.items()
    }
    of_all: list[Mapping[str, _Told]] = gathered(told, group, wait)
    partly = {name for of_one in of_all for name in of_one if not all(name in one for one in of_all)}
    sources: dict[str, int] = {}
    with together(group, wait=wait):
        if lacking := sorted(name for name in partly if any(one[name].is_parameter for one in of_all if name in one)):
            raise ValueError(f"only some ranks have {lacking[:5]}: let all ranks make the same change")
        for name in tensors.keys() - partly:
            real = [rank for rank, one in enumerate(of_all) if one[name].is_real]
            if not real:
                raise ValueError(f"no rank has values of {name}: it was made from what other ranks hold")
            put_in_place(module, optimizers, _as_there(tensors[name], name, of_all[real[0]][name], here))
        ownership = own(partly)
    refuse_different(ownership, group)
    tensors = ownership.tensors(module)
    with together(group, wait=wait):
        for name in tensors:
            real = [rank for rank, one in enumerate(of_all) if one[name].is_real]
            kept = [rank for rank in real if of_all[rank][name].is_known]
            holders = ownership.holders(name)
            if kept and (lost := set(holders) - set(kept)):
                raise ValueError(f"{name} was on rank(s) {kept} and would have to move to {sorted(lost)}")
            if not kept:
                order = (0, *holders) if name in ownership.parameters else (*holders, 0)
                sources[name] = next((rank for rank in order if rank in real), real[0])
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for name, source in sources.items():
        tensor, targets = tensors[name], set(ownership.holders(name)) - {source}
        if not tensor.numel():
            continue
        if ownership.rank == source:
            for target in sorted(targets):
                dist.send(as_bytes(tensor), target, group=group)
        elif ownership.rank in targets:
            come = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(as_bytes(come), source, group=group)
            replaced[id(tensor)] = tensor, like(tensor, come.to(device))
    put_in_place(module, optimizers, replaced)
    prune(module, optimizers, ownership, here, device=device)
    return ownership


def _as_there(tensor: Tensor, name: str, there: _Told, here: Here) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns for a stand-in, of whatever making, another one if the tensor has another shape or dtype where it is."""
    if not tensor.is_meta or (tuple(tensor.shape), tensor.dtype) == (there.shape, there.dtype):
        return {}
    shaped: Tensor = torch.empty(there.shape, dtype=there.dtype, device="meta")
    if there.is_parameter:
        shaped = nn.Parameter(shaped, tensor.requires_grad)
    return {id(tensor): (tensor, stand_in_for(shaped, name, (), here, device=tensor.device))}
