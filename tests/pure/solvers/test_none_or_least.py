"""None or at least m samples per rank: against brute force over all splits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_hetero.solvers import apportion, minimax_none_or_least
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.types import AffineCost, Cost, Status
from tests.pure.solvers.costs import AFFINE, EVERYDAY, STAIRS

Problem = tuple[list[Cost], int, list[int], list[int], int, int]


@st.composite
def problems(draw: st.DrawFn, cost: st.SearchStrategy[Cost]) -> Problem:
    n = draw(st.integers(1, 4))
    quantum = draw(st.sampled_from([1, 1, 1, 2, 3]))
    total = draw(st.integers(0, 12)) * quantum
    lower = draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=n, max_size=n))
    upper = draw(st.lists(st.sampled_from([total, total, 1, 3, 7]), min_size=n, max_size=n))
    costs = draw(st.lists(cost, min_size=n, max_size=n))
    return costs, total, lower, upper, quantum, draw(st.sampled_from([0, 1, 2, 2, 3, 4]))


def all_splits(problem: Problem) -> list[tuple[int, ...]]:
    _, total, lower, upper, q, least = problem
    choices = [
        [x for x in range(0, total + 1, q) if a <= x <= b and (x == 0 or x >= least)]
        for a, b in zip(lower, upper, strict=True)
    ]
    return [s for s in itertools.product(*choices) if sum(s) == total]


def makespan_s(costs: Sequence[Cost], shares: Sequence[int]) -> float:
    return max(c.seconds(x) for c, x in zip(costs, shares, strict=True))


@given(problems(EVERYDAY) | problems(AFFINE) | problems(STAIRS))
@example(([AffineCost(fixed_s=0.0, per_sample_s=1.0)] * 3, 5, [0] * 3, [5] * 3, 1, 2))
@example(([AffineCost(fixed_s=0.0, per_sample_s=1.0)] * 3, 7, [0] * 3, [3] * 3, 1, 3))  # 3 + 3 + 1: impossible
def test_it_is_the_best_of_all_splits(problem: Problem) -> None:
    costs, total, lower, upper, quantum, least = problem
    result = minimax_none_or_least(costs, total, lower=lower, upper=upper, quantum=quantum, least=least)
    splits = all_splits(problem)
    assert result.ok == bool(splits)
    if not splits:
        assert result.status is Status.INFEASIBLE and result.reason and result.shares == ()
        return
    assert result.shares in splits
    assert result.makespan_s == makespan_s(costs, result.shares) == min(makespan_s(costs, s) for s in splits)
    assert 0.0 <= result.lower_bound_s <= result.makespan_s


# ---- a full batch's shares, scaled ---------------------------------------------------------------------------


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    part=st.floats(0.0, 1.0),
    least=st.integers(1, 3),
)
@example(shares=[1, 1], part=0.5, least=2)
@example(shares=[4, 4], part=0.375, least=2)  # 3 on 2 ranks
def test_scaled_shares_keep_the_least_wherever_a_split_does(shares: list[int], part: float, least: int) -> None:
    total = round(part * sum(shares))
    scaled = scale_shares(shares, total, least=least)
    assert sum(scaled) == total
    assert all(x == 0 for x, s in zip(scaled, shares, strict=True) if s == 0) or total == sum(shares)
    plain = apportion([float(s) for s in shares], total)
    if all(x == 0 or x >= least for x in plain) or total < least:
        assert scaled == plain
    else:
        working = [s for s in shares if s]
        choices = [[0, *range(least, total + 1)]] * len(working)
        slowest = [
            max(x * (1.0 / s) for x, s in zip(split, working, strict=True))
            for split in itertools.product(*choices)
            if sum(split) == total
        ]
        assert all(x == 0 or x >= least for x in scaled)
        assert math.isclose(max(x / s for x, s in zip(scaled, shares, strict=True) if s), min(slowest))


@pytest.mark.parametrize(
    ("shares", "total", "kwargs", "expected"),
    [
        ([8, 8], 3, {"least": 2}, (3, 0)),
        ([4, 12], 3, {"least": 2}, (0, 3)),
        ([8, 8], 1, {"least": 2}, (1, 0)),  # BatchNorm fails on it, as on one device
        ([8, 8], 4, {"least": 2}, (2, 2)),
        ([2, 2], 3, {"least": 2, "upper": [2, 2]}, (2, 1)),  # no memory for 3
        ([9, 3, 3], 5, {"least": 2}, (5, 0, 0)),  # 3 + 1 + 1; 2 on a slow rank would take longer
        ([8, 8], 8, {"lower": 1}, (4, 4)),
        ([15, 1], 6, {"lower": 1}, (5, 1)),
        ([15, 1], 6, {"lower": 1, "least": 2}, (4, 2)),
        ([7, 1], 8, {"least": 2}, (8, 0)),  # of a policy that does not know
        ([7, 1], 8, {}, (7, 1)),
    ],
)
def test_examples(shares: list[int], total: int, kwargs: dict[str, int], expected: tuple[int, ...]) -> None:
    assert scale_shares(shares, total, **kwargs) == expected  # type: ignore[arg-type]
