"""Affine costs from noisy times: exact where the data are, optimal elsewhere (against SciPy)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from lightning_hetero.solvers.fit import fit_affine

amounts = st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True)


@given(amounts, st.floats(0, 10), st.floats(1e-9, 10))
def test_a_line_is_found(x: list[int], fixed: float, slope: float) -> None:
    cost = fit_affine(x, [fixed + slope * v for v in x])
    for v in x:
        assert cost.seconds(v) == pytest.approx(fixed + slope * v, rel=1e-9)


@given(amounts, st.data())
def test_no_other_line_fits_better(x: list[int], data: st.DataObject) -> None:
    t = data.draw(st.lists(st.floats(0.01, 10.0), min_size=len(x), max_size=len(x)))
    assume(min(t) >= 1e-3 * max(t))
    cost = fit_affine(x, t)
    rows, ones = np.array([[1 / v, a / v] for a, v in zip(x, t, strict=True)]), np.ones(len(x))
    _, best = nnls(rows, ones)
    ours = np.linalg.norm(rows @ [cost.fixed_s, cost.per_sample_s] - ones)
    assert ours <= best * (1 + 1e-7) + 1e-9


def test_falling_and_vanishing_times() -> None:
    assert fit_affine([1, 2], [2.0, 1.0]).per_sample_s == 0.0
    through = fit_affine([1, 2, 3], [0.1, 2.0, 4.0])
    assert through.fixed_s == 0.0 and through.per_sample_s > 0.0
    none = fit_affine([1, 2], [0.0, 0.0])
    assert (none.fixed_s, none.per_sample_s) == (0.0, 0.0)
