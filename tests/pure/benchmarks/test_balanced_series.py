"""Generated series of speeds and the closed loop over them, by figures that can be told beforehand."""

from __future__ import annotations

import pytest

from benchmarks.balanced.series import SCENARIOS, Series, closed_loop, series
from lightning_hetero.shares.policy import BalancePolicy

FIXED_S, SAMPLE_S = 0.009, 0.003


def calm(slow: list[tuple[float, ...]]) -> Series:
    return Series(name="made by hand", slow=slow, noise=[(1.0,) * len(slow[0])] * len(slow))


def free(**settings: object) -> BalancePolicy:
    return BalancePolicy(guard=False, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_series_follows_from_its_arguments(name: str) -> None:
    one = series(name, ranks=3, steps=50, seed=7)
    assert one == series(name, ranks=3, steps=50, seed=7) != series(name, ranks=3, steps=50, seed=8)
    assert (one.steps, one.ranks, one.name) == (50, 3, name) and len(one.noise) == 50
    assert all(k >= 1.0 for row in one.slow for k in row) and all(k > 0.0 for row in one.noise for k in row)


def test_scenarios_are_what_they_are_called() -> None:
    long = {name: series(name, steps=4000, seed=1).slow for name in SCENARIOS}
    assert set(long["equal"]) == set(long["jitter"]) == {(1.0,) * 4}
    assert set(long["stationary"]) == {(1.0, 1.0, 2.0, 4.0)}
    assert long["swap"][99] == (1.0, 1.0, 2.0, 4.0) and long["swap"][100] == (4.0, 2.0, 1.0, 1.0) == long["swap"][300]
    assert long["drift"][0] == (1.0, 1.0, 2.0, 4.0) and long["drift"][-1] == (4.0, 2.0, 1.0, 1.0)
    # A rank is ill for 8 steps, then well for 30: 8 / 38 of the time.
    ill = sum(k == 6.0 for row in long["spells"] for k in row) / 16000
    assert ill == pytest.approx(8 / 38, abs=0.03)
    begins = sum(a[0] < b[0] for a, b in zip(long["spells"], long["spells"][1:], strict=False))
    assert sum(row[0] == 6.0 for row in long["spells"]) / begins == pytest.approx(8.0, rel=0.2)
    assert {sum(k == 3.0 for k in row) for row in long["contention"]} == {0, 1}
    assert {row.index(3.0) for row in long["contention"] if 3.0 in row} == {0, 1, 2, 3}
    noise = [k for row in series("jitter", steps=4000).noise for k in row]
    mean = sum(noise) / len(noise)
    assert mean == pytest.approx(1.0, abs=0.01)
    assert (sum((k - mean) ** 2 for k in noise) / len(noise)) ** 0.5 == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(("lag", "every", "first"), [(0, 1, 2), (3, 1, 5), (0, 4, 5), (5, 4, 10)])
def test_the_first_shares_that_can_be_others_are_others(lag: int, every: int, first: int) -> None:
    """Records are sent after step 0, of the warm-up, and after step ``every``; ``lag`` batches are drawn by then."""
    outcome = closed_loop(free(), calm([(1.0, 1.0, 1.0, 3.0)] * 20), lag=lag, every=every)
    assert outcome.shares[:first] == [(16,) * 4] * first and outcome.shares[first] != (16,) * 4
    assert outcome.reasons[0] == "rebalanced"


def test_times_are_those_of_the_slowest_rank() -> None:
    outcome = closed_loop(free(), calm([(1.0, 3.0)] * 3), total=8, lag=9)
    equal_s = 3 * 3.0 * (FIXED_S + 4 * SAMPLE_S)
    assert outcome.total_s == pytest.approx(equal_s) == pytest.approx(outcome.equal_s) and outcome.to_equal == 1.0
    # Seven samples on the fast rank take 30 ms, one on the slow rank 36 ms: the best of all splits.
    assert outcome.ideal_s == pytest.approx(3 * 0.036) and outcome.to_ideal == pytest.approx(0.063 / 0.036)
    assert outcome.changes == 0


def test_noise_counts_and_nobody_knows_it_beforehand() -> None:
    quiet, noisy = calm([(1.0, 1.0)] * 2), Series(name="", slow=[(1.0, 1.0)] * 2, noise=[(1.0, 2.0), (3.0, 1.0)])
    ideal_s = closed_loop(free(), quiet, total=8).ideal_s
    assert closed_loop(free(), noisy, total=8).ideal_s == pytest.approx(2.5 * ideal_s)


def test_shares_reach_the_ideal_where_speeds_stay() -> None:
    outcome = closed_loop(free(), series("stationary", steps=200))
    assert outcome.to_ideal < 1.03 and outcome.to_equal < 0.45 and outcome.changes < 10
