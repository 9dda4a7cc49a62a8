"""Granted samples become batches: order, fetching ahead, and what Lightning and users see of a assigned loader."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_hetero.data.assigned import SampleSource, assigned_loader
from tests.pure.predictors.simulated import shuffled_order
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

ORDER = [7, 3, 9, 1, 5, 0, 8, 2, 6, 4]  # of the epoch: position -> index


class Squares(Dataset[Any]):
    """Counts fetches in this process."""

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.fetched.append(index)
        return index, index**2, os.getpid()


class Lists(Squares):
    """Fetches lists; an empty one is an error."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert indices
        return [self[i] for i in indices]


def source_of(loader: DataLoader) -> SampleSource:
    order = shuffled_order(10, shuffle=False, global_batch_size=4, drop_last=False)
    return SampleSource(loader, order)


# ---- the sampler that Lightning sees ------------------------------------------------------------------------------


def test_its_batches_are_the_global_batches() -> None:
    sampled = source_of(DataLoader(Squares())).sampler
    assert len(sampled) == 3 and sampled.batch_size == 4 and not sampled.drop_last
    assert list(sampled) == []  # no epoch yet
    sampled.set_epoch(0)
    assert list(sampled) == []  # hooks may still change what is drawn
    assert list(sampled.draw()[1]) == [4, 8, 10]
    assert list(sampled) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# ---- batches without workers --------------------------------------------------------------------------------------


def column(batch: Any) -> list[int]:
    return batch[0].tolist()


@pytest.mark.parametrize("kind", [Squares, Lists])
def test_assigned_positions_in_the_order_given(kind: type[Squares]) -> None:
    data = kind()
    source = source_of(DataLoader(data, batch_size=2))
    assert source.ahead == 0 and source.ahead_loader is None
    source.begin(ORDER, [])
    batch = source.batch([(8, 10), (0, 3)])
    assert column(batch) == [6, 4, 7, 3, 9]
    assert batch[1].tolist() == [36, 16, 49, 9, 81]
    source.hint((3, 5))  # nobody to fetch it
    assert data.fetched == [6, 4, 7, 3, 9]


def test_a_whole_batch_dataset_gets_the_list() -> None:
    """``batch_size=None`` with a sampler of lists: the dataset makes batches."""

    class Whole(Dataset[Any]):
        def __getitem__(self, indices: list[int]) -> Tensor:
            return torch.tensor(indices) * 10

        def __len__(self) -> int:
            return 10

    data = Whole()
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 2, False))
    source = source_of(loader)
    source.begin(ORDER, [])
    assert source.batch([(0, 1), (4, 6)]).tolist() == [70, 50, 0]
    assert source.look([3, 2]).tolist() == [30, 20]
    assert source.dummy().tolist() == [70]


# ---- workers fetch ahead ------------------------------------------------------------------------------------------


def forked(data: Squares, **kwargs: Any) -> DataLoader:
    options = {"batch_size": 2, "num_workers": 1, "prefetch_factor": 2, "multiprocessing_context": "fork"}
    return DataLoader(data, **{**options, **kwargs})


def own(batch: Any) -> list[bool]:
    """Per sample, whether this process fetched it."""
    return [pid == os.getpid() for pid in batch[2].tolist()]


def fetching_ahead(rank: int, world: int, lists: bool) -> dict[str, Any]:
    data = Lists() if lists else Squares()
    source = source_of(forked(data))
    said: dict[str, Any] = {"ahead": source.ahead}
    source.begin(ORDER, [(0, 2), (2, 4)])
    source.hint((4, 6))
    said["as hinted"] = own(source.batch([(0, 2)]))
    source.hint((6, 8))
    said["less"] = own(source.batch([(2, 3)]))
    source.hint((0, 0))
    said["left over and new"] = own(source.batch([(3, 5), (8, 9)]))
    said["fill-in"] = own(source.batch([(5, 6)], due=0))
    # Two global steps without this rank: its hints for them are stale, that for the present one stands.
    source.hint((0, 0))
    source.hint((9, 10))
    said["later"] = own(source.batch([(6, 8)], due=2))
    said["in time"] = own(source.batch([(9, 10)], due=2))
    said["here"] = sorted(data.fetched)
    source.begin(ORDER[::-1], [(0, 2)])
    batch = source.batch([(0, 2)])
    said["next epoch"] = (column(batch), own(batch))
    source.end()
    return said


@pytest.mark.parametrize("lists", [False, True])
def test_hints_are_fetched_by_workers_and_all_else_here(lists: bool) -> None:
    (said,) = run_ranks(1, fetching_ahead, lists)
    assert said == {
        "ahead": 2,
        "as hinted": [False, False],
        "less": [False],
        "left over and new": [False, False, True],
        "fill-in": [False],
        "later": [False, False],
        "in time": [False],
        "here": [ORDER[8]],
        "next epoch": ([4, 6], [False, False]),
    }


def forgetting(rank: int, world: int) -> tuple[list[bool], int]:
    data = Squares(400)
    source = source_of(forked(data))
    order = list(range(400))
    source.begin(order, [(0, 20), (20, 40)])
    for global_step in range(16):  # nothing of what was hinted is ever assigned
        source.hint((20 * global_step + 40, 20 * global_step + 60))
        source.batch([(380, 381)])
    held = len(source._fetched)
    recent = own(source.batch([(319, 320), (0, 1)], due=0))
    source.end()
    return recent, held


def test_what_others_were_granted_is_forgotten_after_a_while() -> None:
    """Else a slow rank would hold the samples of the whole epoch in memory."""
    ((recent, held),) = run_ranks(1, forgetting)
    assert recent == [False, True]  # the last is here still, the first would be fetched again
    assert held == 3 * 20


def ending(rank: int, world: int, persistent: bool) -> list[int]:
    source = source_of(forked(Squares(), num_workers=2, persistent_workers=persistent))
    alive: list[int] = []
    for _ in range(2):
        source.begin(ORDER, [(0, 2)] * 4)
        source.batch([(0, 2)])
        alive.append(len(multiprocessing.active_children()))
        source.end()
        alive.append(len(multiprocessing.active_children()))
    assert source.ahead_loader is not None
    source.ahead_loader._iterator = None
    return [*alive, len(multiprocessing.active_children())]


@pytest.mark.parametrize(("persistent", "expected"), [(False, [2, 0, 2, 0, 0]), (True, [2, 2, 2, 2, 0])])
def test_workers_end_with_the_epoch_unless_persistent(persistent: bool, expected: list[int]) -> None:
    assert run_ranks(1, ending, persistent) == [expected]


# ---- the loader that Lightning gets -------------------------------------------------------------------------------


class Strict(DataLoader):
    def __init__(self, dataset: Any, *, secret: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.secret = secret


def test_a_assigned_loader_is_the_users_loader_but_for_its_batches() -> None:
    user = Strict(Squares(), secret=3, batch_size=2)
    source = source_of(user)
    asked: list[object] = []

    def batches(iterator: object) -> Iterator[str]:
        asked.append(iterator)
        return iter("ab")

    assigned = assigned_loader(user, source, batches)
    assert isinstance(assigned, Strict) and assigned.secret == 3 and assigned.dataset is user.dataset
    assert type(user) is Strict and len(user) == 5  # as it was
    assert len(assigned) == 3 and assigned.batch_sampler is source.sampler
    iterator = iter(assigned)
    assert asked == []  # only when the first batch is drawn: Lightning has not settled its counters before
    assert list(iterator) == ["a", "b"] and asked == [iterator]
    assert assigned._iterator is None


def test_without_automatic_batching_the_sampler_stands_in() -> None:
    user = DataLoader(Squares(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 2, False))
    source = source_of(user)
    assigned = assigned_loader(user, source, lambda iterator: iter(()))
    assert assigned.sampler is source.sampler and assigned.batch_sampler is None and len(assigned) == 3
