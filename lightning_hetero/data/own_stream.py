"""A rank's own finite stream, read ahead of what the rank is assigned; what has not counted comes again (layer T).

    loader --> | read ahead | --next(n)--> taken --settle--> trained, or back to the front

Used by engines in which a rank learns only afterwards whether its samples have counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from lightning_hetero.data.copies import BatchFeed, LazyIterator
from lightning_hetero.data.dropped import watch_drops
from lightning_hetero.data.stream import raise_no_length, uncollated
from lightning_hetero.measure.device import page_locked


class OwnStream:
    """The samples of one rank's loader of an iterable dataset, epoch by epoch.

    Args:
        loader: the user's; not changed.
        reserve: samples to have read besides those that are taken, unless the stream is through.
        counted: whether the user says what a batch counts, so that its rows need not be its samples.

    Attributes:
        loader: as given.
        reading: the copy that reads.
        read: samples of the epoch read so far, with those that a resumed run has passed over.
        through: whether these were all.
    """

    def __init__(self, loader: DataLoader, *, reserve: int, counted: bool = True) -> None:
        self.loader, self.reading = loader, uncollated(loader)
        self._reserve, self._drops = reserve, watch_drops(loader, counted)
        self.read, self.through = 0, False
        self._ahead: deque[Any] = deque()
        self._taken: list[Any] = []
        self._samples: Iterator[Any] = iter(())
        self._dummy: list[Any] = []

    def begin(self, passed: int) -> None:
        """Begins a fresh pass over the stream, and passes over so many samples."""
        self.end()
        self._samples = chain.from_iterable(self.reading)
        deque(islice(self._samples, passed), maxlen=0)
        self.read, self.through = passed, False
        self._read_ahead()

    def end(self) -> None:
        """Forgets the epoch; the user's workers end, unless they are persistent."""
        self._ahead.clear()
        self._taken.clear()
        self._samples = iter(())

    def _read_ahead(self) -> None:
        wanted = self._reserve - len(self._ahead)
        if wanted > 0 and not self.through:
            before = len(self._ahead)
            self._ahead += islice(self._samples, wanted)
            self.read += len(self._ahead) - before
            self.through = len(self._ahead) < self._reserve
            self._dummy = self._dummy or list(islice(self._ahead, 1))

    def share_dummy(self, gather: Callable[[object], Sequence[list[Any]]]) -> None:
        """Takes another rank's sample for a rank that has never had any; ``gather`` is a collective."""
        kept = gather(self._dummy)
        self._dummy = self._dummy or next(filter(None, kept), [])

    def next(self, samples: int) -> Any:
        """Returns the collated batch of the next so many samples, which are read."""
        taken = [self._ahead.popleft() for _ in range(samples)]
        self._taken += taken
        self._read_ahead()
        batch = self.loader.collate_fn(taken)
        self._drops.see(batch, samples)
        return page_locked(batch) if self.loader.pin_memory else batch

    def settle(self, *, wasted: bool) -> None:
        """What was taken since the last call is trained, or else comes next once more."""
        if wasted:
            self._ahead.extendleft(reversed(self._taken))
        self._taken.clear()

    def dummy(self, samples: int = 1) -> Any:
        """Returns a batch of copies of one sample, for a step that must count nothing."""
        return self.loader.collate_fn(self._dummy * samples)


def read_together(rank: int, gather: Callable[[object], Sequence[Any]], read: Callable[[], Any]) -> list[Any]:
    """Returns what each rank's reading returns, which is not None; a collective, also where a stream fails.

    Raises:
        RuntimeError: another rank's stream fails.
    """
    mine, error = None, None
    try:
        mine = read()
    except Exception as failed:
        error = failed
    told = dict(gather((rank, mine)))
    if error is not None:
        raise error
    if failing := [other for other, value in told.items() if value is None]:
        raise RuntimeError(f"the stream of rank {failing[0]} fails at its begin, see its error")
    return list(told.values())


@dataclass(frozen=True, slots=True)
class OwnStreamFeed(BatchFeed):
    """What the copy of a rank's loader hands out; who only looks gets the loader's own batches.

    Attributes:
        stream: of the rank.
        batches: returns the batches of the epoch that is trained for the loader's iterator that is given to it; None
            for one who only looks.
        begins: called when an iterator is made.
    """

    stream: OwnStream
    batches: Callable[[object], Iterator[Any] | None]
    begins: Callable[[], None]

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self.begins()
        return LazyIterator(lambda iterator: self.batches(iterator) or iter(self.stream.loader))

    def length(self, own: Callable[[], int]) -> NoReturn:
        raise_no_length()

    @property
    def fetching(self) -> DataLoader:
        return self.stream.reading
