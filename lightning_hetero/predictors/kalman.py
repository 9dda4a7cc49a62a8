"""An adaptive Kalman filter on (fixed cost, cost per sample) of one rank (layer P).

The Kalman filter, corrected by a small neural network on past times and on the host's load.

LB-BSP (Chen et al., SoCC'20) predicts a worker's speed in a cluster that others use, too, by a NARX network: nonlinear
autoregression with exogenous inputs, which are the processor time and the memory that others leave free. Orders, sizes
and training are not public; those here are ours, compared in ``benchmarks/balanced``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import ClassVar

from lightning_hetero.checked import whole
from lightning_hetero.predictors.base import NONE_YET, Memory, Predictor, remembering
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


_TIMES, _LOADS, _HIDDEN = 2, 2, 4  # past times and loads among the inputs, the newest load included; hidden units
_FORGET = 0.002  # part of what was learned that each record makes forgotten
_PRIOR = 10.0  # variance of the first weights, in those of a record
_LEVEL_WEIGHT = 0.01  # of the newest time in the level
_SEED = 20_200_119  # of the hidden units: the same on all ranks
_SPAN = 2.0  # their weights lie in [-2, 2]
_ERROR_WEIGHT = 1.0 / 32.0  # of the newest error in the running ones
_MOST = 0.95  # slowness that may be forecast: 39 times as slow as the level, or as fast
_LEAST_FREE = 1e-3  # less free time or memory than this makes no difference
_LEAST, _GREATEST = 1e-9, 1e9  # of ratios of times


def _hidden_units(number: int, size: int) -> tuple[tuple[float, ...], ...]:
    """Weights that look random, by Knuth's linear congruential generator MMIX."""
    state = _SEED
    weights: list[float] = []
    for _ in range(number * size):
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        weights.append(_SPAN * (state // 2**11 / 2**52 - 1.0))
    return tuple(tuple(weights[start : start + size]) for start in range(0, len(weights), size))


_UNITS = _hidden_units(_HIDDEN, 2 + _TIMES + 2 * _LOADS)


@remembering
class Narx(Kalman):
    """The Kalman filter, corrected by a network that has seen what the time does when the load changes.

    A filter on times alone follows a change only after it was measured, and twice if it looks like a hiccup. The load
    shows whether somebody else has come, or gone. ``T(b) = factor (alpha + beta b)``: alpha and beta are the filter's,
    the factor is the network's::

        slowness  s(r) = (r - 1) / (r + 1)     of a ratio of times: -1 < s < 1, s(1 / r) = -s(r)
        target    y = s(T / (level (alpha + beta b))),   level: long-run mean of T / (alpha + beta b)
        inputs    x = 1; the filter's own forecast f = s(1 / level); the last `_TIMES` targets, each less f; the last
                  `_LOADS` loads as s(1 / free_cpu), s(1 / free_mem), the newest told included; 0 where unknown (NaN)
        hidden    h_j = a_j / (1 + |a_j|),   a_j = v_j . x,   v_j fixed, from our own generator
        forecast  y = f + w . (x, h);   the factor is level (1 + y) / (1 - y)
        learning  w by recursive least squares which forgets: first w = 0, that is the filter, give or take `_PRIOR`

    Times count relative to the filter's model, so that neither their unit nor the changing share matters. Of both,
    filter and network, the mean error of forecasts one step ahead is kept. The factor is 1 (the filter's word stands)
    for the first ``warm`` records, whenever the network's error is not smaller by ``margin``, and where the network
    differs by less than ``zone``, since that is mostly noise. Without any load this is an autoregression on times.

    Sums are `math.fsum`, rounded equally everywhere; else there is only + - * /, so all ranks come to the same numbers.

    Args:
        zone: relative difference to the filter's time from which the network counts, in [0, 1].
        warm: records to learn from before the network counts, >= 1.
        margin: the network's error must be smaller than the filter's by this part, in [0, 1).

    Raises:
        ValueError: a setting is out of range.
    """

    factor: float = 1.0
    level: float = 1.0
    forecast: float = 0.0  # of the next target
    learned: int = 0  # records
    network_error: float = 0.0  # running means of |s(time / forecast)|
    filter_error: float = 0.0
    load: list[float] = NONE_YET  # newest, as inputs; empty: not told since the last record
    past_times: list[float] = NONE_YET  # targets, newest first
    past_loads: list[float] = NONE_YET  # two inputs each, newest first
    inputs: list[float] = NONE_YET  # x and h of the forecast; empty: there is none
    weights: list[float] = NONE_YET
    spread: list[float] = NONE_YET  # covariance of the weights, row by row, in variances of a record
    WANTS_LOAD: ClassVar[bool] = True

    def __init__(self, *, zone: float = 0.1, warm: int = 32, margin: float = 0.05) -> None:
        whole("Narx.warm", warm, least=1)
        for name, value in (("zone", zone), ("margin", margin)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"Narx({name}={value!r}) must lie in [0, 1)")
        super().__init__()
        self.zone, self.warm, self.margin = zone, warm, margin

    # ---- one record ---------------------------------------------------------------------------------------------

    def told(self, *, free_cpu: float, free_mem: float) -> None:
        self.load = [
            _slowness(1.0 / min(max(float(free), _LEAST_FREE), 1.0)) if free == free else 0.0
            for free in (free_cpu, free_mem)
        ]

    def update(self, samples: float, compute_s: float) -> None:
        b, measured_s = self.checked(samples, compute_s)
        if self.inputs:
            self._learn(b, measured_s)
        before_s = super().cost().seconds(b) if self.ready else 0.0
        super().update(samples, compute_s)
        after_s = super().cost().seconds(b)
        if before_s > 0.0:  # the filter has moved, the level stays where it was
            self.level = _ratio(self.level * _ratio(before_s, after_s), 1.0)
        self.factor, self.inputs = 1.0, []
        self._foresee(_ratio(measured_s, after_s))

    def _learn(self, b: float, measured_s: float) -> None:
        """Compares the forecasts with what came, and corrects the weights."""
        filter_s = super().cost().seconds(b)
        network_s = filter_s * (self.level * _times(self.forecast))
        weight = max(_ERROR_WEIGHT, 1.0 / (self.learned + 1))
        self.network_error += weight * (abs(_slowness(_ratio(measured_s, network_s))) - self.network_error)
        self.filter_error += weight * (abs(_slowness(_ratio(measured_s, filter_s))) - self.filter_error)
        self.learned += 1
        own = _slowness(_ratio(1.0, self.level))
        self._correct_weights(_slowness(_ratio(measured_s, filter_s * self.level)) - own)

    def _correct_weights(self, target: float) -> None:
        """Recursive least squares; nothing is forgotten while that would make the weights less sure than at first."""
        z, n = self.inputs, len(self.inputs)
        rows = [self.spread[start : start + n] for start in range(0, n * n, n)]
        towards = [_dot(row, z) for row in rows]
        keep = 1.0 - _FORGET
        step = 1.0 / (keep + max(_dot(z, towards), 0.0))
        move = step * (target - _dot(self.weights, z))
        self.weights = [w + move * v for w, v in zip(self.weights, towards, strict=True)]
        grow = 1.0 / keep if math.fsum(self.spread[:: n + 1]) < _PRIOR * n else 1.0
        pairs = [(p, v * u) for row, v in zip(rows, towards, strict=True) for p, u in zip(row, towards, strict=True)]
        self.spread = [(p - step * both) * grow for p, both in pairs]

    def _foresee(self, slow: float) -> None:
        """Takes in a time, ``slow`` times the filter's, and makes the forecast of the next one."""
        weight = max(_LEVEL_WEIGHT, 1.0 / self.updates)
        self.level = _ratio(self.level * _times(weight * _slowness(_ratio(slow, self.level))), 1.0)
        self.past_times = [_slowness(_ratio(slow, self.level)), *self.past_times][: _TIMES]
        self.past_loads = [*(self.load or (0.0, 0.0)), *self.past_loads][: 2 * _LOADS]
        self.load = []
        if len(self.past_times) < _TIMES or len(self.past_loads) < 2 * _LOADS:
            return
        own = _slowness(_ratio(1.0, self.level))
        x = [1.0, own, *(time - own for time in self.past_times), *self.past_loads]
        units = [_dot(unit, x) for unit in _UNITS]
        self.inputs = x + [a / (1.0 + abs(a)) for a in units]
        if not self.weights:
            n = len(self.inputs)
            self.weights = [0.0] * n
            self.spread = [0.0 if i % (n + 1) else _PRIOR for i in range(n * n)]
        self.forecast = min(max(own + _dot(self.weights, self.inputs), -_MOST), _MOST)
        factor = self.level * _times(self.forecast)
        if abs(factor - 1.0) < self.zone:
            self.forecast, factor = own, 1.0
        if self.learned >= self.warm and self.network_error < (1.0 - self.margin) * self.filter_error:
            self.factor = factor

    # ---- what others ask ----------------------------------------------------------------------------------------

    def cost(self) -> AffineCost:
        return super().cost().times(self.factor)

    def std_s(self, samples: float) -> float:
        return super().std_s(samples) * self.factor


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(map(mul, left, right))


def _slowness(ratio: float) -> float:
    return (ratio - 1.0) / (ratio + 1.0)


def _times(slowness: float) -> float:
    """Returns the ratio of which that is the slowness."""
    return (1.0 + slowness) / (1.0 - slowness)


def _ratio(measured: float, expected: float) -> float:
    """Returns measured / expected within bounds, whatever comes."""
    return min(max(measured / max(expected, 1e-300), _LEAST), _GREATEST)
