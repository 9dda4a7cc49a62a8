"""`RegretGuard`: what a stake bounds, what the account settles, and what the policy makes of it."""

from __future__ import annotations

import json
import math
from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.predictors import Kalman
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.guard import RegretGuard
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, SpeedSample

RATE = AffineCost(fixed_s=0.0, per_sample_s=1.0)  # the guard looks at proportions only
EQUAL = (16, 16, 16, 16)
START, INCOME = 2.5, 0.005  # what an account has at most in the beginning, and gets per batch


def guard_of(equal: tuple[int, ...] = EQUAL, *, lag: int = 0, least: int = 1, quantum: int = 1) -> RegretGuard:
    guard = RegretGuard()
    guard.lag = lag
    guard.start(equal, least=least, quantum=quantum)
    return guard


def records(samples: tuple[int, ...], slow: tuple[float, ...]) -> list[SpeedSample]:
    return [
        SpeedSample(rank=r, step=0, samples=max(n, 1), compute_s=max(n, 1) * k)
        for r, (n, k) in enumerate(zip(samples, slow, strict=True))
    ]


def learn(guard: RegretGuard, samples: tuple[int, ...], slow: tuple[float, ...], batches: int = 1) -> None:
    guard.learn(records(samples, slow), [RATE] * len(samples), batches)


# ---- stakes -------------------------------------------------------------------------------------------------


@given(
    shares=st.lists(st.integers(0, 64), min_size=4, max_size=4),
    slow=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
    fixed_s=st.floats(0.0, 5.0),
)
def test_whatever_the_speeds_a_batch_costs_at_most_the_stake(
    shares: list[int], slow: list[float], fixed_s: float
) -> None:
    def batch_s(samples: tuple[int, ...]) -> float:
        return max(k * (fixed_s + n) for k, n in zip(slow, samples, strict=True))

    stake = guard_of().stake(tuple(shares))
    assert batch_s(tuple(shares)) <= (1.0 + stake) * batch_s(EQUAL) * (1.0 + 1e-12)
    worst = max(range(4), key=shares.__getitem__)  # and no smaller stake would do
    alone = [1.0 if rank == worst else 0.0 for rank in range(4)]
    ratio = max(k * n for k, n in zip(alone, shares, strict=True)) / 16.0
    assert stake == pytest.approx(max(0.0, ratio - 1.0))


# ---- the account --------------------------------------------------------------------------------------------


@given(lag=st.integers(0, 6), every=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_no_adversary_takes_more_than_the_account_holds(lag: int, every: int, seed: int) -> None:
    """Shares at the limit, and in each record the rank that has staked most is the slow one."""
    rng = Random(seed)
    guard, drawn, latest = guard_of(lag=lag), deque([EQUAL] * lag), EQUAL
    lost = 0.0
    for _ in range(60):
        drawn += [latest] * every
        window = [drawn.popleft() for _ in range(every)]
        worst = max(range(4), key=window[-1].__getitem__)
        slow = tuple(1.0 if rank == worst else 0.001 for rank in range(4))
        lost += sum(max(n * k for n, k in zip(shares, slow, strict=True)) / 16.0 - 1.0 for shares in window)
        learn(guard, window[-1], slow, every)
        costs = [AffineCost(fixed_s=0.0, per_sample_s=rng.uniform(0.2, 1.0)) for _ in range(4)]
        latest = minimax(costs, 64, upper=guard.upper([64] * 4)).shares
        guard.decided(latest)
        assert sum(window[0]) == 64
    assert lost <= START + INCOME * 60 * every + 1e-9
    if every == 1:
        assert lost > 0.4, "the adversary has found something to take"


# ---- the policy ---------------------------------------------------------------------------------------------


class Wrong(Kalman):
    """Takes the first rank for a faster one, whatever was measured."""

    def __init__(self, first_s: float) -> None:
        super().__init__()
        self.next_s, self.rate_s = first_s, 1.0

    def fresh(self) -> Wrong:
        new = super().fresh()
        new.rate_s, self.next_s = self.next_s, 1.0
        return new

    def cost(self) -> AffineCost:
        return AffineCost(fixed_s=0.0, per_sample_s=self.rate_s)

    def std_s(self, samples: float) -> float:
        return 0.0


def started(**settings: object) -> BalancePolicy:
    policy = BalancePolicy(**settings)  # type: ignore[arg-type]
    policy.start(world_size=4, total=64, bounds=ShareBounds())
    return policy


def fed(policy: BalancePolicy, slow: tuple[float, ...], times: int) -> tuple[list[ShareDecision], float]:
    """Returns decisions and how much longer than equal shares all batches took, in steps of these."""
    decisions, over = [], 0.0
    for _ in range(times):
        shares = policy.shares
        took_s = max(n * k for n, k in zip(shares, slow, strict=True))
        over += took_s / max(n * k for n, k in zip(EQUAL, slow, strict=True)) - 1.0
        decisions.append(policy.observe(records(shares, slow)))
    return decisions, over


def test_a_prediction_that_is_always_wrong_costs_no_more_than_the_account_and_says_so() -> None:
    decisions, over = fed(started(predictor=Wrong(0.8)), (1.0,) * 4, 200)
    _, unguarded = fed(started(predictor=Wrong(0.8), guard=False), (1.0,) * 4, 200)
    assert unguarded > 30 and 0 < over <= 0.02 * 200
    reasons = [d.reason for d in decisions if d.changed]
    assert "prediction does not pay: back to equal shares" in reasons
    assert decisions[-1].shares == EQUAL


def test_a_change_that_made_batches_longer_is_taken_back() -> None:
    """Nothing speaks against it but the measured times: neither the prediction nor the account."""
    policy = started(predictor=Wrong(0.25), warmup=0)
    (moved,), _ = fed(policy, (1.0,) * 4, 1)
    assert moved.reason == "rebalanced" and moved.shares[0] > 24
    later = []
    for _ in range(3):
        policy._guard.load_state_dict({"credit": 99.0, "mean_s": 16.0, "seen": 1})
        policy.limits.upper = list(map(max, moved.shares, EQUAL))  # so that the prediction wants nothing else
        later += fed(policy, (1.0,) * 4, 1)[0]
    assert [d.changed for d in later] == [False, False, True]
    assert later[-1].reason == "the last change made batches longer: taken back" and later[-1].shares == EQUAL


# ---- settings and checkpoints ---------------------------------------------------------------------------------


def test_the_account_travels_with_a_checkpoint() -> None:
    policy = started()
    fed(policy, (1.0, 1.0, 2.0, 4.0), 20)
    state = json.loads(json.dumps(policy.state_dict()))
    assert all(math.isfinite(value) for value in state["guard"].values())
    resumed = BalancePolicy()
    resumed.load_state_dict(state)
    resumed.start(world_size=4, total=64, bounds=ShareBounds())
    assert resumed._guard.allowed == policy._guard.allowed > 2.5
    assert resumed.state_dict()["guard"] == state["guard"] and resumed.shares != EQUAL

    other = BalancePolicy()
    other.load_state_dict(state)
    other.start(world_size=2, total=64, bounds=ShareBounds())
    assert other._guard.allowed == BalancePolicy()._guard.allowed, "of another number of ranks: a new account"
    before = {name: value for name, value in state.items() if name != "guard"}  # of a version without a guard
    old = BalancePolicy()
    old.load_state_dict(before)
    old.start(world_size=4, total=64, bounds=ShareBounds())
    assert old.shares == resumed.shares
