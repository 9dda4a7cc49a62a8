"""Who holds which parameter and buffer of the model (layer T).

    module     before | layer 0 | layer 1 | layer 2 | layer 3 | head       before and head: "outside" the layers
    group 0    rank 2 |------ rank 2 -----|------ rank 0 -----| rank 2     leaders hold what is outside
    group 1    rank 1 | rank 1  |---------- rank 3 -----------| rank 1     ranks in no group hold nothing
    owners     (2, 1)   (2, 1)    (2, 3)    (0, 3)    (0, 3)    (2, 1)     one rank per group, group 0 first

The unit of ownership is the layer. A parameter that two units share (tied weights) needs one owner per group, because
its gradient is the sum over its uses; a plan that separates them is refused. A *buffer* that several layers share, such
as a causal mask or a rotary table, is kept by every rank that needs it: nothing is summed there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hetero.types import GroupPlan, PipelinePlan

Unit = int | None
"""A layer's index, or None: outside the layers."""

_OUTSIDE: frozenset[Unit] = frozenset({None})


def tied(module: nn.Module, layers: Sequence[nn.Module]) -> list[UsedTensor]:
    """Returns the parameters that layers share with one another or with the rest of the module.

    A planner keeps the layers from the first to the last of each on one device, and on the leader's if it is used
    outside. The same module under a second name (``self.first = self.backbone[0]``) is no second user.

    Args:
        module: the whole model.
        layers: of the backbone, in order.

    Raises:
        ValueError: a lazy module has not been run yet.
    """
    return [entry for entry in _entries(module, layers) if entry.is_parameter and len(entry.units) > 1]


class Ownership:
    """Which rank holds which parameter and buffer of a model under a plan.

    Keeps names only, no tensors: it stays right when parameters are replaced (`pruning.prune`).

    Args:
        module: the whole model, all parameters in place.
        layers: of the backbone, in order; modules inside ``module``.
        plan: which rank holds which layers, checked.
        rank: this rank; may be an idle one.
        without: buffers that only some ranks have: of them nothing is said.

    Attributes:
        layer_of: name of each parameter and buffer, all names of shared ones, in the module's order -> its layer;
            None: outside. What is used in several places counts for the first, and as outside if it is used there.
        parameters, buffers: the first names, in the module's order, as `torch.nn.Module.named_parameters` chooses.
        groups: the ranks of each, in the order of stages.
        rank: as passed.
        digest: of all this and of the tensors' shapes and dtypes and which are trained; the same on all ranks.

    Raises:
        ValueError: a lazy module; tied weights whose users are on different ranks, with
            what can be done.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], plan: PipelinePlan, *, rank: int,
        without: Container[str] = (),
    ) -> None:  # fmt: skip
        self.rank = rank
        self.groups = tuple(group.ranks for group in plan.groups)
        self._layer_of_module = _layers_of_modules(module, layers)
        self._entries: dict[str, UsedTensor] = {}
        self._holders: dict[str, tuple[int, ...]] = {}
        units: tuple[Unit, ...] = (None, *range(len(layers)))
        self._units = {unit: tuple(_owner(group, unit) for group in plan.groups) for unit in units}
        digest = hashlib.sha256(repr([(group.ranks, group.cuts) for group in plan.groups]).encode())
        entries = [entry for entry in _entries(module, layers) if entry.names[0] not in without]
        for entry in entries:
            for number, group in enumerate(plan.groups if entry.is_parameter else ()):
                ranks = {_owner(group, u) for u in entry.units}
                if len(ranks) > 1:
                    raise ValueError(_separated(entry, number, sorted(ranks)))
            owners = self._units[entry.unit]
            holders = {_owner(group, u) for group in plan.groups for u in entry.units}
            self._entries.update(dict.fromkeys(entry.names, entry))
            self._holders.update(dict.fromkeys(entry.names, (*owners, *sorted(holders - set(owners)))))
            digest.update(repr((entry.names, entry.shape, entry.dtype, entry.trained, entry.unit)).encode())
        self.parameters = tuple(entry.names[0] for entry in entries if entry.is_parameter)
        self.buffers = tuple(entry.names[0] for entry in entries if not entry.is_parameter)
        self.layer_of = {name: self._entries[name].unit for name in named(module) if name in self._entries}
        self.digest = digest.hexdigest()

    # ---- by name -----------------------------------------------------------------------------------------------

    def owners(self, name: str) -> tuple[int, ...]:
        """Returns one rank per group, group 0 first; by it values and gradients count.

        Raises:
            KeyError: no parameter or buffer has this name.
        """
        return self._units[self._entries[name].unit]

    def holders(self, name: str) -> tuple[int, ...]:
        """Returns the owners, then further ranks that keep a copy of a buffer which layers share."""
        return self._holders[name]

    def owners_of_key(self, key: str) -> tuple[int, ...]:
        """Returns the same for any key of a state dict, by the module that it begins with."""
        path = key
        while path and path not in self._layer_of_module:
            path = path.rpartition(".")[0]
        return self._units[self._layer_of_module[path]]

    def holds(self, name: str) -> bool:
        """Whether this rank keeps the parameter or buffer."""
        return self.rank in self.holders(name)

    def is_shared(self, name: str) -> bool:
        """Whether several layers use it, or a layer and what is outside."""
        return len(self._entries[name].units) > 1

    # ---- tensors -----------------------------------------------------------------------------------------------

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the present parameters and buffers of ``module`` by their first names, of those that are still there.

        What the user's code has added since is not among them, until the layers are divided again (`changes`).
        """
        found = named(module)
        return {name: found[name] for name in (*self.parameters, *self.buffers) if name in found}


# ---- what the module consists of -------------------------------------------------------------------------------


@dataclass(slots=True)
class UsedTensor:
    """One tensor.

    Attributes:
        names: all its names in the module.
        is_parameter, shape, dtype, trained: what it is.
        units: whose modules use it.
    """

    names: tuple[str, ...]
    is_parameter: bool
    shape: tuple[int, ...]
    dtype: object
    trained: bool
    units: frozenset[Unit] = frozenset()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that use it, increasing."""
        return tuple(sorted(u for u in self.units if u is not None))

    @property
    def unit(self) -> Unit:
        return None if None in self.units else min(self.layers)


def named(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers; all names of shared ones, as state dicts have them."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _users(layers: Sequence[nn.Module]) -> dict[int, frozenset[Unit]]:
    """Returns the layers that a module belongs to, by its id; modules outside are not in it."""
    users: dict[int, frozenset[Unit]] = {}
    for index, layer in enumerate(layers):
        for part in layer.modules():
            users[id(part)] = users.get(id(part), frozenset()) | {index}
    return users


def _layers_of_modules(module: nn.Module, layers: Sequence[nn.Module]) -> dict[str, Unit]:
    users = _users(layers)
    return {
        path: min((u for u in users.get(id(part), ()) if u is not None), default=None)
        for path, part in module.named_modules(remove_duplicate=False)
    }


def _entries(module: nn.Module, layers: Sequence[nn.Module]) -> list[UsedTensor]:
    """Returns the parameters and then the buffers, each tensor once, in the module's order."""
    units = _users(layers)
    entries: dict[tuple[int, bool], UsedTensor] = {}
    for is_parameter in (True, False):
        for path, part in module.named_modules(remove_duplicate=False):
            users = units.get(id(part), _OUTSIDE)
            named = part.named_parameters if is_parameter else part.named_buffers
            for name, tensor in named(path, recurse=False, remove_duplicate=False):
                if is_lazy(tensor):
                    raise ValueError(
                        f"{name!r} has no shape yet (a lazy module): run one forward pass before training, e.g. in"
                        " the constructor"
                    )
                key = id(tensor), is_parameter
                if key not in entries:
                    entries[key] = UsedTensor((), is_parameter, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                entries[key].names += (name,)
                entries[key].units |= users
    return list(entries.values())


def _owner(group: GroupPlan, unit: Unit) -> int:
    return group.ranks[0 if unit is None else bisect_right(group.cuts, unit) - 1]


def _separated(entry: UsedTensor, group: int, ranks: list[int]) -> str:
    users = [f"layer {i}" for i in entry.layers] + ["the code outside the layers"] * (None in entry.units)
    return (
        f"tied weights: one parameter is {' = '.join(map(repr, entry.names))}, used by {' and '.join(users)}, but group"
        f" {group} of the plan divides them among the ranks {ranks}, and its gradient would be summed on none of them."
        " Give the planner what `tied` returns so that it keeps them together, name a backbone that leaves these layers"
        " out, or untie them"
    )
