"""Cost models: values against NumPy, and `most_samples` as the inverse of `seconds`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.published import PiecewiseLinearCost
from lightning_hetero.types import (
    AffineCost,
    Allocation,
    Cost,
    LayerCost,
    SaturatingCost,
    Status,
)

GPU = PiecewiseLinearCost(samples=(8.0, 32.0, 64.0), seconds_at=(0.1, 0.1, 0.2))


@st.composite
def piecewise(draw: st.DrawFn) -> PiecewiseLinearCost:
    knots = draw(st.lists(st.integers(0, 60), min_size=2, max_size=5, unique=True))
    times = draw(st.lists(st.integers(0, 8), min_size=len(knots), max_size=len(knots)))
    return PiecewiseLinearCost(
        samples=tuple(map(float, sorted(knots))), seconds_at=tuple(t / 4 for t in sorted(times))
    )


def test_affine_is_fixed_plus_slope() -> None:
    cost = AffineCost(fixed_s=0.5, per_sample_s=0.25)
    assert [cost.seconds(x) for x in (0, 1, 10)] == [0.5, 0.75, 3.0]
    assert cost.most_samples(3.0) == 10.0
    assert cost.most_samples(0.4) == -math.inf


def test_affine_without_slope_holds_any_number_once_it_is_in_time() -> None:
    flat = AffineCost(fixed_s=0.5, per_sample_s=0.0)
    assert flat.most_samples(0.5) == math.inf
    assert flat.most_samples(math.nextafter(0.5, 0.0)) == -math.inf


def test_a_slower_device_takes_so_many_times_the_time_and_as_many_bytes() -> None:
    line = AffineCost(fixed_s=1.0, per_sample_s=0.5)
    assert line.times(3.0).seconds(4) == 3.0 * line.seconds(4)
    layer = LayerCost(name="layer", forward=line, backward=line.times(2.0), param_bytes=8.0)
    assert layer.times(0.5) == LayerCost(
        name="layer", forward=line.times(0.5), backward=line, param_bytes=8.0
    )


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fixed_s", "per_sample_s"])
def test_affine_refuses_bad_coefficients_by_name(name: str, bad: float) -> None:
    good = {"fixed_s": 1.0, "per_sample_s": 1.0}
    with pytest.raises(ValueError, match=f"{name}={bad!r}"):
        AffineCost(**(good | {name: bad}))


def test_saturating_is_the_greater_of_floor_and_line() -> None:
    cost = SaturatingCost(floor_s=1.0, fixed_s=0.5, per_sample_s=0.25)
    assert [cost.seconds(x) for x in (0, 2, 3, 10)] == [1.0, 1.0, 1.25, 3.0]
    assert [cost.most_samples(t) for t in (0.99, 1.0, 3.0)] == [-math.inf, 2.0, 10.0]
    assert cost.line == AffineCost(fixed_s=0.5, per_sample_s=0.25)
    assert SaturatingCost(floor_s=1.0, fixed_s=2.0, per_sample_s=0.0).most_samples(1.5) == -math.inf


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["floor_s", "fixed_s", "per_sample_s"])
def test_saturating_refuses_bad_coefficients_by_name(name: str, bad: float) -> None:
    good = {"floor_s": 1.0, "fixed_s": 1.0, "per_sample_s": 1.0}
    with pytest.raises(ValueError, match=f"SaturatingCost.{name}={bad!r}"):
        SaturatingCost(**(good | {name: bad}))


def test_piecewise_is_flat_before_the_first_knot_and_goes_on_after_the_last() -> None:
    assert GPU.seconds(0) == GPU.seconds(8) == GPU.seconds(20) == 0.1
    assert GPU.seconds(48) == pytest.approx(0.15, rel=1e-12)
    assert GPU.seconds(128) == pytest.approx(0.4, rel=1e-12)


def test_piecewise_inverse_takes_the_end_of_a_flat_piece() -> None:
    assert GPU.most_samples(0.1) == 32.0
    assert GPU.most_samples(0.09) == -math.inf
    assert PiecewiseLinearCost(samples=(0.0, 4.0), seconds_at=(1.0, 1.0)).most_samples(1.0) == math.inf


@given(piecewise(), st.integers(0, 240))
def test_piecewise_agrees_with_numpy_between_its_knots(cost: PiecewiseLinearCost, quarter: int) -> None:
    x = min(quarter / 4, cost.samples[-1])
    assert cost.seconds(x) == pytest.approx(np.interp(x, cost.samples, cost.seconds_at), abs=1e-12)


QUARTERS = st.integers(0, 8).map(lambda n: n / 4)


@given(
    piecewise()
    | st.builds(AffineCost, fixed_s=QUARTERS, per_sample_s=QUARTERS)
    | st.builds(SaturatingCost, floor_s=QUARTERS, fixed_s=QUARTERS, per_sample_s=QUARTERS),
    st.integers(0, 80),
)
def test_costs_never_decrease_and_the_inverse_is_the_last_sample_in_time(cost: Cost, quarter: int) -> None:
    deadline_s = quarter / 4
    times = [cost.seconds(x) for x in range(100)]
    assert times == sorted(times)
    most = cost.most_samples(deadline_s)
    for x, t in enumerate(times):
        if x <= most - 1e-9:
            assert t <= deadline_s + 1e-9
        if x >= most + 1e-9:
            assert t > deadline_s - 1e-9
    if most == -math.inf:
        assert times[0] > deadline_s


@pytest.mark.parametrize(
    ("samples", "seconds_at", "words"),
    [
        ((1.0,), (1.0,), "two or more knots"),
        ((1.0, 2.0), (1.0,), "as many times"),
        ((2.0, 2.0), (1.0, 1.0), "increase strictly"),
        ((1.0, 2.0), (2.0, 1.0), "never decrease"),
        ((1.0, 2.0), (-1.0, 1.0), ">= 0"),
    ],
)
def test_piecewise_refuses_bad_knots(
    samples: tuple[float, ...], seconds_at: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PiecewiseLinearCost(samples=samples, seconds_at=seconds_at)


def test_both_costs_satisfy_the_protocol_and_a_float_does_not() -> None:
    assert isinstance(GPU, Cost)
    assert isinstance(AffineCost(fixed_s=0.0, per_sample_s=1.0), Cost)
    assert not isinstance(1.0, Cost)


def test_an_allocation_is_ok_only_when_optimal() -> None:
    assert Allocation(shares=(1, 2)).ok
    assert not Allocation(shares=(), status=Status.INFEASIBLE, reason="why").ok
