"""A user's DataLoader copied, with its batches from elsewhere (layer T).

Copied, not rebuilt: a subclass with required arguments, a custom collate function, workers, pinning and batches of any
type stay what they are. A copy of such a copy, and what a pickle of it holds, is the user's own loader: what feeds it
belongs to one fit on one rank.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch.utils.data import DataLoader


class BatchFeed(ABC):
    """What a copied loader hands out instead of its own batches."""

    @abstractmethod
    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns an iterator over an epoch that does nothing before the first batch is drawn.

        Lightning makes iterators before a checkpoint has settled its counters.

        Args:
            own: begins the iteration of the user's class over the copy.
        """

    def length(self, own: Callable[[], int]) -> int:
        """Number of batches; ``own`` returns what the user's class says of the copy."""
        return own()

    @property
    def fetching(self) -> DataLoader | None:
        """The loader whose workers fetch, if it is not the copy itself: persistent ones end with the copy."""
        return None


class LazyIterator(Iterator[Any]):
    """An iterator of a fed copy that begins when the first batch is drawn; given itself, by which it is known.

    No generator: one that knows itself keeps itself alive, and would keep the loader's workers when nobody draws more.

    Args:
        begin: returns the batches.
    """

    def __init__(self, begin: Callable[[object], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin(self)
        return next(self._batches)


def altered_copy(loader: DataLoader, **attributes: Any) -> DataLoader:
    """Returns a copy of ``loader``, not yet iterated over, with other attributes."""
    altered = copy.copy(loader)
    # DataLoader forbids changing some of them after construction; the copy is not yet in use by anyone.
    for name, value in {"_iterator": None, "_initial_iter_for_state_dict": False, **attributes}.items():
        object.__setattr__(altered, name, value)
    return altered


def fed_copy(loader: DataLoader, feed: BatchFeed, **attributes: Any) -> DataLoader:
    """Returns a copy of ``loader`` whose batches are the feed's, with other attributes."""
    fed = altered_copy(loader, _hetero_feed=feed, _hetero_origin=loader, **attributes)
    fed.__class__ = _fed_class(type(loader))
    return fed


def users_own(loader: Any) -> Any:
    """Returns the user's loader that a fed copy was made of; any other loader unchanged.

    A `CombinedLoader` keeps what the Trainer reads instead of its loaders, and a second fit gets that.
    """
    return getattr(loader, "__dict__", {}).get("_hetero_origin", loader)


def keep_samples(samples: list[Any]) -> list[Any]:
    """A collate function that leaves samples unchanged; here, so that workers can import it."""
    return samples


def _itself(loader: DataLoader) -> DataLoader:
    return loader


@cache
def _fed_class(cls: type[DataLoader]) -> type[DataLoader]:
    """The user's DataLoader class with batches from its feed.

    It has one base only: with a mixin the copy could not change its class (object layout).
    """

    def iterate(self: Any) -> Iterator[Any]:
        return self._hetero_feed.iterate(lambda: cls.__iter__(self))

    def length(self: Any) -> int:
        return self._hetero_feed.length(lambda: cls.__len__(self))

    def fetching(self: Any) -> DataLoader:
        other = self._hetero_feed.fetching
        return self if other is None else other

    def get_iterator(self: Any) -> Any:
        return vars(fetching(self))["_iterator"]

    def set_iterator(self: Any, value: Any) -> None:
        vars(fetching(self))["_iterator"] = value

    def reduce(self: Any, protocol: Any) -> Any:
        """Returns the user's own loader, for pickle and for `copy`; the class made here has no name to be found by."""
        del protocol
        return _itself, (altered_copy(self._hetero_origin),)

    # Lightning ends persistent workers through this attribute of the loader it knows.
    iterator = property(get_iterator, set_iterator)
    members = {"__module__": cls.__module__, "__iter__": iterate, "__len__": length, "_iterator": iterator}
    members["__reduce_ex__"] = reduce
    if hasattr(cls, "load_state_dict"):  # the Trainer's counters say where an epoch goes on; the class would skip again
        members |= {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    return type(f"Fed{cls.__name__}", (cls,), members)
