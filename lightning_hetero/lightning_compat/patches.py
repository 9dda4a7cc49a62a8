"""Attributes of an instance replaced for a while (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn


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
