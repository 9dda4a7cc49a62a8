"""Fits ``T(x) = fixed_s + per_sample_s * x`` to measured times (layer P).

Least squares of *relative* residuals, sum ((a + b x_i - t_i) / t_i)^2, because the noise of a time grows with the time,
subject to a, b >= 0. The problem is convex in two variables: where the free minimum leaves the quadrant, the true one
lies on one of its two edges, so three closed forms and a comparison solve it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.types import AffineCost

_FLOOR = 1e-3  # times below this fraction of the largest count no more: a clock's tick is no measurement


def fit_affine(samples: Sequence[float], seconds: Sequence[float]) -> AffineCost:
    """Returns the affine cost that fits best.

    Args:
        samples: how much was done, finite and >= 0, two or more different amounts; bytes serve as well.
        seconds: how long it took [s], finite and >= 0; one per amount, repeats allowed.

    >>> fit_affine([1, 2, 4], [1.0, 2.0, 4.0])
    AffineCost(fixed_s=0.0, per_sample_s=1.0)
    >>> fit_affine([1, 2, 4], [2.0, 2.0, 2.0])
    AffineCost(fixed_s=2.0, per_sample_s=0.0)
    """
    x, t = [float(v) for v in samples], [float(v) for v in seconds]
    assert len(set(x)) > 1, x  # one amount cannot tell a fixed time from a time per sample
    top_x, top_t = max(x), max(t)
    if top_t == 0.0:
        return AffineCost(fixed_s=0.0, per_sample_s=0.0)
    # Scaled to at most 1: squares of nanoseconds or of terabytes stay far from the limits of floats.
    x, t = [v / top_x for v in x], [v / top_t for v in t]
    weights = [max(v, _FLOOR) ** -2 for v in t]
    fixed, slope = _best(x, t, weights)
    return AffineCost(fixed_s=fixed * top_t, per_sample_s=slope * top_t / top_x)


def _best(x: Sequence[float], t: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    total = math.fsum(weights)
    mean_x = math.fsum([w * v for w, v in zip(weights, x, strict=True)]) / total
    mean_t = math.fsum([w * v for w, v in zip(weights, t, strict=True)]) / total
    rows = list(zip(x, t, weights, strict=True))
    spread = math.fsum([w * (v - mean_x) ** 2 for v, _, w in rows])
    if spread > 0.0:  # else the amounts differ by less than floats tell apart here
        slope = math.fsum([w * (v - mean_x) * (s - mean_t) for v, s, w in rows]) / spread
        fixed = mean_t - slope * mean_x
        if fixed >= 0.0 and slope >= 0.0:
            return fixed, slope
    squares = math.fsum([w * v * v for v, _, w in rows])
    through_origin = 0.0, math.fsum([w * v * s for v, s, w in rows]) / squares
    edges = [(mean_t, 0.0), through_origin]

    def loss(line: tuple[float, float]) -> float:
        return math.fsum([w * (line[0] + line[1] * v - s) ** 2 for v, s, w in rows])

    return min(edges, key=loss)
