"""A rank's own data: every sample once per pass, in batches of any size, from any place."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_hetero.data.loader import inspect_loader
from lightning_hetero.federated.runtime.own import DataPlace, OwnBatches, OwnOrder


def order_of(loader: DataLoader, seed: int = 0) -> OwnOrder:
    return OwnOrder(loader, inspect_loader(loader), seed=seed)


START = DataPlace()


def drawn(order: OwnOrder, batches: int, place: DataPlace = START, sizes: list[int] | None = None) -> list[list[int]]:
    sampler = OwnBatches(order, size=None if sizes is None else iter(sizes).__next__)
    issued = sampler.begin(place)
    found = list(islice(sampler, batches))
    assert [note.samples for note in issued] == [len(batch) for batch in found]
    return found


def test_without_shuffling_the_batches_are_the_loaders_pass_after_pass() -> None:
    order = order_of(DataLoader(list(range(7)), batch_size=3))
    assert (order.samples, order.batch_size, order.batches) == (7, 3, 3)
    assert drawn(order, 5) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], [3, 4, 5]]
    dropping = order_of(DataLoader(list(range(7)), batch_size=3, drop_last=True))
    assert dropping.batches == 2 and drawn(dropping, 3) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_batch_sampler_makes_its_own_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(5)), 2, False)

    class Own(BatchSampler):
        pass

    order = order_of(DataLoader(list(range(5)), batch_sampler=Own(batches.sampler, 2, False)))
    assert (order.by_batch, order.batches, order.batch_size) == (True, 3, 2)
    assert drawn(order, 4) == [[0, 1], [2, 3], [4], [0, 1]]


@given(
    samples=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=20),
    cut=st.integers(0, 19),
    shuffle=st.booleans(),
)
def test_sized_batches_take_each_sample_once_per_pass_and_go_on_from_any_place(
    samples: int, sizes: list[int], cut: int, shuffle: bool
) -> None:
    def order() -> OwnOrder:
        return order_of(DataLoader(list(range(samples)), batch_size=2, shuffle=shuffle), seed=5)

    whole = drawn(order(), len(sizes), sizes=sizes)
    assert [len(batch) for batch in whole] == sizes
    flat = [i for batch in whole for i in batch]
    for start in range(0, len(flat) - samples + 1, samples):
        assert sorted(flat[start : start + samples]) == list(range(samples))
    cut = min(cut, len(sizes) - 1)
    sampler = OwnBatches(order(), size=iter(sizes).__next__)
    issued = sampler.begin(DataPlace())
    list(islice(sampler, cut))
    place = issued[-1].after if cut else DataPlace()
    assert drawn(order(), len(sizes) - cut, place, sizes[cut:]) == whole[cut:]


def test_passes_differ_ranks_differ_and_the_global_stream_stays() -> None:
    before = torch.get_rng_state()
    loader = DataLoader(list(range(40)), batch_size=40, shuffle=True)
    first, second = drawn(order_of(loader), 2)
    assert first != second and drawn(order_of(loader, seed=1), 1) != [first]
    assert torch.equal(before, torch.get_rng_state())


def test_a_samplers_own_generator_is_drawn_again_after_a_resume() -> None:
    def order() -> OwnOrder:
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(7))
        return order_of(DataLoader(list(range(20)), batch_size=20, sampler=sampler))

    whole = drawn(order(), 3)
    assert drawn(order(), 1, DataPlace(2)) == [whole[2]] and whole[0] != whole[1]


@pytest.mark.parametrize("sized", [False, True])
def test_a_place_in_more_data_than_there_are_now_begins_anew(sized: bool) -> None:
    order = order_of(DataLoader(list(range(4)), batch_size=2))
    assert drawn(order, 1, DataPlace(0, 9), [2] if sized else None) == [[0, 1]]
