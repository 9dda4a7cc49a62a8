"""What the user's code has changed of a module whose layers are divided, and how it is divided then (layer T).

    before     embed  | layer 0 | layer 1 | head             rank 0 holds all but layer 1, which rank 1 holds
    changed    embed  | layer 0 | another | head | scale     on all ranks: they run the same hooks
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

from lightning_hetero.pipeline.runtime.ownership.owner_groups import refuse_different, spread, together
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership, named
from lightning_hetero.pipeline.runtime.ownership.pruning import prune
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.transport.objects import Wait, gathered


class Known:
    """What a module consists of, to see later what has been changed.

    Args:
        module: the whole model, pruned.
        backbone: its layers.
        others: parameters that optimizers have besides, of layers that were replaced.

    Attributes:
        ids: of all these.
    """

    def __init__(self, module: nn.Module, backbone: Backbone, others: Iterable[Tensor]) -> None:
        self._backbone, self._parts = backbone, _parts(module, backbone)
        self._tensors, self._others = named(module), list(others)
        self._kinds = {name: _kind(t) for name, t in self._tensors.items() if isinstance(t, nn.Parameter)}
        self.ids = set(map(id, (*self._tensors.values(), *self._others)))

    def change(self, module: nn.Module) -> ModuleChange:
        """Returns what has been added, removed or replaced since; values do not count, nor do buffers' new tensors."""
        tensors, parts, then = named(module), _parts(module, self._backbone), self._tensors
        names = tensors.keys() ^ then.keys()
        for name in self._kinds.keys() & tensors.keys():
            if tensors[name] is not then[name] or _kind(tensors[name]) != self._kinds[name]:
                names.add(name)
        trained = any(isinstance(t, nn.Parameter) for n, t in (*then.items(), *tensors.items()) if n in names)
        layers = {name for name in {**self._parts, **parts} if self._parts.get(name) is not parts.get(name)}
        return ModuleChange([*sorted(layers), *sorted(names)], trained=trained or bool(layers), layers=bool(layers))


class ModuleChange(NamedTuple):
    """What is different.

    Attributes:
        names: of layers, parameters and buffers.
        trained: there are layers or parameters among them.
        layers: the layers are others.
    """

    names: list[str]
    trained: bool
    layers: bool


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _parts(module: nn.Module, backbone: Backbone) -> dict[str, nn.Module | None]:
    """Returns the layers, and what is in the lists that they are in, by name."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = {name: modules.get(name) for name in backbone.names}
    for path, part in modules.items():
        if isinstance(part, nn.Sequential | nn.ModuleList) and any(n.startswith(f"{path}.") for n in backbone.names):
            found.update((f"{path}.{name}", child) for name, child in part.named_children())
    return found


# ---- another division ----------------------------------------------------------------------------------------------


class _Told(NamedTuple):
    """What a rank tells of one of its tensors: whether it has values, and whether it had this very tensor before."""

    is_parameter: bool
    is_real: bool
    is_known: bool


def divide_anew(
    module: nn.Module, optimizers: Iterable[Optimizer], known: Known, own: Callable[[Container[str]], Ownership],
    here: Here, *, device: torch.device, group: dist.ProcessGroup, wait: Wait,
) -> Ownership:  # fmt: skip
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
    told = {n: _Told(isinstance(t, nn.Parameter), not t.is_meta, id(t) in known.ids) for n, t in named(module).items()}
    of_all: list[Mapping[str, _Told]] = gathered(told, group, wait)
    partly = {name for of_one in of_all for name in of_one if not all(name in one for one in of_all)}
    sources: dict[str, int] = {}
    with together(group, wait=wait):
        if lacking := sorted(name for name in partly if any(one[name].is_parameter for one in of_all if name in one)):
            raise ValueError(f"only some ranks have {lacking[:5]}: let all ranks make the same change")
        ownership = own(partly)
    refuse_different(ownership, group)
    with together(group, wait=wait):
        for name in (*ownership.parameters, *ownership.buffers):
            real = [rank for rank, one in enumerate(of_all) if one[name].is_real]
            kept, holders = [rank for rank in real if of_all[rank][name].is_known], ownership.holders(name)
            if not set(holders) <= set(kept or real):
                raise ValueError(f"{name} is on rank(s) {kept or real} and would have to move to {list(holders)}")
            if not kept:
                sources[name] = 0 if 0 in real and name in ownership.parameters else holders[0]
    spread(module, ownership, sources, group)
    prune(module, optimizers, ownership, here, device=device)
    return ownership
