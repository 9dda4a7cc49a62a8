"""Samples by group where groups differ in what a sample costs: exact against all splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.controller.priced_shares import priced_shares
from tests.pure.controller.kit import compositions

STEPS = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@given(
    steps=st.lists(STEPS, min_size=1, max_size=3),
    samples=st.integers(1, 9),
    alpha=st.integers(0, 3),
    gamma=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_no_split_is_better(steps: list[list[int]], samples: int, alpha: int, gamma: list[int]) -> None:
    tables = [np.cumsum(step).astype(float) + 1.0 for step in steps]
    gamma = gamma[: len(tables)]

    def value(shares: tuple[int, ...] | list[int]) -> float:
        if any(n > len(table) for n, table in zip(shares, tables, strict=True)):
            return math.inf
        slowest = max(table[n - 1] for n, table in zip(shares, tables, strict=True))
        return alpha * slowest + sum(c * n for c, n in zip(gamma, shares, strict=True))

    best = min((value(s) for s in compositions(samples, len(tables))), default=math.inf)
    shares, slowest_s = priced_shares(tables, samples, alpha, gamma)
    if best == math.inf:
        assert (shares, slowest_s) == ([], math.inf)
        return
    assert sum(shares) == samples
    assert value(shares) == pytest.approx(best)
    assert slowest_s == max(table[n - 1] for n, table in zip(shares, tables, strict=True))
