"""Streams of unequal length, one of each rank's own, and one process over what they have trained together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from tests.ranks.data.indexed import indexed
from tests.ranks.kit import quiet_trainer

WORLD, BATCH = 3, 4  # global batches of 12
LENGTHS = (29, 13, 18)  # five global batches
MORE = (45, 20, 31)
APART = 100  # first indices of the ranks' samples


class Own(IterableDataset[Any]):
    """A rank's own samples in order; workers take turns, as users write it. Fails behind ``fails`` samples."""

    def __init__(self, rank: int, samples: int, fails: int | None = None) -> None:
        self.data, self.fails = indexed(WORLD * APART), fails
        self.own = range(APART * rank, APART * rank + samples)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number, i in enumerate(self.own[start::step]):
            if number == self.fails:
                raise OSError("the shard is gone")
            yield self.data[i]


class WrongLength(Own):
    """As many packages estimate it."""

    def __len__(self) -> int:
        return 7


class Iterating(Own):
    """Ends by StopIteration, in a worker too."""

    def __iter__(self) -> Iterator[Any]:
        self.rest = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.rest)


class Going(Own):
    """Goes on in the next epoch where the one before has ended."""

    def __init__(self, rank: int, samples: int) -> None:
        super().__init__(rank, samples)
        self.rest = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self.rest


class Streaming(DataLoader):
    """A subclass with its own arguments and state, as litData's."""

    def __init__(self, dataset: Any, *, shards: str, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.shards, self.passes = shards, 0

    def __iter__(self) -> Any:  # type: ignore[override]
        self.passes += 1
        return super().__iter__()


def loader(rank: int, lengths: Sequence[int] = LENGTHS, workers: int = 0, make: Any = Own, **kwargs: Any) -> DataLoader:
    kwargs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    return DataLoader(make(rank, lengths[rank]), **{"batch_size": BATCH, **kwargs})


class Batches(IterableDataset[Any]):
    """What one process trains on: whole global batches; each pass is the next epoch's."""

    def __init__(self, epochs: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
        self.epochs, self.data = iter(epochs), indexed(WORLD * APART)

    def __iter__(self) -> Iterator[Any]:
        for step in next(self.epochs):
            yield default_collate([self.data[i] for of_rank in step for i in of_rank])


def alone(module: Any, epochs: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(devices=1, max_epochs=len(epochs), **kwargs)
        trainer.fit(module, DataLoader(Batches(epochs), batch_size=None))
    return trainer
