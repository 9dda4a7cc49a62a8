"""Predictors in the loop they are made for: measure, predict, split, measure what the split brought about.

Four ranks, T = slow * (fixed + per_sample * b), 64 samples per step, speeds (1, 1, 2, 4) that become
(4, 2, 1, 1) at step 60. All figures are noise-free makespans over that of the best integer split.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from lightning_hetero.predictors import Ewma, Kalman, LastValue, Predictor
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost

BATCH, STEPS, SWAP = 64, 120, 60
BEFORE, AFTER, EQUAL = (1.0, 1.0, 2.0, 4.0), (4.0, 2.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)
STEP_S = 0.057  # of a rank with slow = 1 and an equal share: 9 ms + 16 * 3 ms
SHARE = 9.0 / 57.0


def makespan_s(costs: Sequence[AffineCost], shares: tuple[int, ...]) -> float:
    return max(cost.seconds(b) for cost, b in zip(costs, shares, strict=True))


@dataclass
class Run:
    over_ideal: list[float]  # per step, 1.0 = best
    shares: list[tuple[int, ...]]

    def settles(self, since: int, until: int, tolerance: float) -> int:
        """Steps from ``since`` after which the makespan stays within ``tolerance`` of the best."""
        late = [t for t in range(since, until) if self.over_ideal[t] > 1.0 + tolerance]
        return late[-1] + 1 - since if late else 0


def simulate(
    prototype: Predictor,
    *,
    share: float = SHARE,
    noise: float = 0.0,
    lag: int = 0,
    seed: int = 0,
    before: tuple[float, ...] = BEFORE,
    after: tuple[float, ...] = AFTER,
    warm_up: float = 1.0,
) -> Run:
    """``lag``: a decision for step t knows the measurements up to step t - 1 - lag."""
    rng = np.random.default_rng(seed)
    ranks = [prototype.fresh() for _ in before]
    run, history = Run([], []), []
    for t in range(STEPS):
        true = [
            AffineCost(fixed_s=k * share * STEP_S, per_sample_s=k * (1 - share) * STEP_S / 16)
            for k in (before if t < SWAP else after)
        ]
        if t - 1 - lag >= 0:
            for rank, (b, compute_s) in zip(ranks, history[t - 1 - lag], strict=True):
                rank.update(b, compute_s)
        ready = all(rank.ready for rank in ranks)
        shares = minimax([r.cost() for r in ranks], BATCH).shares if ready else (BATCH // len(ranks),) * len(ranks)
        run.shares.append(shares)
        run.over_ideal.append(makespan_s(true, shares) / minimax(true, BATCH).makespan_s)
        factors = np.exp(noise * rng.standard_normal(len(ranks)) - noise**2 / 2)
        if t == 0:
            factors *= warm_up
        computed = [max(b, 1) for b in shares]  # a rank without samples trains one that counts nothing
        history.append(
            [
                (b, max(cost.seconds(b) * float(f), 1e-6))
                for cost, b, f in zip(true, computed, factors, strict=True)
            ]
        )
    return run


@pytest.mark.parametrize("share", [0.0, SHARE, 0.5, 0.8])
def test_kalman_is_at_the_best_split_two_steps_after_start_and_swap(share: float) -> None:
    run = simulate(Kalman(), share=share)
    assert run.over_ideal[0] > 1.2 and run.over_ideal[SWAP] > 1.4  # there was something to do
    assert run.settles(0, SWAP, 0.05) <= 2
    assert run.settles(SWAP, STEPS, 0.05) <= 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.0, SHARE, 0.5])
def test_kalman_with_three_percent_noise(share: float, seed: int) -> None:
    run = simulate(Kalman(), share=share, noise=0.03, seed=seed)
    assert run.settles(0, SWAP, 0.10) <= 2
    assert run.settles(SWAP, STEPS, 0.10) <= 3
    assert np.mean(run.over_ideal[SWAP + 2 :]) < 1.02


@pytest.mark.parametrize("lag", [2, 5, 8])
@pytest.mark.parametrize("share", [0.0, SHARE, 0.5])
def test_a_lag_delays_kalman_and_does_not_make_it_oscillate(share: float, lag: int) -> None:
    """One round of lag + 1 steps to see the new speed, at the start a second one to tell alpha from beta."""
    run = simulate(Kalman(), share=share, lag=lag)
    assert run.settles(0, SWAP, 0.05) <= 2 * (lag + 1)
    assert run.settles(SWAP, STEPS, 0.05) <= lag + 2
    for since, until in ((2 * (lag + 1) + 1, SWAP), (SWAP + 2 * lag + 4, STEPS)):
        # Splits that differ by a sample or two are equally good here; an oscillation would be worse.
        assert np.ptp(np.array(run.shares[since:until]), axis=0).max() <= 2
        assert max(run.over_ideal[since:until]) < 1.001


def test_with_lag_and_noise_the_split_keeps_still() -> None:
    for seed in range(4):
        run = simulate(Kalman(), noise=0.03, lag=5, seed=seed)
        steps = np.abs(np.diff(np.array(run.shares), axis=0)).sum(axis=1) / 2  # samples moved per step
        quiet = np.concatenate([steps[15 : SWAP - 1], steps[SWAP + 15 :]])
        assert quiet.mean() < 1.0 and quiet.max() <= 4
        assert max(run.over_ideal[15:SWAP]) < 1.10


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_first_step_ten_times_too_slow(noise: float) -> None:
    run = simulate(Kalman(), noise=noise, warm_up=10.0)
    assert run.settles(0, SWAP, 0.15) <= 4


def test_heavy_noise_leaves_kalman_near_the_best_and_ahead_of_the_others() -> None:
    mean: dict[str, float] = {}
    for prototype in (Kalman(), Ewma(), LastValue()):
        runs = [simulate(prototype, noise=0.30, share=0.2, seed=s) for s in range(8)]
        mean[type(prototype).__name__] = float(np.mean([r.over_ideal[30:SWAP] for r in runs]))
    assert mean["Kalman"] < 1.10
    assert mean["Kalman"] < mean["Ewma"] < mean["LastValue"]


@pytest.mark.parametrize("prototype", [LastValue(), Ewma()])
def test_rates_find_the_best_split_without_fixed_cost(prototype: Predictor) -> None:
    run = simulate(prototype, share=0.0)
    assert run.settles(0, SWAP, 0.05) <= 1
    assert run.settles(SWAP, STEPS, 0.05) <= 6


def test_a_fixed_cost_slows_rates_down_and_not_kalman() -> None:
    """T / b contracts the error only by the fixed cost's share per decision: with a lag, far slower."""
    swap = {
        type(p).__name__: simulate(p, share=0.5, lag=4).settles(SWAP, STEPS, 0.05)
        for p in (Kalman(), Ewma(), LastValue())
    }
    assert swap["Kalman"] <= 6
    assert min(swap["Ewma"], swap["LastValue"]) > 12


def test_a_predictor_of_ones_own_as_the_base_class_shows_it() -> None:
    names: dict[str, type[Predictor]] = {}
    example = (Predictor.__doc__ or "").split("::\n", 1)[1].split("Attributes:")[0]
    exec(textwrap.dedent(example), {"Predictor": Predictor, "AffineCost": AffineCost}, names)
    slowest = names["Slowest"]()
    slowest.update(10, 1.0)
    slowest.update(10, 0.5)
    assert slowest.predict(20) == 2.0 and slowest.state_dict() == {"updates": 2, "worst_s": 0.1}
    assert not slowest.fresh().ready
    assert simulate(slowest.fresh(), share=0.0).settles(0, SWAP, 0.05) <= 1
