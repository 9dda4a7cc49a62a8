"""W ranks in one process, for the tests of orders, parts and loaders: threads that meet where ranks would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DistributedSampler

from lightning_hetero.data.batches import GlobalBatchSampler, Part, Split
from lightning_hetero.data.order import EpochOrder, ShuffledOrder

T = TypeVar("T")


def shuffled_order(samples: int, *, seed: int = 0, shuffle: bool = True, **sizes: Any) -> ShuffledOrder:
    """Returns stock DDP's order of so many samples."""
    dataset: Any = range(samples)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed, shuffle=shuffle)
    return ShuffledOrder(sampler, **sizes)


class Meeting:
    """Exchanges of W threads that play the ranks."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=30)


class FakeChannel:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, len(meeting.values)

    def all_gather_object(self, value: object) -> list:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        rows = self.all_gather_object(list(row))
        return lambda: rows

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        assert (indices is None) == (self.rank != 0)
        return list(self.all_gather_object(indices)[0])


def on_ranks(world_size: int, work: Callable[[FakeChannel], T]) -> list[T]:
    """Runs ``work`` once per rank, in threads; returns the results or raises what a rank raised."""
    meeting, results, errors = Meeting(world_size), [None] * world_size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(FakeChannel(meeting, rank))  # type: ignore[call-overload]
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def any_split(world_size: int, seed: int) -> Split:
    """Shares that change with every batch, often with ranks that get nothing."""

    def split(epoch: int, step: int, total: int) -> tuple[int, ...]:
        rng = np.random.default_rng([seed, epoch, step])
        cuts = [0, *sorted(rng.integers(0, total + 1, world_size - 1).tolist()), total]
        return tuple(b - a for a, b in pairwise(cuts))

    return split


Step = tuple[Part, list[Any]]  # of one rank: the part, and its indices without the dummy


def epoch_of(sampler: GlobalBatchSampler, epoch: int = 0, position: int = 0) -> list[Step]:
    sampler.set_epoch(epoch)
    issued = sampler.begin(position)
    batches = list(sampler)
    assert all(len(b) == p.computed for p, b in zip(issued, batches, strict=True))
    return [(p, b if p.samples else []) for p, b in zip(issued, batches, strict=True)]


def together(ranks: Sequence[Sequence[Step]]) -> list[list[Any]]:
    """The global batches: every step's indices in rank order; all ranks must have issued the same shares."""
    for step in zip(*ranks, strict=True):
        assert len({(p.epoch, p.step, p.shares, p.weight_base) for p, _ in step}) == 1
        assert tuple(p.samples for p, _ in step) == step[0][0].shares
    return [[i for _, batch in step for i in batch] for step in zip(*ranks, strict=True)]


def simulate(order: EpochOrder, split: Split, world_size: int, epoch: int = 0, **kwargs: Any) -> list[list[Step]]:
    return [
        epoch_of(GlobalBatchSampler(order, split=split, rank=r, **kwargs), epoch) for r in range(world_size)
    ]


def cut(indices: Sequence[int], size: int, drop_last: bool = False) -> list[list[int]]:
    chunks = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return chunks[:-1] if drop_last and chunks and len(chunks[-1]) < size else chunks
