"""The time per sample: its exponentially weighted moving average, and its last value (layer P)."""

from __future__ import annotations

import math

from lightning_hetero.predictors.base import Predictor, remembering
from lightning_hetero.types import AffineCost

_MEMORY_OF_ERROR = 0.1  # weight of the newest squared error in `std_s`: about the last 20 steps
_FIRST_ERROR = 0.1  # relative; assumed until a second measurement says how far off predictions are


@remembering
class Ewma(Predictor):
    """Smoothed seconds per sample: ``rate <- (1 - weight) * rate + weight * T / b``, ``T(b) = rate * b``.

    The baseline of LB-BSP ("CPU": T = x / v) and its successors. It knows no fixed cost, so where one
    exists the split approaches the best one only by the fixed cost's share of the step per decision.

    Args:
        weight: weight of the newest measurement, in (0, 1]; 1 keeps the last value only.

    Raises:
        ValueError: ``weight`` is outside (0, 1].
    """

    rate_s: float = 0.0
    empty_s: float = 0.0  # of the last release, whose checkpoints hold it
    error_sq: float = _FIRST_ERROR**2

    def __init__(self, *, weight: float = 0.5) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"Ewma(weight={weight!r}) must lie in (0, 1]; 1 keeps the last value only")
        super().__init__()
        self.weight = weight

    def update(self, samples: float, compute_s: float) -> None:
        b, measured_s = self.checked(samples, compute_s)
        self.updates += 1
        rate_s = measured_s / b
        if self.rate_s > 0.0:
            # Clipped, so that a single glitch does not make every later prediction look worthless.
            error = min(rate_s / self.rate_s, 2.0) - 1.0
            self.error_sq += _MEMORY_OF_ERROR * (error * error - self.error_sq)
            rate_s = (1.0 - self.weight) * self.rate_s + self.weight * rate_s
        self.rate_s = rate_s

    def cost(self) -> AffineCost:
        self.check_ready()
        return AffineCost(fixed_s=0.0, per_sample_s=self.rate_s)

    def std_s(self, samples: float) -> float:
        # One-step errors of an EWMA under white noise have variance 2 / (2 - w) times the noise's, the
        # average itself w / (2 - w) times: hence the factor w / 2.
        return self.predict(samples) * math.sqrt(0.5 * self.weight * self.error_sq)


class LastValue(Ewma):
    """Seconds per sample of the last measurement: ``T(b) = b * T_last / b_last``.

    Fastest to follow a change and the noisiest: the limit ``weight=1`` of `Ewma`. A single slow step moves samples
    away for one decision.
    """

    def __init__(self) -> None:
        super().__init__(weight=1.0)
