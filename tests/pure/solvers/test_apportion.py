"""Largest-remainder shares against the definition of the bounded quota, in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.solvers import apportion

WEIGHT = st.one_of(
    st.just(0.0), st.integers(0, 5).map(float), st.floats(0.0, 1e6), st.floats(0.0, 1e300), st.just(5e-324)
)
Problem = tuple[list[float], int, int]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    weights = draw(st.lists(WEIGHT, min_size=1, max_size=5))
    lower = draw(st.integers(0, 8))
    return weights, lower * len(weights) + draw(st.integers(0, 40)), lower


def bounded_quotas(weights: list[float], total: int, lower: int) -> list[Fraction]:
    """The docstring's definition: the z (found among all breakpoints) whose bounded shares sum to total."""
    w = [Fraction(x) for x in weights] if any(weights) else [Fraction(1)] * len(weights)

    def bounded(z: Fraction) -> list[Fraction]:
        return [max(z * x, Fraction(lower)) for x in w]

    corners = sorted({Fraction(0), *(Fraction(lower) / x for x in w if x)})
    z = max(z for z in corners if sum(bounded(z)) <= total)
    slope = sum(x for x in w if z * x >= lower)
    return bounded(z + (total - sum(bounded(z))) / slope) if slope else bounded(z)


@given(problems())
def test_sum_bounds_and_quota_hold_exactly(problem: Problem) -> None:
    weights, total, lower = problem
    shares, quotas = apportion(weights, total, lower=lower), bounded_quotas(*problem)
    assert sum(quotas) == sum(shares) == total
    for x, q in zip(shares, quotas, strict=True):
        assert x >= lower and math.floor(q) <= x <= math.ceil(q)


@given(problems())
def test_the_largest_remainders_are_rounded_up_and_ties_go_to_the_lowest_index(problem: Problem) -> None:
    weights, total, lower = problem
    quotas = bounded_quotas(*problem)
    expected = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (expected[i] - quotas[i], i))
    for i in by_remainder[: total - sum(expected)]:
        expected[i] += 1
    assert list(apportion(weights, total, lower=lower)) == expected


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([5, 3, 1], 7, (4, 2, 1)),  # quotas 3.89, 2.33, 0.78
        ([5, 3, 1], 8, (4, 3, 1)),  # 4.44, 2.67, 0.89
        ([0.0, 0.0, 0.0], 8, (3, 3, 2)),
        ([0.0, 1.0], 8, (0, 8)),
        ([1.0], 0, (0,)),
        ([1e300, 1e-300], 2**53, (2**53, 0)),
    ],
)
def test_literal_shares(weights: list[float], total: int, expected: tuple[int, ...]) -> None:
    assert apportion(weights, total) == expected
