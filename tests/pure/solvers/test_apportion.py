"""Largest-remainder shares against the definition of the bounded quota, in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hetero.solvers import apportion
from lightning_hetero.types import Status

WEIGHT = st.one_of(
    st.just(0.0), st.integers(0, 5).map(float), st.floats(0.0, 1e6), st.floats(0.0, 1e300), st.just(5e-324)
)
Problem = tuple[list[float], int, list[int], list[int]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 5))
    total = draw(st.integers(0, 40))
    weights = draw(st.lists(WEIGHT, min_size=n, max_size=n))
    lower = draw(st.lists(st.integers(0, 8), min_size=n, max_size=n))
    upper = [a + draw(st.sampled_from([0, 1, 5, 40])) for a in lower]
    return weights, total, lower, upper


def bounded_quotas(weights: list[float], total: int, lower: list[int], upper: list[int]) -> list[Fraction]:
    """The docstring's definition: the z (found among all breakpoints) whose clipped shares sum to total."""
    w = [Fraction(x) for x in weights]

    def clipped(z: Fraction, w: list[Fraction]) -> list[Fraction]:
        return [min(max(z * x, Fraction(a)), Fraction(b)) for x, a, b in zip(w, lower, upper, strict=True)]

    most = sum(b if x else a for x, a, b in zip(w, lower, upper, strict=True))
    if most < total:  # every rank with a weight is full: the others share equally
        lower = [b if x else a for x, a, b in zip(w, lower, upper, strict=True)]
        w = [Fraction(1)] * len(w)
    corners = sorted({Fraction(0), *(Fraction(v) / x for x, a, b in zip(w, lower, upper, strict=True)
                                     if x for v in (a, b))})  # fmt: skip
    z0 = max((z for z in corners if sum(clipped(z, w)) <= total), default=Fraction(0))
    z1 = min((z for z in corners if sum(clipped(z, w)) >= total), default=z0)
    s0, s1 = sum(clipped(z0, w)), sum(clipped(z1, w))
    z = z0 if s0 == s1 else z0 + (total - s0) * (z1 - z0) / (s1 - s0)
    return clipped(z, w)


@given(problems())
def test_sum_bounds_and_quota_hold_exactly(problem: Problem) -> None:
    weights, total, lower, upper = problem
    assume(sum(lower) <= total <= sum(upper))
    shares = apportion(weights, total, lower=lower, upper=upper).shares
    quotas = bounded_quotas(*problem)
    assert sum(quotas) == total
    assert sum(shares) == total
    for x, q, a, b in zip(shares, quotas, lower, upper, strict=True):
        assert a <= x <= b
        assert math.floor(q) <= x <= math.ceil(q)


@given(problems())
def test_the_largest_remainders_are_rounded_up_and_ties_go_to_the_lowest_index(problem: Problem) -> None:
    weights, total, lower, upper = problem
    assume(sum(lower) <= total <= sum(upper))
    shares = apportion(weights, total, lower=lower, upper=upper).shares
    quotas = bounded_quotas(*problem)
    expected = [math.floor(q) for q in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (expected[i] - quotas[i], i))
    for i in by_remainder[: total - sum(expected)]:
        expected[i] += 1
    assert list(shares) == expected


@given(problems())
def test_infeasible_exactly_when_the_bounds_leave_no_split(problem: Problem) -> None:
    weights, total, lower, upper = problem
    result = apportion(weights, total, lower=lower, upper=upper)
    assert result.ok == (sum(lower) <= total <= sum(upper))
    assert bool(result.reason) != result.ok


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
    assert apportion(weights, total).shares == expected


def test_ranks_without_weight_take_what_the_others_may_not_hold() -> None:
    assert apportion([2.0, 0.0, 0.0], 9, upper=[4, 9, 9]).shares == (4, 3, 2)
    assert apportion([2.0, 0.0, 0.0], 9, lower=[0, 2, 0]).shares == (7, 2, 0)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"lower": 5}, "lower bounds sum to 10, above total=8"),
        ({"upper": [3, 4]}, "upper bounds sum to 7, below total=8"),
        ({"lower": [0, 5], "upper": [8, 4]}, "rank 1: lower=5 exceeds upper=4"),
    ],
)
def test_the_reason_names_bound_and_numbers(bounds: dict[str, object], words: str) -> None:
    result = apportion([1.0, 1.0], 8, **bounds)  # type: ignore[arg-type]
    assert result.status is Status.INFEASIBLE
    assert result.shares == ()
    assert words in result.reason
