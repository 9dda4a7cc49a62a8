"""Caches of keys and values, which models of `transformers` hand to each of their layers (layer T).

They are for generating text token by token. In a training step, or a validation step that calls the model once, each
layer writes to its own part and nobody reads it: an empty cache and none compute the same. So in a pipeline a layer
gets none. A cache that comes a second time was meant to be read, and the result would be wrong: refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

__all__ = ["SeenCaches", "without_cache"]


def without_cache(value: Any) -> Any:
    """Returns None in place of a cache, and everything else as it is."""
    return None if _is_cache(value) else value


class SeenCaches:
    """The caches that the calls of one backbone have come with, while they exist."""

    def __init__(self) -> None:
        self._seen: WeakSet[Any] = WeakSet()

    def add(self, values: Iterable[Any]) -> None:
        """Takes down the caches among the arguments of a call.

        Raises:
            RuntimeError: one is not empty, or has come before.
        """
        for cache in filter(_is_cache, values):
            if cache in self._seen or cache.get_seq_length() > 0:
                raise RuntimeError(
                    f"the backbone is called with a {type(cache).__name__} that an earlier call has filled: the layers"
                    " of a pipeline keep no keys and values from call to call; pass use_cache=False (to generate():"
                    " slower, the same text), or generate on one device"
                )
            self._seen.add(cache)


def _is_cache(value: Any) -> bool:
    transformers = sys.modules.get("transformers")  # whoever has one has imported it
    return transformers is not None and isinstance(value, transformers.Cache)
