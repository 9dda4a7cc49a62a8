"""Puts a re-batching sampler into the user's own DataLoader (layer T).

Only the batch sampler of the copy changes, and each batch comes with a note of which part it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_hetero.data.batches import GlobalBatchSampler, Part
from lightning_hetero.data.copies import BatchFeed, LazyIterator, altered_copy, fed_copy
from lightning_hetero.data.dropped import DroppedSamples, watch_drops
from lightning_hetero.data.order import EpochOrder
from lightning_hetero.data.samplers import undrawn, yields_batches

LoaderKind = Literal["plain", "sampler", "distributed", "distributed_subclass", "batch_sampler", "stream"]


class IndivisibleError(TypeError):
    """A train loader's batches cannot be divided by speed; the message says why, and what would be needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """What a train loader is, in the terms that matter for dividing its batches.

    Attributes:
        kind: ``plain`` (torch's own samplers), ``sampler``, ``distributed`` (exactly torch's `DistributedSampler`),
            ``distributed_subclass``, ``batch_sampler``, ``stream``.
        samples: length of the dataset, ``None`` without a length.
        batch_size: per-device batch size, ``None`` if a batch sampler decides it.
        drop_last: leave out the partial last batch.
        read_ahead: batches requested before the oldest of them is used.
        workers: ``num_workers``; they decide the order of an iterable dataset's samples.
    """

    kind: LoaderKind
    samples: int | None
    batch_size: int | None
    drop_last: bool
    read_ahead: int
    workers: int = 0


def inspect_loader(loader: object) -> LoaderSpec:
    """Classifies a train loader; draws at most one item of a sampler of the user's, which nobody has drawn after.

    Raises:
        IndivisibleError: not a `DataLoader`, or one whose batches cannot be divided.
        TypeError: its ``load_state_dict`` was called.
    """
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise IndivisibleError(
            f"a train loader of type {name} cannot be divided by speed: pass a torch.utils.data.DataLoader or a"
            " subclass of it"
        )
    if hasattr(loader, "load_state_dict") and hasattr(loader.dataset, "load_state_dict"):
        raise IndivisibleError(
            f"the dataset {type(loader.dataset).__name__} has a state (state_dict), which {name} stores for parts of"
            " equal size only: pass torch.utils.data.DataLoader instead, which stores none"
        )
    if vars(loader).get("next_iter_state"):
        raise TypeError(
            f"load_state_dict of the train loader ({name}) was called, but the strategy itself continues an epoch where"
            " the Trainer's checkpoint stopped: do not call it, or use strategy='ddp'"
        )
    drawn_from, own_iter = probed(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise IndivisibleError(
                "an IterableDataset that makes its own batches (DataLoader(batch_size=None)) cannot be divided by"
                " speed: yield samples and set batch_size"
            )
        if own_iter:
            raise IndivisibleError(
                f"{name} has its own iterator, which would get single samples of its IterableDataset instead of"
                " batches: change samples in the dataset, batches in collate_fn, and pass torch.utils.data.DataLoader"
            )
        # The samples are re-batched after the loader, so its read-ahead delays no decision.
        return _spec(loader, "stream", loader.batch_size, loader.drop_last, samples=None, read_ahead=0)
    if not drawn_from:
        raise IndivisibleError(
            f"{name}.__iter__ does not draw from its batch_sampler, so its batches cannot be divided by speed: make"
            " them from super().__iter__()"
        )
    sampler, batch_size, drop_last = loader.sampler, loader.batch_size, loader.drop_last
    if batch_size is None:
        source = batch_source(loader)
        if loader.batch_sampler is None and not isinstance(source, BatchSampler) and not yields_batches(source):
            raise IndivisibleError(
                "DataLoader(batch_size=None) hands single items to training_step, which cannot be divided by speed: set"
                " batch_size, or pass sampler=BatchSampler(...)"
            )
        if type(source) is not BatchSampler:
            return _spec(loader, "batch_sampler", None, bool(getattr(source, "drop_last", False)))
        sampler, batch_size, drop_last = source.sampler, source.batch_size, source.drop_last
    elif batch_size == 1 and _kind_of(sampler) in ("sampler", "distributed_subclass") and yields_batches(sampler):
        raise IndivisibleError(
            f"the sampler {type(sampler).__name__} yields lists, each of which is one item of"
            " DataLoader(batch_size=1) and cannot be divided by speed: pass it as batch_sampler, or set"
            " batch_size=None"
        )
    return _spec(loader, _kind_of(sampler), batch_size, drop_last)


def _spec(loader: DataLoader, kind: LoaderKind, batch_size: int | None, drop_last: bool, **known: Any) -> LoaderSpec:
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None  # type: ignore[arg-type]
    found = {"samples": samples, "read_ahead": _ahead(loader), "workers": loader.num_workers, **known}
    return LoaderSpec(kind=kind, batch_size=batch_size, drop_last=drop_last, **found)


def _ahead(loader: DataLoader) -> int:
    return loader.num_workers * (loader.prefetch_factor or 0)


def _kind_of(sampler: object) -> LoaderKind:
    if type(sampler) is DistributedSampler:
        return "distributed"
    if isinstance(sampler, DistributedSampler):
        return "distributed_subclass"
    if isinstance(sampler, RandomSampler | SequentialSampler):
        return "plain"
    return "sampler"


def batch_source(loader: DataLoader) -> Any:
    """Returns what the loader draws from: its batch sampler, or the sampler instead with ``batch_size=None``."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def probed(loader: DataLoader) -> tuple[bool, bool]:
    """Returns whether a subclass draws from the batch sampler, where ours will be, and whether its iterator is its own.

    Asked of a copy with an empty sampler, and with an empty stream.
    """
    if type(loader) is DataLoader:
        return True, False
    place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    asked, iterator = _Asked(), None
    aside = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, place: asked}
    if isinstance(loader.dataset, IterableDataset):
        aside["dataset"] = ChainDataset([])
    with undrawn(loader), suppress(Exception):
        iterator = iter(altered_copy(loader, **aside))
        next(iterator, None)
    return asked.was, type(iterator).__module__.partition(".")[0] not in ("torch", "torchdata")


class _Asked(Sampler[Any]):
    """An empty sampler that notes whether anybody drew from it."""

    was = False

    def __iter__(self) -> Iterator[Any]:
        self.was = True
        return iter(())

    def __len__(self) -> int:
        return 0


def base_sampler(loader: DataLoader) -> Any:
    """Returns the sampler of single indices behind a loader without its own batch sampler."""
    source = batch_source(loader)
    return source.sampler if type(source) is BatchSampler else loader.sampler


def rebatched_loader(
    loader: DataLoader, sampler: GlobalBatchSampler, *, position: Callable[[], int],
    restarts: Callable[[], bool] = lambda: False, on_fetch: Callable[[Part], None],
    looks_on: Callable[[object], int] = lambda _: 0, counted: bool = True,
) -> DataLoader:  # fmt: skip
    """Returns a copy of ``loader`` that draws this rank's parts from ``sampler``.

    Args:
        loader: map-style loader; not changed.
        sampler: decides and notes the parts.
        position: batches of this epoch already trained on; asked when the first batch is drawn, not when the
            iterator is made, because Lightning makes it before a checkpoint has settled its counters.
        restarts: whether they are all of the epoch's, see `GlobalBatchSampler.begin`; asked with ``position``.
        on_fetch: gets each part when its batch is handed out, in order.
        looks_on: given an iterator of the copy, 0 if it trains, or the number of ranks if somebody only looks at its
            batches; those are equal parts, and no part is reported.
        counted: whether the user says what a batch counts, so that its rows need not be its samples.
    """
    # Batch t must be the same global batch on every rank, and parts are matched to batches in order.
    attributes = {"in_order": True, **sampled_by(loader, sampler, sampler.order)}
    feed = _Parts(sampler, position, restarts, on_fetch, looks_on, watch_drops(loader, counted), 1 + _ahead(loader))
    return fed_copy(loader, feed, **attributes)


def sampled_by(loader: DataLoader, batches: Sampler[Any], order: EpochOrder) -> dict[str, Any]:
    """Returns the attributes of a copy that draws ``batches``; its sampler is the one that stock DDP would give it."""
    if loader.batch_sampler is None:
        return {"sampler": batches}
    own = order.source
    return {"batch_sampler": batches, **({"sampler": own} if isinstance(own, DistributedSampler) else {})}


@dataclass(frozen=True, slots=True)
class _Parts(BatchFeed):
    """The loader's own batches; of each, the part that it is gets reported."""

    sampler: GlobalBatchSampler
    position: Callable[[], int]
    restarts: Callable[[], bool]
    on_fetch: Callable[[Part], None]
    looks_on: Callable[[object], int]
    drops: DroppedSamples
    most: int  # batches drawn when one is handed out

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        def begin(iterator: object) -> Iterator[Any]:
            if ranks := self.looks_on(iterator):
                self.sampler.begin_look(ranks)
                return own()
            return self._trained_on(own)

        return LazyIterator(begin)

    def _trained_on(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        sampler = self.sampler
        issued = sampler.begin(self.position(), restarts=self.restarts())
        batches = own()
        for number in count():
            started_s, decided_s = time.perf_counter(), sampler.decision_s
            batch = next(batches, _END)
            if batch is _END:
                return
            if not 1 <= len(issued) <= self.most:
                raise TypeError(
                    f"the loader's __iter__ has drawn {len(issued)} batches from its batch_sampler and handed out one:"
                    " hand out each batch of super().__iter__() once and at once; num_workers fetch ahead"
                )
            spent_s = time.perf_counter() - started_s - (sampler.decision_s - decided_s)
            part = issued.popleft()
            # Of the first batch unknown: it has started workers and opened files, which does not grow with samples.
            part.fetch_s = max(0.0, spent_s) if number else 0.0
            self.drops.see(batch, part.computed)
            self.on_fetch(part)
            yield batch


_END = object()
