"""Batches of the data that one rank has for itself: its own loader, read pass after pass (layer T).

    pass 0 of the rank's data        pass 1 ...           the order is the loader's sampler's, drawn under a seed
    [ batch | batch | batch | ba ]   [ as the loader has them, one pass after the other
    [ batch  | batch  | batch  | batch ...                or of a size that changes: a batch may begin the data again

A finite stream is read a round ahead, so that its end is known before the round in which it comes.

Nothing is said to other ranks. Each pass is drawn under a seed made of run, rank and pass, so that a resumed run finds
its place in it; the global random streams are unchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_hetero.data.copies import BatchFeed, LazyIterator
from lightning_hetero.data.loader import LoaderSpec, base_sampler, batch_source
from lightning_hetero.data.own_stream import OwnStream
from lightning_hetero.data.samplers import announce_epoch, batch_size_of, draw
from lightning_hetero.federated.decide.rounds import cut_stream


class DataPlace(NamedTuple):
    """Where a rank is in its data.

    Attributes:
        passes: begun and ended.
        taken: of the pass that runs: samples, or batches of a batch sampler.
    """

    passes: int = 0
    taken: int = 0


class Issued(NamedTuple):
    """A batch that was drawn: its samples, and the place behind it."""

    samples: int
    after: DataPlace


class OwnOrder:
    """A rank's data in the order of its sampler.

    Args:
        loader: the user's; not changed.
        spec: what it is; no stream.
        seed: of the run and the rank.

    Attributes:
        by_batch: whether a batch sampler makes the batches.
        samples: of a pass; of a batch sampler, what its batches hold at most.
        batch_size: of the loader; the largest, if a batch sampler decides.
        batches: of a pass, as the loader would make them.
    """

    def __init__(self, loader: DataLoader, spec: LoaderSpec, *, seed: int) -> None:
        self.by_batch = spec.kind == "batch_sampler"
        self._source: Any = batch_source(loader) if self.by_batch else base_sampler(loader)
        self._seed = seed
        self._drop_last = spec.drop_last and not self.by_batch
        self._drawn: tuple[int, list[Any]] | None = None
        self._announced: int | None = None
        if self.by_batch:
            self.batches, self.batch_size = len(self._source), batch_size_of(self._source, seed)
            self.samples = self.batches * self.batch_size
        else:
            assert spec.batch_size is not None
            self.samples, self.batch_size = len(self._source), spec.batch_size
            full, rest = divmod(self.samples, self.batch_size)
            self.batches = full + (rest > 0 and not spec.drop_last)

    def announce(self, number: int) -> None:
        """Tells the user's sampler the pass. What it reads when it is drawn may be set until then."""
        self._announced = number
        announce_epoch(self._source, number)

    def forget(self) -> None:
        """What was drawn is drawn again: by workers that fetch ahead, before hooks have done their part."""
        self._drawn = None

    def items(self, number: int) -> Sequence[Any]:
        """Returns the indices, or lists of them, of a pass."""
        if self._drawn is None or self._drawn[0] != number:
            seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
            if self._announced != number:
                self.announce(number)
            generator = getattr(self._source, "generator", None)
            if isinstance(generator, torch.Generator):  # the user's own: it begins each pass as its seed says
                generator.manual_seed(generator.initial_seed() if not number else seed)
            self._drawn = (number, draw(self._source, seed))
        return self._drawn[1]

    def batch(self, place: DataPlace, size: int | None = None) -> tuple[list[Any], DataPlace]:
        """Returns a batch from ``place`` on, and the place behind it.

        Args:
            place: where it begins; behind the data, if these were more before: in the next pass.
            size: its samples, which begin the data again if need be; None: the loader's own batch. What ``drop_last``
                would leave out belongs to the next batch of a given size.
        """
        wanted, drawn = size or (1 if self.by_batch else self.batch_size), list[Any]()
        while len(drawn) < wanted and (size is not None or not drawn):
            items = self.items(place.passes)
            part = items[place.taken : place.taken + wanted - len(drawn)]
            drawn += part
            end = place.taken + len(part)
            over = end >= len(items) or (size is None and self._drop_last and end + wanted > len(items))
            place = DataPlace(place.passes + 1) if over else DataPlace(place.passes, end)
        return list(drawn[0]) if self.by_batch else drawn, place


class OwnBatches(Sampler[list[Any]]):
    """A batch sampler without end over a rank's own data; notes what it issues.

    Args:
        order: of the data.
        size: returns the samples of the next batch when it is drawn; None: the loader's own batches.
        place: returns where the rank is in its data when an epoch begins.
    """

    def __init__(
        self, order: OwnOrder, *, size: Callable[[], int] | None, place: Callable[[], DataPlace] = DataPlace
    ) -> None:
        self.order = order
        self._size, self._place = size, place
        self._next: tuple[DataPlace, deque[Issued]] = (DataPlace(), deque())
        # What Lightning and users look for on a batch sampler.
        self.batch_size = order.batch_size
        self.drop_last = False
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Tells the user's sampler of the pass that begins; Lightning calls it before users' hooks."""
        del epoch
        if not (place := self._place()).taken:
            self.order.announce(place.passes)

    def begin(self, place: DataPlace) -> deque[Issued]:
        """Sets where the next iteration starts and returns the queue of what it will issue."""
        if not place.taken:
            self.order.forget()
        issued: deque[Issued] = deque()
        self._next = (place, issued)
        return issued

    def drawn(self, place: DataPlace, own: Callable[[], Iterator[Any]]) -> Iterator[tuple[Any, Issued]]:
        """Yields the batches from a place on; ``own`` begins the loader's iteration, which ends with this one."""
        issued = self.begin(place)
        for batch in own():
            yield batch, issued.popleft()

    def __len__(self) -> int:
        return self.order.batches

    def __iter__(self) -> Iterator[list[Any]]:
        place, issued = self._next
        while True:
            drawn, place = self.order.batch(place, None if self._size is None else self._size())
            issued.append(Issued(len(drawn), place))
            yield drawn


class ClientStream(OwnStream):
    """A rank's own finite stream, of which the batches of a round are read ahead, and one more.

    Args:
        loader: the user's; not changed.
        counted: whether the user says what a batch counts.
    """

    def __init__(self, loader: DataLoader, *, counted: bool) -> None:
        super().__init__(loader, reserve=0, counted=counted)
        self._size = self._least = 1

    def look(self, batches: int, size: int, least: int) -> int:
        """Reads what a round needs; returns how many batches are left, at most one more than these.

        Args:
            batches: of the round.
            size: samples of each.
            least: of any batch.
        """
        self._size, self._least, self._reserve = size, min(least, size), (batches + 1) * size
        self._read_ahead()
        return self.left

    @property
    def left(self) -> int:
        """Batches that are left, as far as is read."""
        return self._cut()[0]

    def _cut(self) -> tuple[int, int]:
        return cut_stream(len(self._ahead), self._size, least=self._least, drop_last=bool(self.loader.drop_last))

    def drawn(self, place: DataPlace) -> Iterator[tuple[Any, Issued]]:
        """Yields the batches behind a place, at which the stream has begun; it ends with this iteration."""
        try:
            while self.left:
                _, samples = self._cut()
                place = place._replace(taken=place.taken + samples)
                batch = self.next(samples)
                self.settle(wasted=False)
                yield batch, Issued(samples, place)
        finally:
            self.end()


@dataclass(frozen=True, slots=True)
class OwnFeed(BatchFeed):
    """What the copy of a rank's loader hands out: its own data, batch by batch.

    Attributes:
        batches: returns an epoch's batches, asked when the first is drawn; given the iterator over the copy, and what
            begins the user's own iteration.
        count: batches of an epoch.
    """

    batches: Callable[[object, Callable[[], Iterator[Any]]], Iterator[Any]]
    count: int

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return LazyIterator(lambda iterator: self.batches(iterator, own))

    def length(self, own: Callable[[], int]) -> int:
        return self.count
