"""The user's loader, re-batched: map-style and iterable, without workers, ranks simulated one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_hetero.data.batches import GlobalBatchSampler, Part, Split
from lightning_hetero.data.loader import inspect_loader, rebatched_loader
from tests.pure.predictors.simulated import any_split, shuffled_order

seeds = st.integers(0, 2**31)


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.n


class Picky(DataLoader):
    """Cannot be rebuilt from its attributes."""

    def __init__(self, path: str, *, size: int) -> None:
        super().__init__(Numbers(len(path)), batch_size=size, shuffle=True, collate_fn=tuple)


# ---- map-style loaders -------------------------------------------------------------------------------------


def rebatched(
    loader: DataLoader, n: int, size: int, split: Split, rank: int, position: Callable[[], int] = lambda: 0
) -> tuple[DataLoader, list[Part]]:
    order = shuffled_order(n, seed=0, shuffle=True, global_batch_size=size, drop_last=False)
    parts: list[Part] = []
    sampler = GlobalBatchSampler(order, split=split, rank=rank)
    return rebatched_loader(loader, sampler, position=position, on_fetch=parts.append), parts


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), seeds)
def test_each_batch_comes_with_its_part(n: int, size: int, world: int, seed: int) -> None:
    order = shuffled_order(n, seed=0, shuffle=True, global_batch_size=size, drop_last=False).indices(0)
    whole: list[int] = []
    for rank in range(world):
        loader, parts = rebatched(DataLoader(Numbers(n), batch_size=size), n, size, any_split(world, seed), rank)
        handed = 0
        for batch in loader:
            handed += 1
            assert len(parts) == handed  # reported when handed out, not when requested
            assert len(batch) == max(1, parts[-1].samples)
            whole += batch.tolist() if parts[-1].samples else []
        assert handed == len(loader) == -(-n // size)
    assert sorted(whole) == sorted(order)


def test_a_subclass_with_required_arguments_stays_itself() -> None:
    original = Picky("abcdefg", size=2)
    sampler, batch_sampler = original.sampler, original.batch_sampler
    loader, _ = rebatched(original, 7, 4, lambda *_: (3, 1), 0)
    assert isinstance(loader, Picky)
    assert all(type(batch) is tuple for batch in loader)
    assert (original.sampler, original.batch_sampler, type(original)) == (sampler, batch_sampler, Picky)
    assert sorted(i for batch in original for i in batch) == list(range(7))


def test_batches_by_sampler_take_the_samplers_place() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader, _ = rebatched(DataLoader(torch.arange(8) * 10, sampler=batches, batch_size=None), 8, 4,  # type: ignore
                          lambda *_: (4,), 0)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(0, 80, 10))


def test_the_first_batch_asks_for_the_position_not_the_iterator() -> None:
    where = [0]
    loader, parts = rebatched(DataLoader(Numbers(12), batch_size=4), 12, 4, lambda *_: (4,), 0, lambda: where[0])
    iterator = iter(loader)
    where[0] = 2
    assert len(list(iterator)) == 1
    assert parts[0].step == 2


def test_batches_out_of_order_are_put_in_order() -> None:
    try:
        unordered = DataLoader(Numbers(8), batch_size=2, in_order=False)
    except TypeError:
        pytest.skip("this torch has no in_order")
    loader, _ = rebatched(unordered, 8, 4, lambda *_: (4,), 0)
    assert (loader.in_order, unordered.in_order) == (True, False)


class Ignoring(DataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([1, 2, 3])


# ---- what a loader is --------------------------------------------------------------------------------------


class Fancy(DistributedSampler):
    pass


class FancyBatches(BatchSampler):
    pass


class Bare(Dataset[int]):
    """Map-style, without a length: a sampler knows it."""

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


NINE = Numbers(9)
ONE_OF_TWO: dict[str, Any] = {"num_replicas": 2, "rank": 1}


@pytest.mark.parametrize(
    ("arguments", "kind", "batch_size"),
    [
        ({"batch_size": 4}, "plain", 4),
        ({"batch_size": 4, "shuffle": True}, "plain", 4),
        ({"batch_size": 4, "sampler": RandomSampler(NINE, num_samples=3)}, "plain", 4),
        ({"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 9, 9)}, "sampler", 4),
        ({"batch_size": 4, "sampler": [3, 1, 2]}, "sampler", 4),
        ({"batch_size": 4, "sampler": DistributedSampler(NINE, **ONE_OF_TWO)}, "distributed", 4),
        ({"batch_size": 4, "sampler": Fancy(NINE, **ONE_OF_TWO)}, "distributed_subclass", 4),
        ({"batch_sampler": BatchSampler(SequentialSampler(NINE), 5, True)}, "plain", 5),
        ({"batch_sampler": BatchSampler(Fancy(NINE, **ONE_OF_TWO), 5, True)}, "distributed_subclass", 5),
        ({"batch_sampler": FancyBatches(SequentialSampler(NINE), 5, True)}, "batch_sampler", None),
        ({"batch_sampler": [[1, 2], [3]]}, "batch_sampler", None),
        ({"batch_size": None, "sampler": BatchSampler(RandomSampler(NINE), 5, True)}, "plain", 5),
        ({"batch_size": None, "sampler": FancyBatches(RandomSampler(NINE), 5, True)}, "batch_sampler", None),
        ({"batch_size": None, "sampler": [[1, 2], [3]]}, "batch_sampler", None),
    ],
)
def test_kinds_of_loaders(arguments: dict[str, Any], kind: str, batch_size: int | None) -> None:
    spec = inspect_loader(DataLoader(NINE, **arguments))
    assert (spec.kind, spec.batch_size, spec.samples, spec.read_ahead) == (kind, batch_size, 9, 0)
    assert spec.drop_last == (batch_size == 5 or isinstance(arguments.get("batch_sampler"), BatchSampler)
                              or isinstance(arguments.get("sampler"), FancyBatches))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize(("workers", "prefetch", "ahead"), [(0, None, 0), (1, None, 2), (3, 4, 12)])
def test_read_ahead_is_workers_times_prefetch(workers: int, prefetch: int | None, ahead: int) -> None:
    loader = DataLoader(NINE, batch_size=2, num_workers=workers, prefetch_factor=prefetch)
    assert (inspect_loader(loader).read_ahead, inspect_loader(loader).workers) == (ahead, workers)
    stream = DataLoader(Endless(), batch_size=2, num_workers=workers, prefetch_factor=prefetch)
    assert (inspect_loader(stream).read_ahead, inspect_loader(stream).kind) == (0, "stream")


def test_a_dataset_without_a_length_goes_by_its_sampler() -> None:
    spec = inspect_loader(DataLoader(Bare(), batch_size=2, sampler=[4, 5, 6]))
    assert (spec.kind, spec.samples) == ("sampler", None)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "train loader of type list cannot be divided"),
        (Ignoring(NINE, batch_size=2), r"Ignoring\.__iter__ does not draw from its batch_sampler"),
        (DataLoader(NINE, sampler=[[1, 2], [3]], batch_size=1), "sampler list yields lists"),
        (DataLoader(NINE, batch_size=None), r"DataLoader\(batch_size=None\) hands single items"),
        (DataLoader(Endless(), batch_size=None), "IterableDataset that makes its own batches"),
    ],
)
def test_loaders_that_cannot_be_divided(loader: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        inspect_loader(loader)


class Shuffled(Sampler[list[int]]):
    """Yields lists in orders from generators of every kind."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy, self.old, self.python = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.rand(1, generator=self.torch), self.numpy.random(), self.old.rand(), self.python.random()
        own = torch.rand(1), np.random.rand(), random.random()
        yield [int(1e6 * float(x)) for x in (*drawn, *own)]


def test_a_look_at_a_sampler_leaves_its_generators_as_they_were() -> None:
    loader = DataLoader(NINE, batch_size=None, sampler=Shuffled())
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    assert inspect_loader(loader).kind == "batch_sampler"
    looked = list(loader.sampler)
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    assert looked == list(Shuffled())


class Wrapped(DataLoader):
    """Draws from its batch sampler, and adds to what comes of it."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch + 1


def test_a_subclass_that_adds_to_its_batches_can_be_divided() -> None:
    assert inspect_loader(Wrapped(NINE, batch_size=2, shuffle=True, num_workers=1)).kind == "plain"
