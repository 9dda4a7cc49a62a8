"""`Curve`: a line above a floor, learned from few sizes, and what it does to the shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from lightning_hetero.predictors import Curve, Kalman, Predictor, by_name
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost, SaturatingCost

GPU = SaturatingCost(floor_s=0.020, fixed_s=0.004, per_sample_s=0.0005)  # saturated from 32 samples
SIZES = (8, 16, 24, 40, 56)


def noisy(rng: np.random.Generator, noise: float) -> float:
    return math.exp(noise * float(rng.standard_normal()) - noise**2 / 2)


def fed(predictor: Predictor, sizes: Iterable[int], cost: Any = GPU, noise: float = 0.0, seed: int = 0) -> Predictor:
    rng = np.random.default_rng(seed)
    for b in sizes:
        predictor.update(b, cost.seconds(b) * noisy(rng, noise))
    return predictor


def stays(*sizes: int, times: int = 4) -> list[int]:
    """A rank stays at each size for a while."""
    return [b for b in sizes for _ in range(times)]


# ---- what is learned ---------------------------------------------------------------------------------------


def test_floor_and_line_are_learned() -> None:
    cost = fed(Curve(), stays(*SIZES)).cost()
    assert isinstance(cost, SaturatingCost)
    assert cost.floor_s == pytest.approx(GPU.floor_s, rel=1e-3)
    for b in (4, 12, 30, 36, 64, 100):
        assert cost.seconds(b) == pytest.approx(GPU.seconds(b), rel=0.01), b
    line = fed(Kalman(), stays(*SIZES))  # the last sizes alone: a line through them is right only near them
    assert line.predict(8) < 0.9 * GPU.seconds(8)


@pytest.mark.parametrize("share", [0.0, 0.16, 0.5])
def test_a_line_stays_a_line(share: float) -> None:
    true = AffineCost(fixed_s=share * 0.05, per_sample_s=(1 - share) * 0.05 / 16)
    cost = fed(Curve(), stays(16, 24, 11, 13, 20, times=8), true).cost()
    assert isinstance(cost, AffineCost)
    for b in (8, 16, 32):
        assert cost.seconds(b) == pytest.approx(true.seconds(b), rel=0.02)


@pytest.mark.parametrize("k", [4.0, 1.5, 0.5])
@pytest.mark.parametrize("at", [16, 56])
def test_another_speed_scales_floor_and_line(k: float, at: int) -> None:
    learned = fed(Curve(), [*stays(*SIZES), *stays(at)])
    slower = SaturatingCost(floor_s=k * GPU.floor_s, fixed_s=k * GPU.fixed_s, per_sample_s=k * GPU.per_sample_s)
    fed(learned, [at, at], slower)  # seen once it might be a hiccup
    for b in (8, 24, 40, 64):
        assert learned.predict(b) == pytest.approx(slower.seconds(b), rel=0.02), b


@pytest.mark.parametrize("at", [24, 40], ids=["new", "known"])
def test_a_hiccup_on_arrival_is_forgotten(at: int) -> None:
    """A size is new to the allocator and to autotuning, too."""
    learned = fed(Curve(), stays(16, 40, 56))
    expected = learned.predict(at)
    fed(learned, [at], AffineCost(fixed_s=10 * GPU.seconds(at), per_sample_s=0.0))
    fed(learned, [at, at])
    assert learned.predict(at) == pytest.approx(expected, rel=0.02)
    for b in (16, 56):
        assert learned.predict(b) == pytest.approx(GPU.seconds(b), rel=0.02)


@pytest.mark.parametrize("first", [100.0, 10.0, 0.1])
def test_a_first_step_that_was_far_off_is_forgotten(first: float) -> None:
    learned = Curve()
    learned.update(16, first * GPU.seconds(16))
    fed(learned, [16])
    assert learned.predict(16) == pytest.approx(GPU.seconds(16), rel=0.01)
    fed(learned, [48, 48])
    for b in (16, 48):
        assert learned.predict(b) == pytest.approx(GPU.seconds(b), rel=0.06)


@pytest.mark.parametrize("at", [16, 56])
def test_a_lone_outlier_changes_nothing(at: int) -> None:
    learned = fed(Curve(), [*stays(*SIZES), *stays(at)])
    expected = [learned.predict(b) for b in SIZES]
    fed(learned, [at], AffineCost(fixed_s=5 * GPU.seconds(at), per_sample_s=0.0))
    fed(learned, [at])
    assert [learned.predict(b) for b in SIZES] == pytest.approx(expected, rel=0.02)


def test_a_change_just_before_a_move_is_the_speeds() -> None:
    """The first time that is off is ignored as a hiccup; the second is of another size."""
    learned = fed(Curve(), [*stays(16, 40, 56), *stays(24)])
    slower = SaturatingCost(floor_s=0.080, fixed_s=0.016, per_sample_s=0.002)
    fed(learned, [24, 40], slower)
    for b in (16, 24, 40, 56):
        assert learned.predict(b) == pytest.approx(slower.seconds(b), rel=0.03)


def test_what_contradicts_the_newest_sizes_is_forgotten() -> None:
    """Time grows with samples, and no faster than in proportion."""
    learned = fed(Curve(), stays(8, 24, 48))
    fed(learned, stays(32), AffineCost(fixed_s=2.5 * GPU.seconds(32), per_sample_s=0.0))
    assert sorted(learned.sizes) == [8.0, 32.0]
    assert learned.predict(32) == pytest.approx(2.5 * GPU.seconds(32), rel=0.05)


def test_a_change_that_falls_together_with_a_move_heals() -> None:
    """Then the new size is believed to be dear; each known size corrects itself when it is seen again."""
    learned = fed(Curve(), stays(16, 40, 56))
    twice = SaturatingCost(floor_s=0.040, fixed_s=0.008, per_sample_s=0.001)
    fed(learned, stays(24, 16, 40, 56, 24), twice)
    for b in (16, 24, 40, 56):
        assert learned.predict(b) == pytest.approx(twice.seconds(b), rel=0.03)


def test_it_is_careful_beyond_the_largest_size_that_was_flat() -> None:
    """A filter of a line takes the device to be free of charge there, however many samples."""
    flat = AffineCost(fixed_s=0.02, per_sample_s=0.0)
    assert fed(Kalman(), stays(8, 12, 16), flat).predict(64) < 0.03
    careful = fed(Curve(), stays(8, 12, 16), flat)
    assert careful.predict(16) == pytest.approx(0.02, rel=0.01)
    assert 0.05 < careful.predict(64) <= 0.08
    assert careful.predict(4) == pytest.approx(0.02, rel=0.01)


def test_it_remembers_few_sizes() -> None:
    learned = Curve()
    for b in range(4, 200, 4):
        fed(learned, [b, b])
        assert len(learned.sizes) == len(learned.ratios) == len(learned.vars) == len(learned.agreed_at) <= 8
    for b in (150, 196, 240):
        assert learned.predict(b) == pytest.approx(GPU.seconds(b), rel=0.02)


# ---- in the loop it is made for ----------------------------------------------------------------------------

BATCH, STEPS, SWAP = 128, 100, 50
BEFORE, AFTER = (1.0, 1.0, 1.6, 2.5), (2.5, 1.6, 1.0, 1.0)


def cards(slow: tuple[float, ...], floor: float, launches: bool = False) -> list[SaturatingCost]:
    """Slower cards, which saturate at the same size, or whose floors are the same ``launches``."""
    return [
        SaturatingCost(
            floor_s=floor * (1.0 if launches else k), fixed_s=0.002 * k, per_sample_s=k * 0.0005
        )
        for k in slow
    ]


def over_best(
    kind: str, floor: float, *, launches: bool = False, noise: float = 0.0, lag: int = 0, seed: int = 0
) -> list[float]:
    """Per step, the makespan over that of the best split."""
    rng = np.random.default_rng(seed)
    ranks = [by_name(kind) for _ in BEFORE]
    over: list[float] = []
    history: list[list[tuple[int, float]]] = []
    for t in range(STEPS):
        true = cards(BEFORE if t < SWAP else AFTER, floor, launches)
        if t > lag:
            for rank, (b, compute_s) in zip(ranks, history[t - 1 - lag], strict=True):
                rank.update(b, compute_s)
        shares = (BATCH // 4,) * 4
        if all(rank.ready for rank in ranks):
            shares = minimax([rank.cost() for rank in ranks], BATCH, lower=8).shares
        times = [cost.seconds(b) for cost, b in zip(true, shares, strict=True)]
        over.append(max(times) / minimax(true, BATCH, lower=8).makespan_s)
        history.append([(b, s * noisy(rng, noise)) for b, s in zip(shares, times, strict=True)])
    return over


def settles(over: list[float], since: int, until: int) -> int:
    late = [t for t in range(since, until) if over[t] > 1.05]
    return late[-1] + 1 - since if late else 0


FLOORS = [0.0, 0.008, 0.012, 0.018]


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("floor", FLOORS)
def test_the_split_is_right_soon_after_start_and_swap(floor: float, lag: int) -> None:
    over = over_best("curve", floor, lag=lag)
    assert settles(over, 0, SWAP) <= 2 * (lag + 1)
    assert settles(over, SWAP, STEPS) <= 2 * (lag + 1)
    assert max(over[SWAP - 20 : SWAP] + over[-20:]) < 1.02


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("floor", FLOORS)
def test_with_noise_it_is_no_worse_than_a_line(floor: float, launches: bool) -> None:
    mean = {
        kind: float(
            np.mean([over_best(kind, floor, launches=launches, noise=0.03, lag=2, seed=s) for s in range(3)])
        )
        for kind in ("curve", "kalman")
    }
    assert mean["curve"] <= 1.005 * mean["kalman"]
