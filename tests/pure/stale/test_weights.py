"""What parts of a grant count together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.stale.decide.weights import joint

WEIGHTS = st.lists(st.floats(0.0, 1e6).map(lambda w: round(w, 3)), min_size=2, max_size=8)


@given(WEIGHTS, st.data())
def test_part_by_part_is_the_weighted_mean_of_all(weights: list[float], data: st.DataObject) -> None:
    gradients = [data.draw(st.floats(-10.0, 10.0)) for _ in weights]
    total, mean = weights[0], gradients[0]
    for weight, gradient in zip(weights[1:], gradients[1:], strict=True):
        total, old, new = joint(total, weight, sums=False)
        mean = old * mean + new * gradient
    assert total == pytest.approx(sum(weights))
    if total:
        expected = sum(w * g for w, g in zip(weights, gradients, strict=True)) / sum(weights)
        assert mean == pytest.approx(expected, abs=1e-9)


def test_what_counts_nothing_has_no_share() -> None:
    assert joint(0.0, 0.0, sums=False) == (0.0, 0.0, 0.0)
    assert joint(0.0, 5.0, sums=False) == (5.0, 0.0, 1.0)
    assert joint(5.0, 0.0, sums=False) == (5.0, 1.0, 0.0)


def test_sums_are_added_whatever_they_count() -> None:
    assert joint(1.0, 7.0, sums=True) == (1.0, 1.0, 1.0)
