"""The optimizer's state by capacities: every row has one owner, and the parts are off by a row."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.optim.division import divide

Case = tuple[list[tuple[int, float]], list[float]]
CAPACITIES = st.lists(st.sampled_from([0.0, 1.0, 3.0, 10.0, 24.0, 80.0]), min_size=1, max_size=6).filter(any)
TENSORS = st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0.0, 2.0, 4.0, 12.0, 4096.0])), max_size=12)


def loads(tensors: list[tuple[int, float]], cuts: list[list[int]]) -> list[float]:
    parts = [[(b - a) * size for a, b in pairwise(cut)] for (_, size), cut in zip(tensors, cuts, strict=True)]
    return [sum(rank) for rank in zip(*parts, strict=True)]


@given(TENSORS, CAPACITIES, st.booleans())
def test_every_row_has_one_owner_and_what_is_held_is_what_was_given(
    tensors: list[tuple[int, float]], capacities: list[float], by_rows: bool
) -> None:
    held = [0.0] * len(capacities)
    cuts = divide(tensors, capacities, held, by_rows=by_rows)
    for (rows, _), cut in zip(tensors, cuts, strict=True):
        assert cut[0] == 0 and cut[-1] == rows and cut == sorted(cut) and len(cut) == len(capacities) + 1
        assert by_rows or rows in [b - a for a, b in pairwise(cut)]
    if tensors:
        assert held == pytest.approx(loads(tensors, cuts))
    assert all(capacity or not has for capacity, has in zip(capacities, held, strict=True))


@given(TENSORS, CAPACITIES)
def test_rows_are_divided_up_to_the_largest_row(tensors: list[tuple[int, float]], capacities: list[float]) -> None:
    held, total = [0.0] * len(capacities), sum(rows * size for rows, size in tensors)
    divide([(max(2, rows), size) for rows, size in tensors], capacities, held)
    total = sum(max(2, rows) * size for rows, size in tensors)
    row = max((size for _, size in tensors), default=0.0)
    for has, capacity in zip(held, capacities, strict=True):
        assert abs(has - total * capacity / sum(capacities)) <= row * 1.001


@given(TENSORS, CAPACITIES)
def test_whole_tensors_are_divided_up_to_the_largest(tensors: list[tuple[int, float]], capacities: list[float]) -> None:
    """A rank got its last tensor when no other would have been less full with it."""
    held, sizes = [0.0] * len(capacities), [rows * size for rows, size in tensors]
    divide(tensors, capacities, held, by_rows=False)
    most = sum(sizes) + (sum(map(bool, capacities)) - 1) * max(sizes, default=0.0)
    for has, capacity in zip(held, capacities, strict=True):
        assert has <= most * capacity / sum(capacities) * 1.001


def test_cards_of_24_and_10_gb() -> None:
    held = [0.0, 0.0]
    assert divide([(3400, 4096.0)], [24, 10], held) == [[0, 2400, 3400]]
    assert divide([(8, 1.0), (24, 1.0), (2, 1.0)], [24, 10], [0.0, 0.0]) == [[0, 8, 8], [0, 16, 24], [0, 0, 2]]
    assert divide([(8, 1.0), (24, 1.0), (2, 1.0)], [24, 10], [0.0, 0.0], by_rows=False) == [
        [0, 0, 8], [0, 24, 24], [0, 0, 2],
    ]  # fmt: skip


def test_what_comes_later_evens_out_what_is_held() -> None:
    held = [0.0, 0.0]
    divide([(1, 90.0)], [1, 1], held)
    assert divide([(200, 1.0)], [1, 1], held) == [[0, 55, 200]]
    assert held == [145.0, 145.0]
