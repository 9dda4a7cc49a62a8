"""Policy, controller and exchange in a closed loop of four simulated ranks, with the policy's defaults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost
from tests.pure.balanced.kit import FIXED_S, PER_SAMPLE_S, Mail, Rank

SLOW = (1.0, 1.0, 2.0, 4.0)
SWAPPED = (4.0, 2.0, 1.0, 1.0)


@dataclass
class Course:
    """Noise-free makespan of every step, and that of the best integer split at that time."""

    makespan_s: list[float]
    ideal_s: list[float]
    equal_s: list[float]

    def settles(self, since: int, until: int, tolerance: float = 0.05) -> int:
        """Steps from ``since`` until the makespan stays within ``tolerance`` of the best."""
        late = [t for t in range(since, until) if self.makespan_s[t] > (1 + tolerance) * self.ideal_s[t]]
        return late[-1] + 1 - since if late else 0


def simulate(
    before: tuple[float, ...],
    after: tuple[float, ...],
    *,
    steps: int,
    swap: int,
    lag: int = 0,
    noise: float = 0.0,
    seed: int = 0,
) -> Course:
    """Four ranks, 64 samples, policy defaults: T = slow * (9 ms + 3 ms * b), as in the engine's prototype."""
    rng = np.random.default_rng(seed)
    mail = Mail(4)
    ranks = [
        Rank(r, mail, lag=lag, ahead=lag, exchange=ExchangeClock(), policy=BalancePolicy()) for r in range(4)
    ]
    low, up = ShareBounds().resolve(4, 64)
    course = Course([], [], [])
    for rank in ranks:
        rank.controller.policy.start(world_size=4, total=64, bounds=ShareBounds())
    for step in range(steps):
        slow = before if step < swap else after
        costs = [AffineCost(fixed_s=k * FIXED_S, per_sample_s=k * PER_SAMPLE_S) for k in slow]
        for rank in ranks:
            rank.draw(0, step, steps, rank.ahead)
        for rank in ranks:
            rank.train(0, step, slow[rank.rank], max(0.5, 1 + noise * float(rng.standard_normal())))
        shares = ranks[0].shares[0, step]
        course.makespan_s.append(max(c.seconds(b) for c, b in zip(costs, shares, strict=True)))
        course.ideal_s.append(minimax(costs, 64, lower=low, upper=up).makespan_s)
        course.equal_s.append(max(c.seconds(16) for c in costs))
    return course


@pytest.mark.parametrize(("lag", "tolerance"), [(0, 0.05), (1, 0.05), (4, 0.1)])
def test_shares_settle_within_two_measurements_of_start_and_swap(lag: int, tolerance: float) -> None:
    """Where decisions come late the guard risks less until a first saving is measured."""
    course = simulate(SLOW, SWAPPED, steps=80, swap=40, lag=lag)
    assert course.settles(0, 40, tolerance) <= 2 + lag
    assert course.settles(0, 40) <= 4 + 2 * lag
    assert course.settles(40, 80) <= 2 + lag
    assert course.equal_s[0] > 2 * course.ideal_s[0]  # there was something to gain
