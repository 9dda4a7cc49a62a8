"""A layer's structure as text: equal for layers that do the same work, in this process and in the next (layer T).

Types, settings, shapes and dtypes count, values of parameters do not. It lets a profile be made once for the equal
blocks of a model, and be kept between runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set, Sized
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["structure_of"]

_OWN = frozenset(vars(nn.Module()))  # what every module has; all else are the layer's settings
_DEPTH = 6  # of containers within containers; an object, e.g. a configuration, counts as three
_LENGTH = 256  # of a container: longer ones are data, not settings


def structure_of(layer: nn.Module, *, exact: bool = False) -> str:
    """Returns the structure of a layer and all its submodules.

    Args:
        layer: the layer.
        exact: objects that cannot be read (closures, handles) are told apart by identity, which holds within this
            process only; otherwise by their type.
    """
    lines: list[str] = []
    for name, module in layer.named_modules(remove_duplicate=False):
        settings = {k: v for k, v in vars(module).items() if k not in _OWN}
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        lines.append(f"{name}: {_name(type(module))} training={module.training} hooks={hooks}")
        lines.append(_text(settings, exact, _DEPTH))
    tensors = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}  # tied ones bear the name of the first
    for name, tensor in tensors:
        lines.append(f"{name} = {first.setdefault(id(tensor), name)}: {_text(tensor, exact, _DEPTH)}")
    return "\n".join(lines)


def _text(value: Any, exact: bool, depth: int) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | Enum):
        return repr(value)
    if isinstance(value, Tensor):
        kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return f"{kind} {tuple(value.shape)} {value.dtype} requires_grad={value.requires_grad}"
    if isinstance(value, nn.Module):
        return "module"  # listed by itself, or no part of the layer
    if inspect.isclass(value) or inspect.isbuiltin(value):
        return _name(value)
    if inspect.isfunction(value) and value.__closure__ is None and "<lambda>" not in value.__qualname__:
        return _name(value)
    if depth > 0 and not (isinstance(value, Sized) and len(value) > _LENGTH):
        if isinstance(value, Mapping):
            pairs = [f"{_text(k, exact, depth - 1)}: {_text(v, exact, depth - 1)}" for k, v in value.items()]
            return "{" + ", ".join(pairs) + "}"
        if isinstance(value, Sequence | Set):
            items = [_text(v, exact, depth - 1) for v in value]
            return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, Set) else items)})"
        if type(value).__module__ not in ("builtins", "functools") and hasattr(value, "__dict__"):
            return f"{_name(type(value))}{_text(vars(value), exact, depth - 3)}"
    return f"{_name(type(value))}@{id(value)}" if exact else _name(type(value))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
