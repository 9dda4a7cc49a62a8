"""Attributes of an instance replaced for a while (layer L).

Norms of gradients that code of the user asks torch and Lightning for, answered by somebody else.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.nn.utils import clip_grad


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``, by an attribute on the instance over its class's, or over one it has."""
    before = vars(owner).get(name, _CLASS)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is _CLASS:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before


_CLASS = object()


def replace_methods(owner: Any, **methods: Any) -> Callable[[], None]:
    """Puts attributes on an instance over methods of its class; returns what takes them away again."""
    vars(owner).update(methods)

    def undo() -> None:
        for name in methods:
            vars(owner).pop(name, None)

    return undo


def called_as_forward(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns a method of a module that runs as its ``forward`` does, with the module's hooks around it."""
    method = getattr(module, name)

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:

            def first(*args: Any, **kwargs: Any) -> Any:
                stack.close()  # from here on ``forward`` is the module's
                return method(*args, **kwargs)

            stack.enter_context(patched(module, "forward", first))
            return module(*args, **kwargs)

    return called


_ASKED = "_lightning_hetero_norms"  # in the globals of the module that defines `grad_norm`


@contextmanager
def norms_by(
    total: Callable[[Sequence[Tensor], float], Tensor | None],
    each: Callable[[Sequence[Tensor], float], list[float | None] | None],
) -> Iterator[None]:
    """Inside, ``clip_grad_norm_``, ``get_total_norm`` and ``grad_norm`` ask here, whoever has imported them.

    `torch.nn.utils.clip_grad_norm_` looks for ``_get_total_norm`` in its module. Lightning's ``grad_norm`` calls
    nothing that could be replaced, so its code is.

    Args:
        total: returns the norm of all gradients together, from these and the order of the norm; None: stock's.
        each: returns the norm of each parameter's gradient, None without a gradient; or None: stock's.
    """
    stock_total: Any = vars(clip_grad)["_get_total_norm"]
    stock_grad_norm = types.FunctionType(grads.grad_norm.__code__, grads.__dict__, argdefs=grads.grad_norm.__defaults__)

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        found = total(tensors, float(norm_type))
        if found is None:
            return stock_total(tensors, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(found)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be"
                " clipped"
            )
        return found

    def norms(module: torch.nn.Module, norm_type: float | str, separator: str) -> dict[str, Any]:
        named, order = dict(module.named_parameters()), float(norm_type)
        found = each(list(named.values()), order) if order > 0 else None
        if found is None:
            return stock_grad_norm(module, norm_type, separator)
        known = {name: torch.tensor(norm) for name, norm in zip(named, found, strict=True) if norm is not None}
        prefix = f"grad_{order}_norm"
        whole = {f"{prefix}_total": torch.tensor(list(known.values())).norm(order)} if known else {}
        return {**{f"{prefix}{separator}{name}": norm for name, norm in known.items()}, **whole}

    def grad_norm(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
        return _lightning_hetero_norms(module, norm_type, group_separator)  # type: ignore[name-defined]  # noqa: F821

    with ExitStack() as stack:
        stack.enter_context(patched(clip_grad, "_get_total_norm", total_norm))
        stack.enter_context(patched(torch.nn.utils, "get_total_norm", total_norm))
        stack.enter_context(patched(grads, _ASKED, norms))
        code, grads.grad_norm.__code__ = grads.grad_norm.__code__, grad_norm.__code__
        stack.callback(setattr, grads.grad_norm, "__code__", code)
        yield
