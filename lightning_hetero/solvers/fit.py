"""Fits ``T(x) = fixed_s + per_sample_s * x`` to measured times (layer P).

Least squares of *relative* residuals, sum ((a + b x_i - t_i) / t_i)^2, because the noise of a time grows with the time,
subject to a, b >= 0. The problem is convex in two variables: where the free minimum leaves the quadrant across an edge,
the true one lies on that edge, so three closed forms solve it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    fixed, slope = relative_line((v / top_x, s / top_t, 1.0) for v, s in zip(x, t, strict=True))
    return AffineCost(fixed_s=fixed * top_t, per_sample_s=slope * top_t / top_x)


def relative_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns fixed and slope, both >= 0, of the line that fits best; one pass, as West (CACM 1979).

    Args:
        points: amount, time and weight of the squared relative residual; the times are of about 1, none is below 0.
    """
    total = mean_x = mean_t = spread = both = 0.0
    for x, t, weight in points:
        weight /= max(t, _FLOOR) ** 2
        total += weight
        off = x - mean_x
        mean_x += off * (weight / total)
        mean_t += (t - mean_t) * (weight / total)
        spread += weight * off * (x - mean_x)
        both += weight * off * (t - mean_t)
    slope = both / spread if spread > 0.0 else 0.0  # the amounts may differ by less than floats tell apart
    fixed = mean_t - slope * mean_x
    if slope < 0.0:
        return mean_t, 0.0
    if fixed < 0.0:
        return 0.0, (both + total * mean_x * mean_t) / (spread + total * mean_x * mean_x)
    return fixed, slope
