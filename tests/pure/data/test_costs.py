"""Parts of equal cost: every rank cuts the same global batch alike, and weights stay those by samples."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.data.costs import SampleCosts, costs_digest, costs_in
from tests.pure.predictors.simulated import any_split, cut, shuffled_order, simulate, together


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**31))
def test_the_global_batches_stay_and_all_ranks_cut_alike(n: int, size: int, world: int, seed: int) -> None:
    lengths = [float(x) for x in np.random.default_rng(seed).lognormal(3, 1, n)]
    order = shuffled_order(n, seed=seed, shuffle=True, global_batch_size=size, drop_last=False)
    costs = SampleCosts(lengths, lower=[1] * world, upper=[size] * world)
    ranks = simulate(order, any_split(world, seed), world, costs=costs)
    assert together(ranks) == cut(order.indices(0), size)  # ranks agree on all shares, too
    for step in zip(*ranks, strict=True):
        total = sum(part.samples for part, _ in step)
        assert sum(part.weight for part, _ in step) / world == pytest.approx(1.0)
        for part, indices in step:
            assert part.weight == world * part.samples / total
            if indices:
                assert part.work == pytest.approx(math.fsum(lengths[i] for i in indices))


def test_parts_cost_alike() -> None:
    """Of 64 texts of skewed lengths in 4 parts the dearest costs some 6 % more than the mean; cut by number, 25 %."""
    lengths = [float(x) for x in np.random.default_rng(1).lognormal(5, 0.8, 6400)]
    order = shuffled_order(6400, seed=0, shuffle=True, global_batch_size=64, drop_last=False)
    unevenness: list[float] = []
    for costs in (SampleCosts(lengths.__getitem__, lower=[1] * 4, upper=[64] * 4), None):
        ranks = simulate(order, lambda *_: (16, 16, 16, 16), 4, costs=costs)
        worst = [
            max(sum(lengths[i] for i in part) for _, part in step) * 4 / sum(lengths[i] for _, p in step for i in p)
            for step in zip(*ranks, strict=True)
        ]
        unevenness.append(sum(worst) / len(worst))
    assert unevenness[0] < 1.08 < 1.2 < unevenness[1]


def test_a_dummy_has_its_own_work() -> None:
    order = shuffled_order(8, seed=0, shuffle=False, global_batch_size=8, drop_last=False)
    costs = SampleCosts([float(i + 1) for i in range(8)], lower=[0, 0], upper=[8, 8])
    ((full, _),), ((none, _),) = simulate(order, lambda *_: (8, 0), 2, costs=costs, least=2)
    assert (full.samples, full.work, none.samples, none.work) == (8, 36.0, 0, 3.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_named(bad: float) -> None:
    said = f"the cost of sample 1 is {bad!r}; sample_costs, or sample_cost(i) of the dataset"
    with pytest.raises(ValueError, match=re.escape(said)):
        SampleCosts([1.0, bad], lower=[1], upper=[2])
    with pytest.raises(ValueError, match=re.escape(said)):
        SampleCosts([1.0, bad].__getitem__, lower=[1], upper=[2]).of([0, 1])


def test_where_costs_come_from() -> None:
    class Texts(list[str]):
        def sample_cost(self, index: int) -> float:
            return float(len(self[index]))

    texts = Texts(["a", "bbb"])
    known = costs_in(texts, None)
    assert callable(known) and known(1) == 3.0
    assert costs_in(texts, [5, 6]) == [5, 6] and costs_in([1, 2], None) is None
    with pytest.raises(ValueError, match="sample_costs has 3 entries, but the train dataset has 2 samples"):
        costs_in(texts, [1, 2, 3])


def test_ranks_compare_a_digest_of_their_costs() -> None:
    assert costs_digest([1, 2]) == costs_digest(np.array([1.0, 2.0])) != costs_digest([2, 1])
    assert costs_digest(None) == "None"
