"""A line above a floor, learned from the few sizes that a rank has computed on (layer P)."""

from __future__ import annotations

import math

from lightning_hetero.predictors.base import NONE_YET, Memory, remembering
from lightning_hetero.predictors.kalman import FIXED_SHARE, FIXED_SHARE_STD, GATE, Kalman
from lightning_hetero.solvers.fit import relative_line
from lightning_hetero.types import AffineCost, LearnedCost, SaturatingCost

_SAME = 0.1  # sizes that differ by less than this part are one
_MOST = 8  # sizes remembered
_FORGETS = 0.01  # a size's time, not measured again, becomes less certain by this per measurement (random walk) ...
_EXACT_SQ = 0.01**2  # ... and never counts as more certain than this
_FLOOR_COSTS = 4.0  # a floor must explain the times better by this much, in squared standard deviations


@remembering
class Curve(Kalman):
    """``T(b) = speed * max(floor, fixed + per_sample b)``: a GPU that small batches do not fill (LB-BSP, GPU clusters).

    The paper's "pairwise-linear" time without its memory. How it is learned is ours: a balanced rank sees few sizes,
    and stays at each of them for long.

    - A change of time *at the same size* is a change of speed: the Kalman filter's, with its gate for outliers, its
      test for jumps and its noise. It scales both floor and line.
    - A deviation *on arrival at another size* is the curve's: it corrects what is remembered of that size, relative to
      the speed, unless the time before was off on the same side. If the next measurement there disagrees, the first
      was a hiccup and is forgotten.
    - Of the last sizes (8) the relative time is remembered, less and less certain while not measured again, and
      forgotten when two measurements elsewhere contradict it: time grows with samples, and no faster than they do.
    - Floor and line are fitted to those: least squares of relative errors, the smaller sizes perhaps on the floor. A
      floor must explain the times better than a mere line, unless the line's fixed share were far above
      `FIXED_SHARE`. So equal times at all sizes are a floor that ends at the largest size seen, and a rank gets more
      gradually: no device is believed to be unsaturated where it was never measured.

    It is for steady devices. Under heavy noise (30 %) the Kalman filter alone decides better.
    """

    sizes: list[float] = NONE_YET  # remembered, in samples
    ratios: list[float] = NONE_YET  # of their times to the speed
    vars: list[float] = NONE_YET  # of these, relative
    agreed_at: list[float] = NONE_YET  # measurements that agreed
    last: int = 0  # index of the size that was measured last

    def _remember(self, memory: Memory) -> None:
        super()._remember(memory)
        self._fitted: tuple[float, float, float] | None = None  # floor, fixed and per sample, relative to the speed

    # ---- one measurement --------------------------------------------------------------------------------------

    def update(self, samples: float, compute_s: float) -> None:
        b, measured_s = self.checked(samples, compute_s)
        if not self.updates:
            self._open(b, measured_s)
        else:
            self._take(b, measured_s)
        self._fitted = None

    def _open(self, b: float, measured_s: float) -> None:
        super().update(1, measured_s)
        self.last = self._add(b, measured_s / self._speed_s, self.noise_sq)

    def _take(self, b: float, measured_s: float) -> None:
        walk = _FORGETS * _FORGETS
        self.vars = [min(var + walk, FIXED_SHARE_STD * FIXED_SHARE_STD) for var in self.vars]
        at = self._index(b)
        if new := at is None:
            at = self._add(b, max(self._ratio(b), 1e-300), FIXED_SHARE_STD * FIXED_SHARE_STD)
        size = self.sizes[at]
        here = 1.0 if b == size else self._ratio(b) / self._ratio(size)  # of times at b and at what is remembered
        ratio = measured_s / (self._speed_s * here)
        change = min(max(ratio / self.ratios[at], 1e-300), 1e300)
        total_sq = self.vars[at] + self.noise_sq
        gain = self.vars[at] / total_sq
        agrees = abs(change - 1.0) <= GATE * math.sqrt(change * total_sq)
        stays = self.updates == 1 or (at == self.last and self.agreed_at[at])
        pending = self.outlier_side * (change - 1.0) > 0.0  # the time before was off on this side, too
        if stays or (pending and not agrees):
            super().update(1, measured_s / (self.ratios[at] * here))
        elif new or not agrees:
            self.updates += 1
            self.ratios[at], self.vars[at], self.agreed_at[at] = ratio, self.noise_sq, 0.0
        else:
            self.ratios[at] *= 1.0 + gain * (change - 1.0)
            if gain < 0.5:  # noise or speed, rather than the curve
                super().update(1, measured_s / (self.ratios[at] * here))
            else:
                self.updates += 1
        self.last = at
        if agrees and not new:
            self.vars[at] *= 1.0 - gain
            self.agreed_at[at] += 1.0
            if self.agreed_at[at] == 1.0:
                self._forget_contradicting(at)

    def _forget_contradicting(self, at: int) -> None:
        """Forgets sizes whose times do not fit: time grows with samples, and no faster than in proportion."""
        size, ratio = self.sizes[at], self.ratios[at]

        def fits(i: int) -> bool:
            other, its = self.sizes[i], self.ratios[i]
            off = 1.0 + GATE * math.sqrt(self.vars[i] + self.vars[at])
            smaller, larger = (its, ratio) if other < size else (ratio, its)
            in_proportion = smaller * max(size, other) > larger * min(size, other) / off
            return smaller <= larger * off and in_proportion

        kept = [i for i in range(len(self.sizes)) if i == at or fits(i)]
        for memory in (self.sizes, self.ratios, self.vars, self.agreed_at):
            memory[:] = [memory[i] for i in kept]
        self.last = kept.index(at)

    def _unknown(self, b: float) -> float:
        """Returns the variance of the model's time at a size that was never measured."""
        nearest = min(range(len(self.sizes)), key=lambda i: abs(self.sizes[i] - b))
        size = self.sizes[nearest]
        off = FIXED_SHARE_STD * abs(b - size) / max(b, size)
        return self.vars[nearest] + off * off

    @property
    def _speed_s(self) -> float:
        return max(self.unit_s * (self.alpha + self.beta), 1e-300)

    def _index(self, b: float) -> int | None:
        """Returns which of the remembered sizes this is; None: another one."""
        near = [i for i, size in enumerate(self.sizes) if _alike(size, b)]
        return min(near, key=lambda i: abs(self.sizes[i] - b)) if near else None

    def _add(self, b: float, ratio: float, var: float) -> int:
        """Remembers another size, instead of the least certain one if there are too many; returns its index."""
        if len(self.sizes) == _MOST:
            worst = max((i for i in range(_MOST) if i != self.last), key=self.vars.__getitem__)
            for memory in (self.sizes, self.ratios, self.vars, self.agreed_at):
                del memory[worst]
        self.sizes.append(b)
        self.ratios.append(ratio)
        self.vars.append(var)
        self.agreed_at.append(0.0)
        return len(self.sizes) - 1

    # ---- the curve --------------------------------------------------------------------------------------------

    def _ratio(self, b: float) -> float:
        floor, fixed, per_sample = self._fit()
        return max(floor, fixed + per_sample * b)

    def _fit(self) -> tuple[float, float, float]:
        if self._fitted is None:
            weights = [1.0 / (_EXACT_SQ + var) for var in self.vars]
            points = sorted(zip(self.sizes, self.ratios, weights, strict=True))
            self._fitted = _fit(points, FIXED_SHARE, FIXED_SHARE_STD)
        return self._fitted

    def cost(self) -> LearnedCost:
        self.check_ready()
        floor, fixed, per_sample = self._fit()
        speed_s = self._speed_s
        fixed_s, per_sample_s = fixed * speed_s, per_sample * speed_s
        if floor <= fixed:
            return AffineCost(fixed_s=fixed_s, per_sample_s=per_sample_s)
        return SaturatingCost(floor_s=floor * speed_s, fixed_s=fixed_s, per_sample_s=per_sample_s)

    def std_s(self, samples: float) -> float:
        self.check_ready()
        at = self._index(samples)
        shape_sq = self._unknown(samples) if at is None else self.vars[at]
        speed = super().std_s(1) / self._speed_s
        return self.predict(samples) * math.sqrt(speed * speed + shape_sq)


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(a, b)


def _fit(points: list[tuple[float, float, float]], share: float, share_std: float) -> tuple[float, float, float]:
    """Fits ``max(floor, fixed + per_sample b)``.

    Args:
        points: size, time and weight (inverse variance, relative), by size.
        share, share_std: part of ``fixed`` in the line's time at the largest size, as it is assumed.

    Returns:
        Floor, 0 without a floor; fixed; per sample.
    """
    largest, level, _ = points[-1]
    best_loss, best = math.inf, (0.0, 0.0, 0.0)
    prior = 1.0 / (share_std * share_std)
    for on_floor in range(len(points)):
        fixed, slope = _line(points[on_floor:], share, prior)
        flat = points[:on_floor]
        floor = sum(w * t for _, t, w in flat) / sum(w for _, _, w in flat) if flat else 0.0
        off = fixed / level - share
        loss = prior * off * off + (_FLOOR_COSTS if flat else 0.0)
        for b, t, w in points:
            error = max(floor, fixed + slope * (b / largest)) / t - 1.0
            loss += w * error * error
        if loss < best_loss:
            best_loss, best = loss, (floor, fixed, slope / largest)
    return best


def _line(points: list[tuple[float, float, float]], share: float, prior: float) -> tuple[float, float]:
    """Returns the fixed part and the rest of the time at the largest size, both >= 0, by least squares."""
    largest, level, _ = points[-1]
    assumed = (0.0, share, prior * share * share)  # like one more measurement
    fixed, slope = relative_line([assumed, *((b / largest, t / level, w) for b, t, w in points)])
    return level * fixed, level * slope
