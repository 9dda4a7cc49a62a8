"""An attribute of an instance replaced for a while (layer L)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``, by an attribute on the instance over its class's."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
