"""An adaptive Kalman filter on (fixed cost, cost per sample) of one rank (layer P)."""

from __future__ import annotations

import math

from lightning_hetero.predictors.base import Memory, Predictor, remembering
from lightning_hetero.types import AffineCost

FIXED_SHARE = 0.15  # share of alpha in the time, assumed at the first measurement
FIXED_SHARE_STD = 0.3  # uncertainty of that share, and the most it can ever become
_NOISE = 0.1  # relative standard deviation of a measurement, assumed at first
_NOISE_FLOOR = 0.005  # measurements are never believed to be more exact (relative)
_DRIFT = 0.007  # relative random walk of the speed per update
_SPLIT_DRIFT = 0.02  # random walk of the share of alpha per update
GATE = 4.0  # standard deviations from which a measurement counts as an outlier
_CUSUM_SLACK = 0.5  # Page's two-sided test with slack 0.5 and limit 5 raises a false alarm every ~465 steps
_CUSUM_LIMIT = 5.0  # and finds a shift of 2 standard deviations after ~4 (the usual tables of run lengths)
_NOISE_WEIGHT = 0.03  # weight of the newest squared residual in the noise: about the last 60 steps


@remembering
class Kalman(Predictor):
    """Kalman filter on ``T = alpha + beta * b + noise`` that follows speed changes in two steps.

    A 2x2 filter instead of regression because alpha and beta cannot be separated while ``b`` stands
    still, which is what a settled balance looks like. The textbook filter (Kalman 1960) with these
    choices of ours:

    - Process noise acts on (alpha, beta) *jointly* ("the rank became k times slower") and only weakly on
      the split between them at equal time. With constant ``b`` the split is exactly unobserved, so it
      stays where it was, and its variance is capped: no drift and no blow-up however long.
    - All is relative to the last predicted time, so microseconds and minutes behave the same.
    - The measurement noise is learned from the residuals after the update plus the state's variance
      (the always positive form of Sage and Husa 1969). A lone outlier is not counted, so that a hiccup
      every few steps changes nothing; two in a row on opposite sides are, as if they lay on the gate.
    - A time more than `GATE` standard deviations off is ignored once. If the next is off on the same
      side too, it is believed: alpha and beta are multiplied so that they meet it exactly. While no
      two measurements have agreed yet, a disagreement is believed at once (a slow first step).
    - Changes too small for the gate under heavy noise raise Page's cumulative sum (1954), which widens
      the variance of the speed.
    - A coefficient below 0 is set to 0 and the other one such that the time at the present ``b`` stays.

    The numbers above come from closed-loop simulations (4 ranks, fixed cost 0-50 %, noise 0-30 %, lag 0-8)
    and sit on a plateau: halving or doubling one of them hardly changes the mean step time.
    """

    unit_s: float = 1.0  # alpha, beta and their covariance are in multiples of this time
    alpha: float = 0.0
    beta: float = 0.0
    var_aa: float = 0.0
    var_ab: float = 0.0
    var_bb: float = 0.0
    noise_sq: float = 0.0
    agreed: int = 0  # measurements within the gate since the start
    outlier_side: int = 0  # of the last measurement: -1 faster, 0 no outlier, 1 slower
    cusum_slow: float = 0.0
    cusum_fast: float = 0.0

    def __init__(self) -> None:
        self._cost: AffineCost | None = None  # of what is known now, once it has been asked for
        super().__init__()

    def update(self, samples: float, compute_s: float) -> None:
        b, measured_s = self.checked(samples, compute_s)
        self._cost = None
        self.updates += 1
        if self.updates == 1:
            self._start(b, measured_s)
        else:
            self._follow(b, measured_s)

    def _remember(self, memory: Memory) -> None:
        super()._remember(memory)
        self._cost = None

    def _start(self, b: float, measured_s: float) -> None:
        self.unit_s = measured_s
        self.noise_sq = _NOISE * _NOISE
        self.alpha, self.beta = FIXED_SHARE, (1.0 - FIXED_SHARE) / b
        self._add_variance(b, self.noise_sq, FIXED_SHARE_STD * FIXED_SHARE_STD)

    def _add_variance(self, b: float, scale_sq: float, split_sq: float) -> None:
        """Adds variance along (alpha, beta) and along (1, -1/b), which leaves the time at b alone."""
        alpha, beta, per_sample = self.alpha, self.beta, 1.0 / b
        self.var_aa += scale_sq * alpha * alpha + split_sq
        self.var_ab += scale_sq * alpha * beta - split_sq * per_sample
        self.var_bb += scale_sq * beta * beta + split_sq * per_sample * per_sample

    def _rescale(self, b: float) -> None:
        """Makes the predicted time of ``b`` samples the unit, so that below alpha + beta * b = 1."""
        scale = self.alpha + self.beta * b
        inverse = 1.0 / scale
        self.unit_s *= scale
        self.alpha *= inverse
        self.beta *= inverse
        inverse *= inverse
        self.var_aa *= inverse
        self.var_ab *= inverse
        self.var_bb *= inverse

    def _follow(self, b: float, measured_s: float) -> None:
        self._rescale(b)
        capped = self.var_aa >= FIXED_SHARE_STD * FIXED_SHARE_STD
        split_sq = 0.0 if capped else _SPLIT_DRIFT * _SPLIT_DRIFT
        self._add_variance(b, _DRIFT * _DRIFT, split_sq)
        cov_a = self.var_aa + self.var_ab * b
        cov_b = self.var_ab + self.var_bb * b
        model_sq = max(cov_a + cov_b * b, 0.0)
        ratio = min(max(measured_s / self.unit_s, 1e-300), 1e300)
        # 2 sinh(log(ratio) / 2): like the logarithm, k times faster is as conspicuous as k times slower, but
        # rounded alike by every C library, so that all ranks come to the same decision.
        z = (ratio - 1.0) / math.sqrt(ratio * (model_sq + self.noise_sq))
        if abs(z) > GATE:
            if self._believed(z):
                self.unit_s = measured_s  # alpha and beta together, so that they meet it exactly
                self._add_variance(b, self.noise_sq, 0.0)
            return
        self.agreed += 1
        self.outlier_side = 0
        if self._shifted(z):
            # Gain of one half now, then 1/3, 1/4, ...: the average since the alarm.
            self._add_variance(b, self.noise_sq, 0.0)
            cov_a += self.noise_sq * self.alpha
            cov_b += self.noise_sq * self.beta
            model_sq += self.noise_sq
        self._correct(b, ratio - 1.0, cov_a, cov_b, model_sq)

    def _correct(self, b: float, error: float, cov_a: float, cov_b: float, model_sq: float) -> None:
        """The Kalman update with gain (cov_a, cov_b) / (model_sq + noise_sq), then the constraint >= 0."""
        total_sq = model_sq + self.noise_sq
        gain_a, gain_b = cov_a / total_sq, cov_b / total_sq
        alpha, beta = self.alpha + gain_a * error, self.beta + gain_b * error
        if alpha < 0.0:
            alpha, beta = 0.0, beta + alpha / b
        elif beta < 0.0:
            alpha, beta = alpha + beta * b, 0.0
        self.alpha, self.beta = alpha, beta
        self.var_aa = max(self.var_aa - gain_a * cov_a, 0.0)
        self.var_ab -= gain_a * cov_b
        self.var_bb = max(self.var_bb - gain_b * cov_b, 0.0)
        rest = self.noise_sq / total_sq
        self._learn_noise(rest * (rest * error * error + model_sq))

    def _learn_noise(self, noise_sq: float) -> None:
        weight = max(_NOISE_WEIGHT, 1.0 / (self.agreed + 3))
        learned = self.noise_sq + weight * (noise_sq - self.noise_sq)
        self.noise_sq = max(learned, _NOISE_FLOOR * _NOISE_FLOOR)

    def _shifted(self, z: float) -> bool:
        """Page's two-sided test on the normalised errors; starts again after an alarm."""
        self.cusum_slow = max(0.0, self.cusum_slow + z - _CUSUM_SLACK)
        self.cusum_fast = max(0.0, self.cusum_fast - z - _CUSUM_SLACK)
        if self.cusum_slow < _CUSUM_LIMIT and self.cusum_fast < _CUSUM_LIMIT:
            return False
        self.cusum_slow = self.cusum_fast = 0.0
        return True

    def _believed(self, z: float) -> bool:
        """Whether an outlier is a new speed: the second in a row on its side, or nothing has agreed yet."""
        side = 1 if z > 0.0 else -1
        if self.agreed and side != self.outlier_side:
            if self.outlier_side:
                # Two in a row on opposite sides: noise rather than a hiccup. Counted as if on the gate.
                self._learn_noise(GATE * GATE * self.noise_sq)
            self.outlier_side = side
            return False
        self.cusum_slow = self.cusum_fast = 0.0
        self.outlier_side = 0
        return True

    def cost(self) -> AffineCost:
        if self._cost is None:
            self.check_ready()
            self._cost = AffineCost(fixed_s=self.alpha * self.unit_s, per_sample_s=self.beta * self.unit_s)
        return self._cost

    def std_s(self, samples: float) -> float:
        self.check_ready()
        variance = self.var_aa + samples * (2.0 * self.var_ab + samples * self.var_bb)
        return self.unit_s * math.sqrt(max(variance, 0.0))
