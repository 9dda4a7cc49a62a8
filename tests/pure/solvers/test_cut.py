"""Parts of equal cost: the boundaries against brute force, and what they keep."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.solvers.cut import cut_by_cost

COST = st.one_of(st.integers(1, 9).map(float), st.floats(1e-3, 1e6))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[int], list[int], list[int]]:
    shares = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any))
    costs = draw(st.lists(COST, min_size=sum(shares), max_size=sum(shares)))
    lower = draw(st.lists(st.integers(0, 4), min_size=len(shares), max_size=len(shares)))
    upper = [draw(st.integers(0, 40)) for _ in shares]
    return costs, shares, lower, upper


@given(problems())
def test_bounds_hold_and_nothing_is_lost(problem: tuple[list[float], list[int], list[int], list[int]]) -> None:
    costs, shares, lower, upper = problem
    parts = cut_by_cost(costs, shares, lower=lower, upper=upper)
    assert sum(parts) == len(costs) and len(parts) == len(shares)
    for part, share, low, up in zip(parts, shares, lower, upper, strict=True):
        assert min(low, share) <= part <= max(up, share) if share else part == 0


@given(problems())
def test_where_bounds_leave_room_every_boundary_is_the_nearest(
    problem: tuple[list[float], list[int], list[int], list[int]],
) -> None:
    costs, shares, *_ = problem
    shares = [max(1, share) for share in shares]
    costs = (costs * 5)[: sum(shares)]
    n, most = len(costs), [len(costs)] * len(shares)
    parts = cut_by_cost(costs, shares, lower=[0] * len(shares), upper=most)
    up_to = [0.0, *accumulate(costs)]
    for end, share in zip(accumulate(parts[:-1]), accumulate(shares[:-1]), strict=True):
        target = up_to[n] * share / n
        assert abs(up_to[end] - target) == min(abs(value - target) for value in up_to)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), st.floats(1e-3, 1e3))
def test_equal_costs_leave_the_shares(shares: list[int], cost: float) -> None:
    most = [sum(shares)] * len(shares)
    assert cut_by_cost([cost] * sum(shares), shares, lower=[1] * len(shares), upper=most) == tuple(shares)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any), st.data())
def test_parts_are_multiples_of_the_quantum(units: list[int], data: st.DataObject) -> None:
    shares = [4 * u for u in units]
    costs = data.draw(st.lists(COST, min_size=sum(shares), max_size=sum(shares)))
    parts = cut_by_cost(costs, shares, lower=[4] * len(shares), upper=[sum(shares)] * len(shares), quantum=4)
    assert sum(parts) == sum(shares)
    assert all(part % 4 == 0 and (part >= 4) == (share > 0) for part, share in zip(parts, shares, strict=True))


def test_by_hand() -> None:
    costs = [8.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert cut_by_cost(costs, [4, 3], lower=[1, 1], upper=[7, 7]) == (2, 5)  # 9 : 7 is the nearest to 4 : 3
    assert cut_by_cost(costs, [3, 4], lower=[1, 1], upper=[7, 7]) == (1, 6)  # 8 : 8 to 3 : 4
    assert cut_by_cost(costs, [3, 4], lower=[2, 1], upper=[7, 7]) == (2, 5)
    assert cut_by_cost(costs, [3, 4], lower=[1, 1], upper=[7, 5]) == (2, 5)
    assert cut_by_cost(costs, [3, 0, 4], lower=[1] * 3, upper=[7] * 3) == (1, 0, 6)
