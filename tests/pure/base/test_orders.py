"""Orders made of a user's own samplers: agreed by all ranks, resumable, pooled."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from lightning_hetero.data.batches import GlobalBatchSampler
from lightning_hetero.data.order import ContinuedOrder, SamplerOrder
from lightning_hetero.data.pooled import PooledBatches, PooledRanks
from tests.pure.predictors.simulated import (
    FakeChannel,
    Meeting,
    Step,
    any_split,
    cut,
    epoch_of,
    on_ranks,
    shuffled_order,
    together,
)

seeds = st.integers(0, 2**31)

# ---- user samplers -----------------------------------------------------------------------------------------


class Odd(Sampler[int]):
    """The odd indices, from last to first; sized, no generator."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(2 * self.n - 1, 0, -2))

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def sampler_order(channel: FakeChannel, sampler: Iterable[Any], size: int = 6, seed: int = 0) -> SamplerOrder:
    return SamplerOrder(sampler, seed=seed, channel=channel, global_batch_size=size, drop_last=False)


def test_a_users_sampler_is_drawn_once_and_told_the_epoch() -> None:
    def split(epoch: int, step: int, total: int) -> tuple[int, ...]:
        return (total - total // 3, total // 3)

    def steps(channel: FakeChannel) -> tuple[list[Step], list[int]]:
        sampler = Odd(10)
        batches = GlobalBatchSampler(sampler_order(channel, sampler), split=split, rank=channel.rank)
        return epoch_of(batches, 1), sampler.epochs

    results = on_ranks(2, steps)
    assert together([r[0] for r in results]) == cut(list(Odd(10)), 6)
    assert [r[1] for r in results] == [[1], [1]]


@pytest.mark.parametrize("own_generator", [False, True])
def test_weighted_sampling_is_rank_0s_on_all_ranks(own_generator: bool) -> None:
    def epochs(channel: FakeChannel) -> list[list[int]]:
        generator = torch.Generator().manual_seed(100 + channel.rank) if own_generator else None
        order = sampler_order(channel, WeightedRandomSampler([1.0] * 30, 20, generator=generator), seed=5)
        return [list(order.indices(e)) for e in range(3)]

    ranks = on_ranks(3, epochs)
    assert ranks[0] == ranks[1] == ranks[2]
    assert len({tuple(e) for e in ranks[0]}) == 3
    if own_generator:
        sampler = WeightedRandomSampler([1.0] * 30, 20, generator=torch.Generator().manual_seed(100))
        assert ranks[0] == [list(sampler) for _ in range(3)]


@given(st.integers(0, 5), seeds)
def test_a_sampler_without_generator_depends_on_seed_and_epoch_only(epoch: int, noise: int) -> None:
    channel = FakeChannel(Meeting(1), 0)
    first = sampler_order(channel, RandomSampler(range(40)), seed=7).indices(epoch)
    torch.manual_seed(noise)
    assert sampler_order(channel, RandomSampler(range(40)), seed=7).indices(epoch) == first


class AllStreams(Sampler[int]):
    """Draws from every global random stream."""

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(9), int(np.random.randint(9)), int(torch.randint(9, ()))] * 2)

    def __len__(self) -> int:
        return 6


def test_drawing_leaves_the_global_streams_alone() -> None:
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    order = sampler_order(FakeChannel(Meeting(1), 0), AllStreams(), seed=3)
    assert order.indices(0) == order.indices(0)
    assert len({tuple(order.indices(e)) for e in range(8)}) > 1
    assert (random.getstate(), str(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


@given(st.integers(0, 4), st.booleans(), st.booleans())
def test_a_samplers_own_generator_resumes(saved: int, ended: bool, looked: bool) -> None:
    """From the middle of epoch ``saved`` or from its end; a look at epoch 0 before it does not matter."""

    def order() -> SamplerOrder:
        generator = torch.Generator().manual_seed(3)
        return sampler_order(FakeChannel(Meeting(1), 0), WeightedRandomSampler([1.0] * 9, 9, generator=generator))

    through = order()
    epochs = [through.indices(e) for e in range(saved + 1)]
    state = through.state_dict()
    epochs += [through.indices(e) for e in range(saved + 1, 7)]
    resumed = order()
    resumed.load_state_dict(state)
    first = saved + ended
    if looked and saved:
        resumed.indices(0)
    assert [resumed.indices(e) for e in range(first, 7)] == epochs[first:]


class Liar(Odd):
    def __len__(self) -> int:
        return self.n + 1


def test_samplers_that_cannot_be_divided() -> None:
    channel = FakeChannel(Meeting(1), 0)
    with pytest.raises(ValueError, match=r"Liar announced 5 samples but gave 4"):
        sampler_order(channel, Liar(4)).indices(0)


# ---- pools -------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans(), seeds)
def test_pooled_ranks_are_what_the_ranks_samplers_draw(
    n: int, per_rank: int, world: int, drop_last: bool, nested: bool, seed: int
) -> None:
    def sampler_of(rank: int) -> DistributedSampler:
        return DistributedSampler(range(n), num_replicas=world, rank=rank, seed=2)  # type: ignore[arg-type]

    def steps(channel: FakeChannel) -> list[Step]:
        source: Any = sampler_of(channel.rank)
        if nested:  # a batch sampler of the user's: its sampler learns the epoch too
            source = BatchSampler(source, per_rank, drop_last)
        order = PooledRanks(
            source, batch_size=None if nested else per_rank, drop_last=drop_last, seed=0, channel=channel
        )
        assert order.global_batch_size == per_rank * world
        sampler = GlobalBatchSampler(order, split=any_split(world, seed), rank=channel.rank)
        result = epoch_of(sampler, 3)
        assert len(result) == len(sampler)
        return result

    own = []
    for rank in range(world):
        sampler = sampler_of(rank)
        sampler.set_epoch(3)
        own.append(cut(list(sampler), per_rank, drop_last))
    assert together(on_ranks(world, steps)) == [[i for b in step for i in b] for step in zip(*own, strict=True)]


def test_ranks_with_fewer_batches_add_nothing_to_the_last_pools() -> None:
    def batches(channel: FakeChannel) -> list[list[int]]:
        own = range(100 * channel.rank, 100 * channel.rank + (5, 2, 9)[channel.rank])
        order = PooledRanks(own, batch_size=2, drop_last=False, seed=0, channel=channel)
        indices, ends = order.batches(0)
        return [list(indices[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    expected = [[0, 1, 100, 101, 200, 201], [2, 3, 202, 203], [4, 204, 205], [206, 207], [208]]
    assert on_ranks(3, batches) == [expected] * 3


class Buckets(Sampler[list[int]]):
    """Batches of unequal size, in an order drawn from its own generator; tells no batch size."""

    def __init__(self, sizes: Sequence[int], generator: torch.Generator | None = None) -> None:
        ends = np.cumsum([0, *sizes])
        self.batches = [list(range(a, b)) for a, b in pairwise(ends.tolist())]
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is None:
            return iter(self.batches)
        order = torch.randperm(len(self.batches), generator=self.generator)
        return iter([self.batches[i] for i in order.tolist()])

    def __len__(self) -> int:
        return len(self.batches)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), seeds)
def test_pooled_batches_are_world_batches_in_a_row(sizes: list[int], world: int, seed: int) -> None:
    largest = max(sizes) * world

    def steps(channel: FakeChannel) -> list[list[Step]]:
        own = torch.Generator().manual_seed(seed + channel.rank)  # only rank 0's counts
        order = PooledBatches(Buckets(sizes, own), seed=0, channel=channel)
        assert order.global_batch_size == largest
        sampler = GlobalBatchSampler(order, split=any_split(world, seed), rank=channel.rank)
        result = [epoch_of(sampler, e) for e in range(2)]
        assert {len(r) for r in result} == {len(sampler)} == {-(-len(sizes) // world)}
        return result

    ranks = on_ranks(world, steps)
    users = Buckets(sizes, torch.Generator().manual_seed(seed))
    for epoch in range(2):
        drawn = list(users)
        pools = [[i for b in drawn[k : k + world] for i in b] for k in range(0, len(drawn), world)]
        assert together([r[epoch] for r in ranks]) == pools
        weight = [p.samples / p.weight_base for r in ranks for p, _ in r[epoch]]
        assert sum(weight) == pytest.approx(len(pools))


@pytest.mark.parametrize("told", [False, True])
def test_pooled_ranks_of_batch_samplers_without_a_common_size(told: bool) -> None:
    def sizes(channel: FakeChannel) -> tuple[int, int, torch.Tensor]:
        source = Buckets([2, 5 + channel.rank, 1], torch.Generator().manual_seed(1))
        if told:
            source.batch_size = 8  # type: ignore[attr-defined]
        order = PooledRanks(source, batch_size=None, drop_last=False, seed=0, channel=channel)
        assert source.generator is not None
        return order.global_batch_size, len(order), source.generator.get_state()

    for size, batches, state in on_ranks(2, sizes):
        assert (size, batches) == (16 if told else 11, 3)
        assert torch.equal(state, torch.Generator().manual_seed(1).get_state())


def test_an_epoch_begun_elsewhere_goes_on_with_the_samples_left() -> None:
    inner = shuffled_order(20, seed=0, shuffle=True, global_batch_size=6, drop_last=False)
    order = ContinuedOrder(inner, epoch=3, step=2, spans=[(0, 5), (7, 12), (15, 18)])
    indices, ends = order.batches(3)
    plain, plain_ends = inner.batches(3)
    trained = [*plain[0:5], *plain[7:12], *plain[15:18]]
    assert list(indices[:13]) == trained
    assert sorted(indices) == sorted(plain)
    assert list(ends) == [6, 13, 18, 20]  # batch 2 is one sample short: it was trained ahead
    assert list(indices[13:]) == [*plain[5:7], *plain[12:15], *plain[18:20]]
    # What another engine needs to go on after one more batch.
    assert order.trained(2) == [(0, 5), (7, 12), (15, 18)]
    assert sorted(plain[p] for a, b in order.trained(3) for p in range(a, b)) == sorted(indices[:18])
    assert order.batches(4) == inner.batches(4) and list(plain_ends) == [6, 12, 18, 20]
    assert len(order) == len(inner)


def test_what_an_epoch_begun_elsewhere_lacks_is_spread_over_the_rest() -> None:
    """Under the stale engine's `quorum` late samples count in later batches."""
    inner = shuffled_order(30, seed=0, shuffle=False, global_batch_size=6, drop_last=False)
    for step, trained, expected in ((2, 7, [6, 7, 15, 23, 30]), (4, 13, [6, 11, 12, 13, 30])):
        order = ContinuedOrder(inner, epoch=0, step=step, spans=[(0, trained)])
        indices, ends = order.batches(0)
        assert (list(ends), sorted(indices)) == (expected, list(range(30)))
        assert order.trained(len(ends)) == [(0, trained), (trained, 30)]


def test_no_batch_of_an_epoch_begun_elsewhere_is_empty() -> None:
    inner = shuffled_order(10, seed=0, shuffle=False, global_batch_size=3, drop_last=False)
    _, ends = ContinuedOrder(inner, epoch=0, step=1, spans=[(0, 7)]).batches(0)
    assert list(ends) == [7, 8, 9, 10]
