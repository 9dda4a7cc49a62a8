"""The min-max split against brute force, unit-by-unit greedy, and SciPy's linear programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from lightning_hetero.solvers import minimax
from lightning_hetero.solvers.minimax import fractional_s
from lightning_hetero.types import AffineCost, Allocation, Cost, Status
from tests.pure.solvers.costs import AFFINE, EVERYDAY, STAIRS, Stairs

Problem = tuple[list[Cost], int, list[int], list[int], int]


@st.composite
def problems(draw: st.DrawFn, cost: st.SearchStrategy[Cost]) -> Problem:
    n = draw(st.integers(1, 4))
    quantum = draw(st.sampled_from([1, 1, 2, 3]))
    total = draw(st.integers(0, 10)) * quantum
    lower = draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=n, max_size=n))
    upper = draw(st.lists(st.sampled_from([total, total, 3, 7]), min_size=n, max_size=n))
    return draw(st.lists(cost, min_size=n, max_size=n)), total, lower, upper, quantum


def solve(problem: Problem) -> Allocation:
    costs, total, lower, upper, quantum = problem
    return minimax(costs, total, lower=lower, upper=upper, quantum=quantum)


def all_splits(problem: Problem) -> list[tuple[int, ...]]:
    _, total, lower, upper, q = problem
    choices = [range(-(-a // q) * q, b + 1, q) for a, b in zip(lower, upper, strict=True)]
    return [s for s in itertools.product(*choices) if sum(s) == total]


def makespan(costs: Sequence[Cost], shares: Sequence[int]) -> float:
    return max(c.seconds(x) for c, x in zip(costs, shares, strict=True))


def greedy(problem: Problem) -> tuple[int, ...]:
    """The textbook: unit by unit to the rank that then has the least time, ties to the lowest index."""
    costs, total, lower, upper, q = problem
    shares = [-(-a // q) * q for a in lower]
    while sum(shares) < total:
        _, i = min((costs[i].seconds(x + q), i) for i, x in enumerate(shares) if x + q <= upper[i])
        shares[i] += q
    return tuple(shares)


def check(problem: Problem) -> None:
    costs = problem[0]
    result = solve(problem)
    splits = all_splits(problem)
    assert result.ok == bool(splits)
    if not splits:
        assert result.status is Status.INFEASIBLE and result.reason and result.shares == ()
        return
    assert result.shares in splits
    assert result.makespan_s == makespan(costs, result.shares) == min(makespan(costs, s) for s in splits)
    assert result.shares == greedy(problem)
    assert 0.0 <= result.lower_bound_s <= result.makespan_s


@given(problems(AFFINE | EVERYDAY))
def test_affine_equals_brute_force_and_greedy(problem: Problem) -> None:
    check(problem)


@given(problems(STAIRS))
def test_any_cost_with_an_unreliable_inverse_equals_brute_force_and_greedy(problem: Problem) -> None:
    check(problem)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_of_very_different_speeds_and_a_quantum_equal_greedy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, q = int(rng.integers(2, 40)), int(rng.integers(1, 4))
    scales = 10.0 ** rng.integers(-4, 2, n)
    costs: list[Cost] = [AffineCost(fixed_s=float(rng.random()), per_sample_s=float(s)) for s in scales]
    problem = (costs, 30 * n * q, [int(v) for v in rng.integers(0, 9, n)], [40 * q + 60] * n, q)
    assert solve(problem).shares == greedy(problem)


@pytest.mark.parametrize("flat", [False, True])
def test_many_ranks_equal_greedy(flat: bool) -> None:
    rng = np.random.default_rng(7)
    slopes = rng.integers(0 if flat else 1, 5, 150) / 1000
    costs: list[Cost] = [AffineCost(fixed_s=float(f) / 100, per_sample_s=float(p))
                         for f, p in zip(rng.integers(0, 4, 150), slopes, strict=True)]  # fmt: skip
    problem = (costs, 2000, [0] * 150, [25] * 150, 1)
    assert solve(problem).shares == greedy(problem)


def linear_program(costs: Sequence[AffineCost], total: int, low: int, high: int, whole: bool) -> float:
    """Minimise t subject to f_i + p_i x_i <= t, sum x_i = total, low <= x_i <= high."""
    n = len(costs)
    slope = np.diag([c.per_sample_s for c in costs])
    late = np.hstack([slope, -np.ones((n, 1))])
    goal = np.r_[np.zeros(n), 1.0]
    ones = np.r_[np.ones(n), 0.0]
    fixed: Any = [-c.fixed_s for c in costs]
    if whole:
        rows = [LinearConstraint(late, -np.inf, fixed), LinearConstraint(ones[None, :], total, total)]
        bounds = Bounds(np.r_[np.full(n, low), 0.0], np.r_[np.full(n, high), np.inf])
        return float(milp(goal, constraints=rows, integrality=np.r_[np.ones(n), 0.0], bounds=bounds).fun)
    box = [(low, high)] * n + [(0, None)]
    return float(linprog(goal, A_ub=late, b_ub=fixed, A_eq=ones[None, :], b_eq=[total], bounds=box).fun)


@pytest.mark.parametrize("seed", range(6))
def test_affine_equals_scipy_milp_and_the_bound_equals_linprog(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = [AffineCost(fixed_s=float(f), per_sample_s=float(p))
             for f, p in zip(rng.integers(0, 60, 10), rng.integers(1, 10, 10), strict=True)]  # fmt: skip
    result = minimax(costs, 200, lower=5, upper=40)
    assert result.makespan_s == pytest.approx(linear_program(costs, 200, 5, 40, True), abs=1e-4)
    assert result.lower_bound_s == pytest.approx(linear_program(costs, 200, 5, 40, False), rel=1e-7)


@given(problems(EVERYDAY | AFFINE))
def test_the_lower_bound_is_where_fractional_shares_just_reach_the_total(problem: Problem) -> None:
    costs, total, lower, upper, _ = problem
    result = solve(problem)
    assume(result.ok and 1e-300 < result.lower_bound_s < 1e300)

    def fill(deadline_s: float) -> float:
        limits = zip(costs, lower, upper, strict=True)
        return sum(min(max(c.most_samples(deadline_s), a), b) for c, a, b in limits)

    assert fill(result.lower_bound_s * (1 + 1e-8)) >= total * (1 - 1e-6)
    if result.lower_bound_s * (1 - 1e-8) > makespan(costs, lower):
        assert fill(result.lower_bound_s * (1 - 1e-8)) <= total * (1 + 1e-6)


@given(problems(EVERYDAY))
def test_more_samples_never_take_less_time(problem: Problem) -> None:
    costs, total, lower, upper, q = problem
    more = solve((costs, total + q, lower, upper, q))
    less = solve(problem)
    assume(less.ok and more.ok)
    assert less.makespan_s <= more.makespan_s
    assert less.lower_bound_s <= more.lower_bound_s * (1 + 1e-9)


@given(problems(EVERYDAY), st.integers(-30, 30))
def test_another_unit_of_time_changes_no_share(problem: Problem, power: int) -> None:
    costs, *rest = problem
    scaled: list[Cost] = [
        AffineCost(fixed_s=math.ldexp(c.seconds(0), power), per_sample_s=math.ldexp(c.per_sample_s, power))
        for c in costs
        if isinstance(c, AffineCost)
    ]
    before, after = solve(problem), solve((scaled, *rest))  # type: ignore[arg-type]
    assert after.shares == before.shares
    if before.ok:
        assert after.makespan_s == math.ldexp(before.makespan_s, power)


@pytest.mark.parametrize(
    ("pairs", "total", "keywords", "expected"),
    [
        ([(0.0, 1.0), (0.0, 1.0), (0.0, 2.0), (0.0, 4.0)], 64, {}, (24, 24, 11, 5)),
        ([(1.0, 1.0)] * 3, 8, {}, (3, 3, 2)),
        ([(1.0, 0.0)] * 2, 8, {}, (8, 0)),
        ([(1.0, 0.0)] * 2, 8, {"upper": 5}, (5, 3)),
        ([(0.0, 1.0), (9.0, 1.0)], 8, {}, (8, 0)),
        ([(0.0, 1.0), (9.0, 1.0)], 8, {"lower": 2}, (6, 2)),
        ([(0.0, 1.0), (0.0, 3.0)], 16, {"quantum": 4}, (12, 4)),
        ([(0.0, 1.0), (0.0, 3.0)], 2**53, {}, (6755399441055744, 2251799813685248)),
        ([(0.0, 1.0)], 0, {}, (0,)),
    ],
)
def test_literal_splits(
    pairs: list[tuple[float, float]], total: int, keywords: dict[str, Any], expected: tuple[int, ...]
) -> None:
    costs = [AffineCost(fixed_s=f, per_sample_s=p) for f, p in pairs]
    assert minimax(costs, total, **keywords).shares == expected


TWO = [AffineCost(fixed_s=0.0, per_sample_s=1.0)] * 2


@pytest.mark.parametrize(
    ("total", "keywords", "words"),
    [
        (8, {"lower": 5}, "lower bounds sum to 10, above total=8"),
        (8, {"upper": [3, 4]}, "upper bounds sum to 7, below total=8"),
        (8, {"lower": [5, 0], "upper": 4}, "rank 0: lower=5 exceeds upper=4"),
        (10, {"quantum": 4}, "total=10 is not a multiple of quantum=4: use 8 or 12"),
        (
            8,
            {"quantum": 4, "lower": [5, 0], "upper": 7},
            "rank 0: no multiple of quantum=4 in lower=5 to upper=7",
        ),
        (8, {"quantum": 4, "upper": [7, 3]}, "quantum=4, upper bounds sum to 4, below total=8"),
        (8, {"quantum": 4, "lower": [5, 1]}, "quantum=4, lower bounds sum to 12, above total=8"),
    ],
)
def test_an_impossible_problem_is_a_status_with_numbers(
    total: int, keywords: dict[str, Any], words: str
) -> None:
    result = minimax(TWO, total, **keywords)
    assert (result.status, result.shares, result.makespan_s) == (Status.INFEASIBLE, (), math.inf)
    assert words in result.reason


@pytest.mark.parametrize(
    ("costs", "total", "keywords", "error", "words"),
    [
        ([Stairs([math.nan, math.nan], 0.0)], 1, {}, ValueError, "times must be numbers >= 0"),
        ([Stairs([-1.0, 2.0], 0.0)], 1, {}, ValueError, "times must be numbers >= 0"),
    ],
)
def test_malformed_arguments_raise(
    costs: list[Cost], total: int, keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        minimax(costs, total, **keywords)


def test_a_subclass_may_override_seconds() -> None:
    class Doubled(AffineCost):
        def seconds(self, samples: float) -> float:
            return 2.0 * (self.fixed_s + self.per_sample_s * samples)

        def most_samples(self, deadline_s: float) -> float:
            return deadline_s / 2.0 / self.per_sample_s

    costs = [AffineCost(fixed_s=0.0, per_sample_s=1.0), Doubled(fixed_s=0.0, per_sample_s=1.0)]
    assert minimax(costs, 9).shares == (6, 3)


def test_a_cost_that_decreases_is_refused_where_it_is_noticed() -> None:
    class Falling:
        def seconds(self, samples: float) -> float:
            return 9.0 - samples

        def most_samples(self, deadline_s: float) -> float:
            return 0.0

    with pytest.raises(ValueError, match="decreases"):
        minimax([Falling(), Falling()], 8)


@pytest.mark.parametrize("start_s", [1e-3, 3.0, 7.0, 50.0, 1e6])
def test_all_may_be_done_long_before_another_rank_begins(start_s: float) -> None:
    early, late = AffineCost(fixed_s=1.0, per_sample_s=1.0), AffineCost(fixed_s=100.0, per_sample_s=1.0)
    found_s = fractional_s([early, late], 4.0, [0.0] * 2, [4.0] * 2, start_s=start_s)
    assert found_s == pytest.approx(5.0, rel=1e-11)
    flat = AffineCost(fixed_s=6.0, per_sample_s=0.0)  # does all at once
    assert fractional_s([late, flat], 4.0, [0.0] * 2, [4.0] * 2, start_s=start_s) == pytest.approx(6.0, rel=1e-11)
