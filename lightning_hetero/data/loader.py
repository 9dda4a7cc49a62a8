"""Puts a re-batching sampler into the user's own DataLoader (layer T).

The loader is copied, not rebuilt: a subclass with required arguments, a custom collate function, workers, pinning and
batches of any type stay what they are. Only the batch sampler changes, and the class of the copy gains an ``__iter__``
that notes which part each batch is.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_hetero.data.batches import GlobalBatchSampler, Part

__all__ = ["LoaderSpec", "inspect_loader", "rebatched_loader"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """What a train loader is, in the terms that matter for dividing its batches.

    Attributes:
        kind: ``plain`` (torch's own samplers), ``sampler``, ``distributed`` (exactly torch's `DistributedSampler`),
            ``distributed_subclass``, ``batch_sampler``, ``stream``.
        samples: length of the dataset, ``None`` if it has none.
        batch_size: per-device batch size, ``None`` if a batch sampler decides it.
        drop_last: leave out the partial last batch.
        read_ahead: batches requested before the oldest of them is used.
        workers: ``num_workers``; they decide the order of an iterable dataset's samples.
    """

    kind: Literal["plain", "sampler", "distributed", "distributed_subclass", "batch_sampler", "stream"]
    samples: int | None
    batch_size: int | None
    drop_last: bool
    read_ahead: int
    workers: int = 0


def inspect_loader(loader: object) -> LoaderSpec:
    """Classifies a train loader.

    Raises:
        TypeError: not a `DataLoader`, or one whose batches cannot be divided; the message says what to use instead.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"train dataloader of type {type(loader).__name__} cannot be re-batched for unequal devices; pass a"
            " torch.utils.data.DataLoader (or a subclass), or use strategy='ddp'"
        )
    read_ahead = loader.num_workers * (loader.prefetch_factor or 0)
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise TypeError(
                "an IterableDataset that makes its own batches (DataLoader(batch_size=None)) cannot be divided among"
                " unequal devices; yield samples and set batch_size, or use strategy='ddp'"
            )
        # The samples are re-batched after the loader, so its read-ahead delays no decision.
        return LoaderSpec(
            kind="stream",
            samples=None,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            read_ahead=0,
            workers=loader.num_workers,
        )
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None  # type: ignore[arg-type]
    if loader.batch_size is None:
        source = batch_source(loader)
        if loader.batch_sampler is None and not isinstance(source, BatchSampler):
            raise TypeError(
                "DataLoader(batch_size=None) hands single items to training_step, which cannot be divided among"
                " unequal devices; set batch_size, or pass sampler=BatchSampler(...)"
            )
        if type(source) is not BatchSampler:
            return LoaderSpec(
                kind="batch_sampler",
                samples=samples,
                batch_size=None,
                drop_last=bool(getattr(source, "drop_last", False)),
                read_ahead=read_ahead,
                workers=loader.num_workers,
            )
        sampler, batch_size, drop_last = source.sampler, source.batch_size, source.drop_last
    else:
        sampler, batch_size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    return LoaderSpec(
        kind=_kind_of(sampler),
        samples=samples,
        batch_size=batch_size,
        drop_last=drop_last,
        read_ahead=read_ahead,
        workers=loader.num_workers,
    )


def _kind_of(sampler: object) -> Literal["plain", "sampler", "distributed", "distributed_subclass"]:
    if type(sampler) is DistributedSampler:
        return "distributed"
    if isinstance(sampler, DistributedSampler):
        return "distributed_subclass"
    if isinstance(sampler, RandomSampler | SequentialSampler):
        return "plain"
    return "sampler"


def batch_source(loader: DataLoader) -> Any:
    """Returns what the loader draws from: its batch sampler, or the sampler in its place with ``batch_size=None``."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def base_sampler(loader: DataLoader) -> Any:
    """Returns the sampler of single indices behind a loader without a batch sampler of its own."""
    source = batch_source(loader)
    return source.sampler if type(source) is BatchSampler else loader.sampler


def rebatched_loader(
    loader: DataLoader,
    sampler: GlobalBatchSampler,
    *,
    position: Callable[[], int],
    on_fetch: Callable[[Part], None],
    clock: Callable[[], float] = time.perf_counter,
) -> DataLoader:
    """Returns a copy of ``loader`` that draws this rank's parts from ``sampler``.

    Args:
        loader: map-style loader; not changed.
        sampler: decides and notes the parts.
        position: batches of this epoch already trained on; asked when the first batch is drawn, not when the
            iterator is made, because Lightning makes it before a checkpoint has settled its counters.
        on_fetch: gets each part when its batch is handed out, in order.
        clock: seconds.
    """
    balanced = copy.copy(loader)
    balanced.__class__ = _balanced_class(type(loader))
    slots: dict[str, Any] = {"_hetero": _Feed(sampler, position, on_fetch, clock), "_iterator": None}
    # DataLoader forbids changing these after construction; the copy is not yet in use by anyone.
    if not getattr(loader, "in_order", True):
        slots["in_order"] = True  # all ranks must train the parts of one global batch together
    slots["batch_sampler" if loader.batch_sampler is not None else "sampler"] = sampler
    # Batch t must be the same global batch on every rank, and parts are matched to batches in order.
    slots["in_order"] = True
    for name, value in slots.items():
        object.__setattr__(balanced, name, value)
    return balanced


@dataclass(frozen=True, slots=True)
class _Feed:
    sampler: GlobalBatchSampler
    position: Callable[[], int]
    on_fetch: Callable[[Part], None]
    clock: Callable[[], float]


@cache
def _balanced_class(cls: type[DataLoader]) -> type[DataLoader]:
    """The user's DataLoader class, iterating as before and reporting each part handed out.

    A class with one base only: with a mixin the copy could not change its class (object layout).
    """

    def iterate(self: Any) -> Iterator[Any]:
        return _PartIterator(self._hetero, lambda: cls.__iter__(self))

    return type(f"Balanced{cls.__name__}", (cls,), {"__module__": cls.__module__, "__iter__": iterate})


class _PartIterator:
    def __init__(self, feed: _Feed, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._feed = feed
        self._make = make_iterator
        self._inner: Iterator[Any] | None = None
        self._issued: deque[Part] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        feed = self._feed
        started_s, decided_s = feed.clock(), feed.sampler.decision_s
        first = self._inner is None
        if self._inner is None:
            self._issued = feed.sampler.begin(feed.position())
            self._inner = self._make()
        batch = next(self._inner)
        if not self._issued:
            raise TypeError(
                f"{type(self._feed.sampler).__name__} was not asked for this batch: the loader's __iter__ does not"
                " draw from its batch_sampler, so its batches cannot be divided; use strategy='ddp'"
            )
        spent_s = feed.clock() - started_s - (feed.sampler.decision_s - decided_s)
        if first:  # starting workers and opening files is no work that grows with samples
            spent_s = 0.0
        part = self._issued.popleft()
        part.fetch_s = max(0.0, spent_s)
        feed.on_fetch(part)
        return batch
