"""Parts of global batches: W ranks simulated in one process, against torch's own samplers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_hetero.data.batches import GlobalBatchSampler
from tests.pure.predictors.simulated import any_split, cut, epoch_of, shuffled_order, simulate, together

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
    order = shuffled_order(n, seed=seed, shuffle=shuffle, global_batch_size=size, drop_last=drop_last)
    for split_seed in (one, other):
        ranks = simulate(order, any_split(world, split_seed), world, epoch)
        assert together(ranks) == expected
        assert [p.step for p, _ in ranks[0]] == list(range(len(expected)))
    assert len(GlobalBatchSampler(order, split=any_split(world, one), rank=0)) == len(expected)


@given(st.integers(1, 80), st.integers(1, 16), worlds, seeds)
def test_every_sample_counts_the_same(n: int, size: int, world: int, seed: int) -> None:
    order = shuffled_order(n, seed=0, shuffle=True, global_batch_size=size, drop_last=False)
    ranks = simulate(order, any_split(world, seed), world)
    value = np.random.default_rng(seed).normal(size=n)
    for t, batch in enumerate(cut(order.indices(0), size)):
        # what DDP's mean over ranks makes of the weighted local means
        local = [part.weight * value[indices].mean() if indices else 0.0 for part, indices in (r[t] for r in ranks)]
        assert sum(local) / world == pytest.approx(value[batch].mean(), abs=1e-12)


@given(sizes, st.integers(1, 12), worlds, st.integers(0, 200), seeds)
def test_iteration_starts_where_the_run_stands(n: int, size: int, world: int, position: int, seed: int) -> None:
    order = shuffled_order(n, seed=1, shuffle=True, global_batch_size=size, drop_last=False)
    sampler = GlobalBatchSampler(order, split=any_split(world, seed), rank=world - 1)
    steps = epoch_of(sampler, 2, position)
    whole = cut(order.indices(2), size)[position % len(order) :]  # a shorter loader is cycled by CombinedLoader
    assert [p.step for p, _ in steps] == list(range(position, position + len(whole)))
    for part, mine in steps:
        batch = whole[part.step - position]
        assert mine == batch[len(batch) - part.samples :]  # the last rank has the last part


def test_behind_the_epoch_its_first_batch_comes_once_more() -> None:
    order = shuffled_order(10, seed=1, shuffle=False, global_batch_size=4, drop_last=False)
    sampler = GlobalBatchSampler(order, split=lambda *_: (4,), rank=0)
    parts = sampler.begin(4, restarts=True)
    assert next(iter(sampler))[0] == 0 and parts[0].step == 4
