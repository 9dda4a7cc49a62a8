"""Orders, parts, loaders and streams: W ranks simulated in one process, against torch's own samplers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_hetero.data import (
    EpochOrder,
    GlobalBatchSampler,
    Part,
    PooledBatches,
    PooledRanks,
    SamplerOrder,
    ShuffledOrder,
    inspect_loader,
    rebatched_loader,
    rebatched_stream,
)
from lightning_hetero.data.batches import Split, micro_batch_size

T = TypeVar("T")


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
        return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))

    return split


Step = tuple[Part, list[Any]]  # of one rank: the part, and its indices without the dummy


def epoch_of(sampler: GlobalBatchSampler, epoch: int = 0, position: int = 0) -> list[Step]:
    sampler.set_epoch(epoch)
    issued = sampler.begin(position)
    batches = list(sampler)
    assert all(len(b) == max(1, p.samples) for p, b in zip(issued, batches, strict=True))
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


sizes = st.integers(1, 60)
worlds = st.integers(1, 5)
seeds = st.integers(0, 2**31)


# ---- the content of a global batch -------------------------------------------------------------------------


@given(sizes, st.integers(1, 20), worlds, st.integers(0, 3), seeds, st.booleans(), st.booleans(), seeds, seeds)
def test_global_batches_are_torchs_order_whatever_the_shares(
    n: int, size: int, world: int, epoch: int, seed: int, shuffle: bool, drop_last: bool, one: int, other: int
) -> None:
    torchs = DistributedSampler(range(n), num_replicas=1, rank=0, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]
    torchs.set_epoch(epoch)
    expected = cut(list(torchs), size, drop_last)
    order = ShuffledOrder(n, seed=seed, shuffle=shuffle, global_batch_size=size, drop_last=drop_last)
    for split_seed in (one, other):
        ranks = simulate(order, any_split(world, split_seed), world, epoch)
        assert together(ranks) == expected
        assert [p.step for p, _ in ranks[0]] == list(range(len(expected)))
    assert len(GlobalBatchSampler(order, split=any_split(world, one), rank=0)) == len(expected)


@given(sizes, st.integers(1, 6), worlds, st.integers(0, 3), st.booleans(), st.booleans(), seeds)
def test_same_sets_as_stock_ddp_without_its_padding(
    n: int, per_rank: int, world: int, epoch: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    assume(n >= world)  # with fewer samples than ranks stock DDP repeats some many times
    stock: list[list[list[int]]] = []
    for rank in range(world):
        sampler = DistributedSampler(range(n), num_replicas=world, rank=rank, shuffle=shuffle)  # type: ignore
        sampler.set_epoch(epoch)
        stock.append(cut(list(sampler), per_rank, drop_last))
    theirs = [set().union(*map(set, step)) for step in zip(*stock, strict=True)]
    order = ShuffledOrder(n, seed=0, shuffle=shuffle, global_batch_size=per_rank * world, drop_last=drop_last)
    ours = [set(b) for b in together(simulate(order, any_split(world, seed), world, epoch))]
    if n % world == 0:
        assert ours == theirs
    else:  # stock fills up with the epoch's first samples, which may complete a batch that we drop
        assert ours[:-1] == theirs[: len(ours[:-1])]
        assert all(a <= b for a, b in zip(ours, theirs, strict=False))
        assert 0 <= len(theirs) - len(ours) <= (1 if drop_last else 0)


@given(st.integers(1, 80), st.integers(1, 16), worlds, st.integers(1, 4), st.integers(1, 3), seeds)
def test_every_sample_counts_the_same_with_micro_batches(
    n: int, size: int, world: int, micro: int, quantum: int, seed: int
) -> None:
    try:
        full = micro_batch_size(size, micro, quantum)
    except ValueError:
        assume(False)
    order = ShuffledOrder(n, seed=0, shuffle=True, global_batch_size=size, drop_last=False)
    ranks = simulate(order, any_split(world, seed), world, micro_batches=micro, quantum=quantum)
    pieces = together(ranks)
    assert len(pieces) == len(GlobalBatchSampler(order, split=any_split(world, 0), rank=0, micro_batches=micro,
                                                 quantum=quantum))
    assert all(0 < len(piece) <= full for piece in pieces)
    value = np.random.default_rng(seed).normal(size=n)
    for t, batch in enumerate(cut(order.indices(0), size)):
        mine = range(t * micro, min((t + 1) * micro, len(pieces)))  # the accumulation window, shorter at the end only
        assert [i for k in mine for i in pieces[k]] == batch
        # what Lightning's accumulation and DDP's mean over ranks make of the weighted local means
        local = [
            part.weight * value[indices].mean() if indices else 0.0
            for rank in ranks
            for part, indices in [rank[k] for k in mine]
        ]
        assert sum(local) / world / micro == pytest.approx(value[batch].mean(), abs=1e-12)


@pytest.mark.parametrize(("size", "micro", "quantum"), [(9, 4, 1), (10, 0, 1), (10, 3, 8), (4, 5, 1)])
def test_micro_batches_that_cannot_be(size: int, micro: int, quantum: int) -> None:
    if micro == 0:
        with pytest.raises((ValueError, ZeroDivisionError)):
            micro_batch_size(size, micro, quantum)
        return
    with pytest.raises(ValueError, match=f"not micro_batches={micro}"):
        micro_batch_size(size, micro, quantum)


@given(sizes, st.integers(1, 12), worlds, st.integers(0, 200), seeds)
def test_iteration_starts_where_the_run_stands(n: int, size: int, world: int, position: int, seed: int) -> None:
    order = ShuffledOrder(n, seed=1, shuffle=True, global_batch_size=size, drop_last=False)
    sampler = GlobalBatchSampler(order, split=any_split(world, seed), rank=world - 1)
    steps = epoch_of(sampler, 2, position)
    whole = cut(order.indices(2), size)[position % len(order) :]  # a shorter loader is cycled by CombinedLoader
    assert [p.step for p, _ in steps] == list(range(position, position + len(whole)))
    for part, mine in steps:
        batch = whole[part.step - position]
        assert mine == batch[len(batch) - part.samples :]  # the last rank has the last part


def test_an_iteration_begins_anew_unless_told_where() -> None:
    order = ShuffledOrder(10, seed=1, shuffle=False, global_batch_size=4, drop_last=False)
    sampler = GlobalBatchSampler(order, split=lambda *_: (4,), rank=0)
    sampler.begin(1)
    assert [b[0] for b in sampler] == [4, 8]
    assert [b[0] for b in sampler] == [0, 4, 8]


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
    def work(channel: FakeChannel) -> tuple[list, list[int]]:
        sampler = Odd(10)
        order = sampler_order(channel, sampler)
        return together([epoch_of(GlobalBatchSampler(order, split=lambda *_: (6, 0)[: channel.world_size],
                                                     rank=0), e) for e in (1,)]), sampler.epochs

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
    for make in (
        lambda: sampler_order(channel, iter([1, 2])),
        lambda: PooledRanks(iter([1]), batch_size=1, drop_last=False, seed=0, channel=channel),
        lambda: PooledBatches(iter([[1]]), seed=0, channel=channel),
    ):
        with pytest.raises(TypeError, match="has no length; give it a __len__"):
            make()


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
        self.batches = [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is None:
            return iter(self.batches)
        order = torch.randperm(len(self.batches), generator=self.generator)
        return iter([self.batches[i] for i in order.tolist()])

    def __len__(self) -> int:
        return len(self.batches)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3), seeds)
def test_pooled_batches_are_world_batches_in_a_row(
    sizes: list[int], world: int, micro: int, seed: int
) -> None:
    largest = max(sizes) * world
    assume(-(-largest // -(-largest // micro)) == micro)

    def steps(channel: FakeChannel) -> list[list[Step]]:
        own = torch.Generator().manual_seed(seed + channel.rank)  # only rank 0's counts
        order = PooledBatches(Buckets(sizes, own), seed=0, channel=channel)
        assert order.global_batch_size == largest
        sampler = GlobalBatchSampler(order, split=any_split(world, seed), rank=channel.rank, micro_batches=micro)
        result = [epoch_of(sampler, e) for e in range(2)]
        assert {len(r) for r in result} == {len(sampler)} == {micro * -(-len(sizes) // world)}
        return result

    ranks = on_ranks(world, steps)
    users = Buckets(sizes, torch.Generator().manual_seed(seed))
    for epoch in range(2):
        drawn = list(users)
        pools = [[i for b in drawn[k : k + world] for i in b] for k in range(0, len(drawn), world)]
        pieces = together([r[epoch] for r in ranks])
        # exactly `micro` pieces per pool, whatever its size: Lightning's accumulation counts batches
        assert [sum(pieces[k : k + micro], []) for k in range(0, len(pieces), micro)] == pools
        weight = [p.samples / p.weight_base for r in ranks for p, _ in r[epoch]]
        assert sum(weight) == pytest.approx(micro * len(pools))


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
