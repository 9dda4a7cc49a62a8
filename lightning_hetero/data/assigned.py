"""Batches made of assigned samples: the user's loader, asked for whatever positions the server assigns (layer T).

    order of the epoch:   |   batch t   |  batch t+1  |  ...        the same on every rank
    assigned to rank r:      [----)   [-)                          spans of positions, known only when they are needed
    fetched ahead:                         [----)                  what it will *probably* be assigned (hint)

With DataLoader workers, hints are fetched ahead in the user's own workers, sample by sample, and kept until they are
assigned; a sample that was not fetched is read directly. A hint is no assignment: being wrong costs time, never a
sample. The user's collate function runs in the main process, because only then the batch is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.data.batches import EpochSampler
from lightning_hetero.data.copies import BatchFeed, LazyIterator, altered_copy, fed_copy, keep_samples
from lightning_hetero.data.dropped import watch_drops
from lightning_hetero.data.loader import sampled_by
from lightning_hetero.data.order import EpochOrder
from lightning_hetero.measure.device import page_locked


class SampleSource:
    """Fetches samples of one map-style loader by their position in the epoch's order.

    Args:
        loader: the user's; not changed.
        order: of an epoch's samples.
        counted: whether the user says what a batch counts, so that its rows need not be its samples.

    Attributes:
        sampler: knows the epoch, and draws its order.
        ahead: batches to fetch ahead, as deep as the user's workers would.
        told: what claims and pushes say of it.
    """

    told = ()

    def __init__(self, loader: DataLoader, order: EpochOrder, *, counted: bool = True) -> None:
        self.sampler = EpochSampler(order)
        self._loader = loader
        self._drops = watch_drops(loader, counted)
        # With batch_size=None the dataset makes whole batches out of lists of indices: nothing to keep ahead.
        self._single = loader.batch_sampler is not None
        self.ahead = loader.num_workers * (loader.prefetch_factor or 0) if self._single else 0
        self._indices: Sequence[Any] = ()
        self._units: deque[tuple[int, int]] = deque()  # hints not yet given to the workers
        self._under_way: deque[tuple[int, int]] = deque()
        self._fetched: dict[int, Any] = {}
        self._kept: deque[tuple[int, int]] = deque()  # units in `_fetched`, the oldest first
        self.ahead_loader: DataLoader | None = None
        if self.ahead:
            self.ahead_loader = altered_copy(
                loader,
                batch_sampler=iter(self._next_unit, None),  # endless: each is decided when a worker is free to fetch it
                collate_fn=keep_samples,
                in_order=True,
                pin_memory=False,  # the collated batch is, see `batch`
            )
        self._workers: Iterator[list[Any]] | None = None

    def begin(self, indices: Sequence[Any], hints: Sequence[tuple[int, int]]) -> None:
        """Starts an epoch.

        Args:
            indices: the epoch's order; position -> index of the dataset.
            hints: spans likely to be assigned for the next ``ahead`` batches, in order.
        """
        self.end()
        self._indices = indices
        self._units = deque(hints)
        if self.ahead_loader is not None and len(indices):
            self._workers = iter(self.ahead_loader)

    def end(self) -> None:
        """Forgets the epoch; the user's workers end, unless they are persistent."""
        self._fetched.clear()
        self._kept.clear()
        self._under_way.clear()
        self._units.clear()
        self._workers = None

    def hint(self, span: tuple[int, int]) -> None:
        """Adds what will probably be assigned ``ahead`` batches later."""
        if self.ahead_loader is not None:
            self._units.append(span)

    def batch(self, spans: Sequence[tuple[int, int]], *, due: int = 1) -> Any:
        """Returns the collated batch of the assigned positions.

        Args:
            spans: positions ``[start, end)``, in the order they are to stand in the batch.
            due: hinted spans whose turn has come since the last call; they are taken from the workers.
        """
        self._take_in(due)
        positions = [p for start, end in spans for p in range(start, end)]
        if not self._single:
            return self._pinned(self._loader.collate_fn(self._loader.dataset[[self._indices[p] for p in positions]]))
        missing = [p for p in positions if p not in self._fetched]
        if missing:
            fetched = _items(self._loader.dataset, [self._indices[p] for p in missing])
            self._fetched.update(zip(missing, fetched, strict=True))
        batch = self._loader.collate_fn([self._fetched.pop(p) for p in positions])
        self._drops.see(batch, len(positions))
        return self._pinned(batch)

    def _pinned(self, batch: Any) -> Any:
        return page_locked(batch) if self._loader.pin_memory else batch

    def look(self, indices: Sequence[Any]) -> Any:
        """Returns a collated batch of dataset indices, aside from any epoch: for a user's look at the loader."""
        dataset = self._loader.dataset
        return self._loader.collate_fn(_items(dataset, list(indices)) if self._single else dataset[list(indices)])

    def dummy(self, *, due: int = 0) -> Any:
        """Returns a batch of one sample, for a step that must count nothing; ``due`` as in `batch`."""
        self._take_in(due)
        return self.look(self._indices[:1])

    def settle(self, *, wasted: bool) -> None:
        """What a wasted push has used is anybody's by now."""

    def _take_in(self, due: int) -> None:
        for _ in range(due):
            if self._workers is None or not self._under_way:
                return
            start, end = self._under_way.popleft()
            samples = next(self._workers)
            self._fetched.update(zip(range(start, end), samples, strict=False))
            self._kept.append((start, end))
            if len(self._kept) > self.ahead + 1:  # assigned to others by now, as a rule
                for position in range(*self._kept.popleft()):
                    self._fetched.pop(position, None)

    def _next_unit(self) -> list[Any]:
        """Returns the indices that a worker shall fetch next; one wasted sample where nothing was hinted."""
        start, end = self._units.popleft() if self._units else (0, 0)
        self._under_way.append((start, end))
        return [self._indices[p] for p in range(start, end)] or [self._indices[0]]


def _items(dataset: Any, indices: list[Any]) -> list[Any]:
    fetch: Callable[[list[Any]], list[Any]] | None = getattr(dataset, "__getitems__", None)
    return list(fetch(indices)) if fetch is not None else [dataset[i] for i in indices]


def assigned_loader(
    loader: DataLoader, source: SampleSource, batches: Callable[[object], Iterator[Any]]
) -> DataLoader:
    """Returns a copy of ``loader`` that hands out an epoch's batches of assigned samples.

    Args:
        loader: map-style; not changed.
        source: knows the number of batches and the epoch; its persistent workers are ended with the copy's.
        batches: returns a fresh iterator for the loader's iterator that is given to it; asked when the first batch is
            drawn.
    """
    sampler = source.sampler
    return fed_copy(loader, _Assigned(source, batches), **sampled_by(loader, sampler, sampler.order))


@dataclass(frozen=True, slots=True)
class _Assigned(BatchFeed):
    source: SampleSource
    batches: Callable[[object], Iterator[Any]]

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return LazyIterator(self.batches)

    def length(self, own: Callable[[], int]) -> int:
        return len(self.source.sampler)

    @property
    def fetching(self) -> DataLoader | None:
        return self.source.ahead_loader
