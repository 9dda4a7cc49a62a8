"""`BalancePolicy` and `ShareBounds`: who gets what, when shares may move, and that all ranks decide alike."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, SpeedSample

FIXED_S, PER_SAMPLE_S = 0.009, 0.003  # of a rank with speed 1


def costs_of(slow: tuple[float, ...]) -> list[AffineCost]:
    return [AffineCost(fixed_s=k * FIXED_S, per_sample_s=k * PER_SAMPLE_S) for k in slow]


def records_of(slow: tuple[float, ...], shares: tuple[int, ...], step: int = 0) -> list[SpeedSample]:
    """Noise-free measurements: rank r computed its share at its speed."""
    return [
        SpeedSample(rank=r, step=step, samples=max(1, b), compute_s=cost.seconds(max(1, b)))
        for r, (cost, b) in enumerate(zip(costs_of(slow), shares, strict=True))
    ]


def started(
    total: int = 64, world: int = 4, quantum: int = 1, bounds: ShareBounds | None = None, **kw: Any
) -> BalancePolicy:
    policy = BalancePolicy(**kw)
    policy.start(world_size=world, total=total, bounds=bounds or ShareBounds(), quantum=quantum)
    return policy


def feed(policy: BalancePolicy, slow: tuple[float, ...], times: int) -> list[ShareDecision]:
    return [policy.observe(records_of(slow, policy.shares, step)) for step in range(times)]


def makespan_s(slow: tuple[float, ...], shares: tuple[int, ...]) -> float:
    return max(cost.seconds(b) for cost, b in zip(costs_of(slow), shares, strict=True))


# ---- bounds ------------------------------------------------------------------------------------------------


@given(
    total=st.integers(8, 200),
    low=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    up=st.lists(st.integers(0, 90), min_size=3, max_size=3),
)
def test_resolve_accepts_exactly_what_a_split_can_meet(total: int, low: list[int], up: list[int]) -> None:
    possible = all(a <= b for a, b in zip(low, up, strict=True)) and sum(low) <= total <= sum(up)
    if possible:
        assert ShareBounds(lower=low, upper=up).resolve(3, total) == (low, up)
    else:
        with pytest.raises(ValueError, match=r"min_samples|max_samples"):
            ShareBounds(lower=low, upper=up).resolve(3, total)


@pytest.mark.parametrize(
    ("bounds", "world", "total", "quantum", "expected"),
    [
        (ShareBounds(least=2), 2, 8, 1, ([2, 2], [8, 8])),
        (ShareBounds(least=2), 4, 64, 1, ([4] * 4, [64] * 4)),
        (ShareBounds(least=2), 2, 3, 1, ([2, 0], [3, 3])),  # one rank rests, and rank 0 keeps the statistics
        (ShareBounds(least=2), 3, 5, 1, ([2, 0, 0], [5] * 3)),
        (ShareBounds(least=2, lower=0), 2, 8, 1, ([2, 0], [8, 8])),
        (ShareBounds(least=2, lower=1), 2, 8, 1, ([2, 2], [8, 8])),
        (ShareBounds(least=2, upper=[1, 8]), 2, 8, 1, ([0, 2], [0, 8])),
        (ShareBounds(least=3), 2, 8, 4, ([4, 4], [8, 8])),
        (ShareBounds(least=2), 2, 24, 4, ([4, 4], [24, 24])),
    ],
)
def test_bounds_where_a_rank_gets_none_or_at_least(
    bounds: ShareBounds, world: int, total: int, quantum: int, expected: tuple[list[int], list[int]]
) -> None:
    assert bounds.resolve(world, total, quantum) == expected
    policy = started(total, world, quantum, bounds)
    for slow in (1.0, 9.0, 200.0):
        feed(policy, (1.0, *[slow] * (world - 1)), 3)
        assert sum(policy.shares) == total
        assert all(x == 0 or x >= bounds.least for x in policy.shares)


@pytest.mark.parametrize(
    ("bounds", "world", "total", "parts"),
    [
        (
            ShareBounds(lower=[1, 2]),
            4,
            64,
            ("min_samples lists 2 ranks, but there are 4", "one number per rank"),
        ),
        (ShareBounds(upper=[9] * 5), 4, 16, ("max_samples lists 5 ranks, but there are 4",)),
        (ShareBounds(lower=20), 4, 64, ("min_samples=20 asks for 80 samples", "has 64", "at least 80")),
        (ShareBounds(upper=10), 4, 64, ("max_samples=10 admits 40 samples", "has 64", "at most 40")),
        (
            ShareBounds(lower=[1, 9], upper=[8, 8]),
            2,
            12,
            ("rank 1 must get at least 9 and at most 8", "lower min"),
        ),
        (ShareBounds(), 4, 3, ("asks for 4 samples on 4 ranks", "has 3", "at least 4")),
        (ShareBounds(least=2), 2, 1, ("global batch of 1 samples is less than the 2", "BatchNorm")),
        (ShareBounds(least=2, upper=1), 2, 2, ("max_samples=1 admits 0 samples", "for BatchNorm")),
    ],
)
def test_bounds_that_cannot_be_met_are_named(
    bounds: ShareBounds, world: int, total: int, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        bounds.resolve(world, total)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dead_band", "abc"),
        ("dead_band", None),
        ("dead_band", -0.1),
        ("dead_band", math.nan),
        ("warmup", -1),
        ("warmup", 1.5),
        ("warmup", True),
        ("predictor", "narx9"),
        ("predictor", 3),
    ],
)
def test_bad_settings_are_refused_with_the_value(setting: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        BalancePolicy(**{setting: value})
    assert setting in str(error.value) or "predictor" in str(error.value)
    assert repr(value) in str(error.value)


# ---- when shares move --------------------------------------------------------------------------------------


@given(world=st.integers(1, 9), units=st.integers(1, 40), quantum=st.sampled_from([1, 4]))
def test_a_run_starts_with_equal_shares_and_keeps_them_through_warm_up(
    world: int, units: int, quantum: int
) -> None:
    total = max(units, world) * quantum
    policy = started(total=total, world=world, quantum=quantum, warmup=3)
    equal = policy.shares
    assert sum(equal) == total and max(equal) - min(equal) <= quantum and all(s % quantum == 0 for s in equal)
    slow = tuple(float(1 + r) for r in range(world))
    assert [d.reason for d in feed(policy, slow, 3)] == ["warm-up"] * 3
    assert policy.shares == equal
    assert math.isnan(policy.predict_s(equal)[0])


@pytest.mark.parametrize(("slow", "moves"), [(1.01, False), (1.5, True)])
def test_the_dead_band_ignores_small_gains(slow: float, moves: bool) -> None:
    policy = started(world=2, dead_band=0.1, warmup=0)
    assert any(d.changed for d in feed(policy, (1.0, slow), 5)) is moves


# ---- what is decided ---------------------------------------------------------------------------------------


@st.composite
def feasible(draw: st.DrawFn) -> tuple[int, ShareBounds, int, tuple[float, ...]]:
    world, quantum = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 4]))
    units = draw(st.lists(st.integers(0, 20), min_size=world, max_size=world).filter(sum))
    low = [draw(st.integers(0, u)) * quantum for u in units]
    up = [draw(st.integers(u, 40)) * quantum for u in units]
    slow = tuple(draw(st.sampled_from([0.25, 0.5, 1.0, 3.0, 20.0])) for _ in range(world))
    return sum(units) * quantum, ShareBounds(lower=low, upper=up), quantum, slow


@given(case=feasible(), predictor=st.sampled_from(["kalman", "ewma", "last"]))
def test_shares_always_fill_the_batch_within_the_bounds(
    case: tuple[int, ShareBounds, int, tuple[float, ...]], predictor: str
) -> None:
    total, bounds, quantum, slow = case
    policy = started(total, len(slow), quantum, bounds, predictor=predictor, dead_band=0.0)
    low, up = bounds.resolve(len(slow), total, quantum)
    for step in range(7):
        if step:
            assert feed(policy, slow, 1)[0].shares == policy.shares
        assert sum(policy.shares) == total
        for share, a, b in zip(policy.shares, low, up, strict=True):
            assert a <= share <= b and share % quantum == 0


def test_a_rank_without_a_time_delays_the_decision_and_is_not_learned_from() -> None:
    policy = started(world=2, warmup=0)
    missing = [
        SpeedSample(rank=0, step=0, samples=32, compute_s=0.1),
        SpeedSample(rank=1, step=0, samples=32, compute_s=0.0),
    ]
    decision = policy.observe(missing)
    assert (decision.changed, decision.reason) == (False, "not every rank was measured yet")
    predicted = policy.predict_s(policy.shares)
    assert not math.isnan(predicted[0]) and math.isnan(predicted[1])


# ---- is a rank worth it ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.5, 40.0), min_size=2, max_size=4), st.integers(8, 40))
def test_the_ranks_that_are_fastest_alone_are_those_of_all_subsets(slow: list[float], total: int) -> None:
    policy = started(total=total, world=len(slow), bounds=ShareBounds(upper=total), dead_band=0.0)
    policy.shares = (total // len(slow),) * len(slow)  # with other shares models of one size would be off
    feed(policy, tuple(slow), 3)
    costs = [p.cost() for p in policy._predictors]
    subsets = [s for n in range(1, len(slow) + 1) for s in combinations(range(len(slow)), n)]
    best_s = min(minimax([costs[r] for r in ranks], total).makespan_s for ranks in subsets)
    ranks, alone_s = policy.fastest_alone()
    assert alone_s == pytest.approx(best_s, rel=1e-9)
    assert minimax([costs[r] for r in ranks], total).makespan_s == pytest.approx(alone_s, rel=1e-9)


def test_a_rank_whose_fixed_time_is_longer_than_the_others_batch_is_left_out() -> None:
    """Alone, two ranks take 9 + 8 * 3 = 33 ms for 16 samples; rank 2 takes 40 times as long for anything."""
    policy = started(total=16, world=3)
    feed(policy, (1.0, 1.0, 40.0), 6)
    ranks, alone_s = policy.fastest_alone()
    assert (ranks, alone_s) == ((0, 1), pytest.approx(0.033, rel=0.1))


# ---- state -------------------------------------------------------------------------------------------------


@given(
    predictor=st.sampled_from(["kalman", "ewma", "last"]), before=st.integers(2, 12), seed=st.integers(0, 20)
)
def test_a_restored_policy_predicts_the_same_and_starts_from_learned_speeds(
    predictor: str, before: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slow = tuple(float(v) for v in rng.uniform(0.5, 4.0, 4))
    old = started(predictor=predictor)
    feed(old, slow, before)
    state = json.loads(json.dumps(old.state_dict()))  # plain types survive any format
    new = BalancePolicy(predictor=predictor)
    new.load_state_dict(state)
    new.start(world_size=4, total=64, bounds=ShareBounds())
    assert new.state_dict()["predictors"] == old.state_dict()["predictors"]
    assert new.predict_s(old.shares) == old.predict_s(old.shares)
    equal_s = makespan_s(slow, (16,) * 4)
    assert makespan_s(slow, new.shares) < equal_s or new.shares == (16,) * 4
    assert feed(new, slow, 1)[0].reason != "warm-up"
