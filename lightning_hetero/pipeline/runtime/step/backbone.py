"""Finds the layers of the backbone, and where a training step is to be cut for them (layer T).

| ``backbone=`` names                              | layers                       | cut at                          |
|--------------------------------------------------|------------------------------|---------------------------------|
| an ``nn.Sequential``                             | its children                 | the Sequential                  |
| a module whose forward is a chain of its children| these children               | the module                      |
| an ``nn.ModuleList``                             | its items                    | the items, walked in order      |
| several modules, in order                        | these, opened as above       | the modules, walked in order    |
| a module with a method ``pipeline_layers()``     | what that returns            | these layers, walked in order   |
| another module, e.g. a GPT-2, a BERT             | the items of the largest     | the items, walked in order      |
|                                                  | ``nn.ModuleList`` in it      |                                 |

A plain Sequential among the layers is opened, layer by layer; what ``pipeline_layers()`` returns is unchanged.
*Walked in order* means that the step calls each of them once, with what the one before returned, or a part of it, and
with anything else that does not come from a layer (masks, positions, switches). A step that computes something from
what a layer returned, before it calls the next one, is refused when it happens, by `BackboneCut`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_hetero.pipeline.runtime.step.cut import BackboneCut

USUAL = ("model", "backbone", "net", "layers", "blocks")
"""Attributes that are tried where the user names none."""

_WAY_OUT = (
    "give the LightningModule, or the module named, a method pipeline_layers() that returns the layers in the order in"
    " which the step calls them, each with what the one before returned"
)

_Part = tuple[nn.Module, list[nn.Module]]
"""A module that the step calls, and the layers that this computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """The layers to divide among devices.

    Attributes:
        names: of the layers, as in ``module.named_modules()``.
        layers: in the order in which they are called.
        cut_modules: which the step calls; in them are the layers.
        starts: the index of the first layer in each of these.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    cut_modules: tuple[nn.Module, ...]
    starts: tuple[int, ...]

    def cut(self) -> BackboneCut:
        """Returns what cuts a training step at these layers."""
        return BackboneCut(*self.cut_modules, starts=self.starts)


def find_backbone(module: nn.Module, backbone: str | Sequence[str] | None) -> Backbone:
    """Finds the layers that `backbone` stands for; see the table above.

    Args:
        module: the LightningModule.
        backbone: the path of an attribute, e.g. ``"model"`` or ``"net.layers"``, or several paths in order; None: the
            module's ``pipeline_layers()``, else the one of the attributes `USUAL` that can be divided, else the items
            of the largest ``nn.ModuleList`` in the module.

    Raises:
        TypeError: what is named cannot be divided, for the reason given; or ``backbone`` is neither name nor names.
        ValueError: there is no such attribute; no layers; a layer twice, or within another; a lazy module that has no
            parameters yet; hooks where they would see no values.
    """
    if backbone is None:
        parts = _look_around(module)
    elif isinstance(backbone, str):
        parts = _divide(_get(module, backbone), f"backbone={backbone!r}")
    elif isinstance(backbone, Sequence) and all(isinstance(name, str) for name in backbone):
        parts = [part for name in backbone for part in _walked(_get(module, name))]
    else:
        raise TypeError(
            f"backbone={backbone!r} must be the path of an attribute, e.g. 'model' or 'net.layers', several of them in"
            " order, or None"
        )
    return _checked(module, parts)


# ---- what is named ---------------------------------------------------------------------------------------------


def _get(module: nn.Module, path: str) -> nn.Module:
    """Returns the module at a path of attributes."""
    owner: Any = module
    for i, name in enumerate(path.split(".")):
        found = getattr(owner, name, None) if name else None
        if found is None:
            at = f"{type(owner).__name__} at {'.'.join(path.split('.')[:i])!r}" if i else type(owner).__name__
            known = [child for child, _ in owner.named_children()] if isinstance(owner, nn.Module) else []
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its modules are {known}"
            raise ValueError(f"backbone={path!r}: {at} has no attribute {name!r}; {hint}")
        owner = found
    if not isinstance(owner, nn.Module):
        raise TypeError(f"backbone={path!r} is a {type(owner).__name__}; it must be a module or a list of modules")
    return owner


def _look_around(module: nn.Module) -> list[_Part]:
    """Returns the layers and the modules to cut at where the user named nothing."""
    if (own := _own_layers(module)) is not None:
        return own
    found: dict[str, list[_Part]] = {}
    refused: dict[str, str] = {}
    for name in USUAL:
        if isinstance(candidate := getattr(module, name, None), nn.Module):
            try:
                found[name] = _divide(candidate, repr(name))
            except (TypeError, ValueError) as error:
                refused[name] = str(error)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise TypeError(
            f"no backbone is named, and each of the attributes {list(found)} could be it: say"
            f" backbone={next(iter(found))!r}, or several in order: backbone={list(found)!r}"
        )
    if (blocks := _largest_list(module)) is not None:
        return _walked(blocks)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
    raise TypeError(
        f"no backbone is named, and none of the attributes {list(USUAL)} of {type(module).__name__} can be divided;"
        f" name the attribute that holds the layers, e.g. backbone='net.layers', or {_WAY_OUT}{reasons}"
    )


def _divide(module: nn.Module, what: str) -> list[_Part]:
    """Returns the layers of one module, and the modules to cut at."""
    if isinstance(module, nn.ModuleList) or callable(getattr(module, "pipeline_layers", None)):
        return _walked(module)
    if _is_plain_sequential(module):
        children = list(module.children())
    else:
        try:
            children = _chain(module, what)
        except _NoChainError:
            if (blocks := _largest_list(module)) is None:
                raise
            return _walked(blocks)
    return [(module, [layer for child in children for layer in _opened(child)])]


def _walked(module: nn.Module) -> list[_Part]:
    """Returns layers and modules to cut at where the step itself calls a module, or the items of one, in order."""
    if (own := _own_layers(module)) is not None:
        return own
    items = list(module) if isinstance(module, nn.ModuleList) else [module]
    return [(item, list(_opened(item))) for item in items]


def _largest_list(module: nn.Module) -> nn.ModuleList | None:
    """Returns the list of blocks that holds most of a module's parameters: several equal ones, the only such list."""
    found: list[tuple[int, nn.ModuleList]] = []

    def look(owner: nn.Module) -> None:
        for child in owner.children():
            if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(item) for item in child}) == 1:
                found.append((sum(p.numel() for p in child.parameters()), child))
            else:
                look(child)

    look(module)
    found.sort(key=lambda one: -one[0])
    if not found or (len(found) > 1 and found[0][0] < 2 * found[1][0]):
        return None
    return found[0][1]


def _own_layers(module: nn.Module) -> list[_Part] | None:
    """Returns what ``pipeline_layers()`` says, if there is such a method."""
    method = getattr(module, "pipeline_layers", None)
    if not callable(method):
        return None
    returned: Any = method()
    layers = list(returned) if isinstance(returned, Sequence | nn.ModuleList | nn.Sequential | Iterator) else None
    if layers is None or not all(isinstance(layer, nn.Module) for layer in layers):
        raise TypeError(
            f"{type(module).__name__}.pipeline_layers() returned {returned!r:.200}; it must return the layers, a list"
            " of modules in the order in which they are called"
        )
    return [(layer, [layer]) for layer in layers]


def _is_plain_sequential(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def _opened(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of a plain Sequential, however deep; else the module. One that has hooks stays whole."""
    if _is_plain_sequential(module) and not _hooks(module) and len(list(module.children())):
        for child in module.children():
            yield from _opened(child)
    else:
        yield module


def _hooks(module: nn.Module) -> list[str]:
    """Returns the kinds of hooks that run where a module is called."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [kind.strip("_") for kind in kinds if getattr(module, kind, None)]


# ---- chains ----------------------------------------------------------------------------------------------------


def _chain(module: nn.Module, what: str) -> list[nn.Module]:
    """Returns the children that a module's forward calls one after another.

    Raises:
        TypeError: it does something else, too.
    """
    kind = type(module).__name__
    if hasattr(module, "_orig_mod"):
        raise TypeError(
            f"{what} is compiled as a whole, and a compiled module cannot be divided; compile its layers instead, or"
            " the functions of the training step"
        )
    if "forward" in vars(module):
        raise TypeError(f"{what}: the forward of this {kind} was replaced, so its layers are not known; {_WAY_OUT}")
    if not any(True for _ in module.children()):
        raise TypeError(f"{what} is a {kind}, which has no layers to divide; name the module that holds them")
    names: list[list[str]] = []
    for training in (True, False):
        before, module.training = module.training, training  # only its own: children are not looked into
        try:
            names.append(_called_children(module))
        except _NoChainError as error:
            raise _NoChainError(
                f"{what}: the forward of {kind} is not a chain of its children: {error}. Make everything between the"
                f" layers a separate layer (nn.Flatten, nn.ReLU, ...), or {_WAY_OUT}"
            ) from error.__cause__
        finally:
            module.training = before
    if names[0] != names[1]:
        raise TypeError(
            f"{what}: {kind} calls {names[0]} in training and {names[1]} in evaluation; a pipeline has one order: let"
            " the layers themselves do nothing in one of the modes"
        )
    return [module.get_submodule(name) for name in names[0]]


class _NoChainError(TypeError):
    """Says what a forward does besides calling its children; there may be a list of blocks all the same."""


def _called_children(module: nn.Module) -> list[str]:
    """Returns the names of what the forward calls, in order, as torch.fx sees it with the children as leaves."""
    from torch import fx

    class Shallow(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        nodes = list(Shallow().trace(module).nodes)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise _NoChainError(f"it cannot be followed ({type(error).__name__}: {text[0] if text else ''})") from error
    value: fx.Node | None = None
    names: list[str] = []
    for node in nodes:
        match node.op:
            case "placeholder":
                if not node.users:
                    continue
                if value is not None:
                    raise _NoChainError(f"it uses {node.target!r} besides its first argument {value.target!r}")
                value = node
            case "call_module":
                name = str(node.target)
                if node.args != (value,) or node.kwargs:
                    raise _NoChainError(f"it calls {name!r} with something else than what the layer before returned")
                if name in names:
                    raise _NoChainError(f"it calls {name!r} twice")
                names.append(name)
                value = node
            case "output":
                if node.args != (value,) or not names:
                    raise _NoChainError("it returns something else than what its last layer returned")
            case "get_attr":
                raise _NoChainError(f"it uses {node.target!r} itself")
            case _:
                called = getattr(node.target, "__name__", node.target)
                raise _NoChainError(f"it calls {called} besides its children")
    return names


# ---- checks ----------------------------------------------------------------------------------------------------


def _checked(module: nn.Module, parts: Sequence[_Part]) -> Backbone:
    layers = [layer for _, part in parts for layer in part]
    cut = [item for item, _ in parts]
    if not layers:
        raise ValueError("the backbone has no layers; a pipeline needs one or more")
    known = {id(submodule): name for name, submodule in module.named_modules()}
    for i, layer in enumerate(layers):
        if id(layer) not in known:
            raise ValueError(
                f"layer {i} of the backbone, a {type(layer).__name__}, is no submodule of {type(module).__name__}: its"
                " parameters would be neither trained nor saved. Make it an attribute, or keep the layers in an"
                " nn.ModuleList"
            )
    names = [known[id(layer)] for layer in layers]
    numbers = {id(layer): i for i, layer in enumerate(layers)}
    for i, layer in enumerate(layers):
        if numbers[id(layer)] != i:
            raise ValueError(
                f"layers {i} and {numbers[id(layer)]} of the backbone are one module, {names[i]!r}, which cannot be"
                " held by two stages; give each place its own module (copy.deepcopy), or make one layer that calls"
                " it twice"
            )
        for name, inner in layer.named_modules():
            if name and id(inner) in numbers:
                raise ValueError(
                    f"layer {names[numbers[id(inner)]]!r} of the backbone is part of layer {names[i]!r}: name the one"
                    " or the other"
                )
            if isinstance(inner, LazyModuleMixin) and inner.has_uninitialized_params():  # type: ignore[misc]
                raise ValueError(
                    f"layer {names[i]!r} of the backbone has lazy parameters without a shape, which cannot be planned"
                    " for; call the model once on a small batch in the constructor, or give the sizes"
                )
    for item in cut if len(cut) > 1 else ():
        if hooks := _hooks(item):
            raise ValueError(
                f"layer {known.get(id(item), '?')!r} of the backbone has {' and '.join(hooks)}, which would run where"
                " the training step calls it, without values, and again where it is computed; put them on a submodule"
                " of the layer"
            )
    starts = tuple(accumulate([len(part) for _, part in parts], initial=0))[:-1]
    return Backbone(names=tuple(names), layers=tuple(layers), cut_modules=tuple(cut), starts=starts)
