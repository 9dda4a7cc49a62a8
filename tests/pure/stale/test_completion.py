"""Completing a mean: the running mean of textbooks, and why what is late should not join the next one."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hetero.stale.decide.completion import completed


def test_in_the_end_it_is_the_mean_of_all() -> None:
    rng = np.random.default_rng(0)
    gradients, weights = rng.standard_normal((5, 3)), np.array([7.0, 1.0, 3.0, 0.0, 16.0])
    mean, whole, moved = gradients[0], weights[0], np.zeros(3)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        whole, part = completed(float(whole), float(weight))
        moved, mean = moved + part * (gradient - mean), mean + part * (gradient - mean)
    assert whole == 27.0
    np.testing.assert_allclose(mean, np.average(gradients, axis=0, weights=weights), rtol=1e-12)
    np.testing.assert_allclose(gradients[0] + moved, mean, rtol=1e-12)


def grows(sharpness: float, late: float, *, joins: bool, momentum: float = 0.9) -> bool:
    """Whether momentum SGD leaves the minimum of a parabola, a part of each update being one version late.

    Args:
        sharpness: learning rate times curvature.
        late: that part; it joins the next mean, or completes the one before (on a parabola without noise the late
            gradient of a version is that of the others, so nothing is left to complete).
    """
    part = late if joins else 0.0
    rows = [[1.0 + momentum - sharpness * (1.0 - part), -momentum - sharpness * part], [1.0, 0.0]]
    return bool(np.abs(np.linalg.eigvals(np.array(rows))).max() > 1.0 + 1e-9)


@pytest.mark.parametrize("late", [0.05, 0.1, 0.25])
def test_late_gradients_that_join_cost_stability_and_those_that_complete_do_not(late: float) -> None:
    limit = min(0.1 / late, 2 * 1.9 / (1 - 2 * late))
    assert not grows(0.99 * limit, late, joins=True) and grows(1.01 * limit, late, joins=True)
    assert not grows(0.99 * 3.8, late, joins=False) and grows(1.01 * 3.8, late, joins=False)
    assert limit < 0.6 * 3.8
