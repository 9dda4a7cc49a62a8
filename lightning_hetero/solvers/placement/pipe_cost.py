"""A pipeline with its layers dealt out, and its time by the number of samples it gets.

With devices and borders fixed, all times are affine in the size of a micro-batch: layers and links alike. So one set
of lines answers for every size. With u the size of full micro-batches, n samples make m = ceil(n / u) of them, all full
but the last one of r, and

    T(n; u) = fill(u) + (m - 2) period(u) + period(r),     T(n; u) = fill(n) for n <= u,     T(n) = min over u.

T never decreases in n: taking away the last sample leaves as many micro-batches or one less, none of them longer. Both
matter to `shares`. ``period(r)`` is the bottleneck at size r, stretched as much as memory stretches that of full ones
(see `chain`: where memory is short, fewer are in flight and the period is longer than the bottleneck).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.solvers.chain.layers import Floats, Ints
from lightning_hetero.solvers.chain.model import ROOM_SNAP, Times, depths, fitting_periods, room, times
from lightning_hetero.solvers.placement.arrays import Pipe, ProblemArrays, fixed_and_per_sample

Bools: TypeAlias = NDArray[np.bool_]


class Mode(NamedTuple):
    """A pipeline with full micro-batches of ``size`` samples.

    Attributes:
        size: u.
        alone: most samples that fit as a single micro-batch, at most u.
        fill_s: of a full one.
        bottleneck_s: of full ones.
        stretch: period / bottleneck: 1.0 if memory never matters, ``inf`` if two never fit; nan: ask the pipeline.
    """

    size: int
    alone: int
    fill_s: float
    bottleneck_s: float
    stretch: float


class PipeCost:
    """T(n) of one pipeline: a `Cost`.

    Attributes:
        modes: one per size of micro-batch.
        most: samples that fit; 0 if not a single one does.
        first_s: T(1).
    """

    def __init__(self, problem: ProblemArrays, pipe: Pipe) -> None:
        self._problem, self._pipe = problem, pipe
        cuts, ranks = np.array(pipe.cuts), np.array(pipe.ranks)
        stages = _steps(problem.work_s[:, cuts]) / problem.speeds[ranks]
        stages[:, 0] += problem.leader_s / problem.speeds[ranks[0]]
        trips, lines = np.zeros_like(stages), stages
        if len(ranks) > 1:
            size, after = problem.cut_bytes[cuts[1:]], np.array([*pipe.ranks[1:], pipe.ranks[0]])
            ahead = np.array([problem.latency_s[ranks, after], size * problem.per_byte_s[ranks, after]])
            back = np.array([problem.latency_s[after, ranks], size * problem.per_byte_s[after, ranks]])
            trips = ahead + back
            if problem.overlap:
                if len(ranks) == 2:  # the loop has no wire of its own
                    ahead, back = ahead + back[:, ::-1], np.zeros_like(back)
                lines = np.concatenate([stages, ahead, back], axis=1)
            else:
                lines = stages + trips + np.roll(trips, 1, axis=1)
        fill = (stages + trips).sum(axis=1)
        self._fill: tuple[float, float] = (float(fill[0]), float(fill[1]))
        self._longest = _envelope(lines, float(problem.sizes[-1]))
        self._stretches: dict[tuple[int, int], float] = {}
        self._settled: dict[int, int] = {}  # by size: from so many micro-batches on, more are not in flight
        self.modes = self._modes(stages, trips)
        self._alone = max(mode.alone for mode in self.modes)
        self._rates = self._steady()
        self.most = self._most()
        self.first_s = self.seconds(1)

    def _modes(self, stages: Floats, trips: Floats) -> list[Mode]:
        """Returns all modes; ``stages`` and ``trips`` [2, S] are fixed times and times per sample."""
        problem = self._problem
        fixed_s, per_sample_s = self._fill
        sizes = np.array(problem.sizes)
        alone, easy, possible = sizes, np.ones(len(sizes), dtype=bool), np.ones(len(sizes), dtype=bool)
        if np.isfinite(problem.caps[list(self._pipe.ranks)]).any():
            alone, easy, possible = self._fitting(sizes, stages, trips)
        modes: list[Mode] = []
        for size, one, fits, might in zip(
            problem.sizes, alone.tolist(), easy.tolist(), possible.tolist(), strict=True
        ):
            bottleneck_s = self.bottleneck(size)
            stretch = 1.0 if fits else math.nan if might else math.inf
            modes.append(Mode(size, one, fixed_s + per_sample_s * size, bottleneck_s, stretch))
        return modes

    def _fitting(self, sizes: Ints, stages: Floats, trips: Floats) -> tuple[Ints, Bools, Bools]:
        """Returns by size: the most samples of a single micro-batch; whether memory never matters; whether two fit."""
        problem = self._problem
        cuts, caps = np.array(self._pipe.cuts), problem.caps[list(self._pipe.ranks)]
        state, per_sample = _steps(problem.state_bytes[cuts]), _steps(problem.activation_bytes[cuts])
        state[0] += problem.leader_state_bytes
        head = np.zeros(len(state))  # kept for one micro-batch at a time
        head[0] = problem.model.head.activation_bytes
        per_sample[0] += problem.model.before.activation_bytes
        per_sample[1:] += problem.cut_bytes[cuts[1:-1]]
        space = float(room(state, per_sample + head, caps).min())
        alone = np.minimum(sizes, int(min(max(0.0, space), float(sizes[-1]))))
        column = sizes[:, None]
        all_stages, all_trips = stages[0] + stages[1] * column, trips[0] + trips[1] * column
        rests_s = np.cumsum((all_stages + all_trips)[:, ::-1], axis=1)[:, ::-1]
        rests_s[:, 1:] += self._head_s(sizes)  # on the leader, which counts it in its stage
        period_s = np.array([self.bottleneck(size) for size in problem.sizes])
        chain = problem.chain(self._pipe.ranks, 1, problem.samples)
        split = Times(period_s, rests_s[:, 0], all_trips, rests_s)
        counts = -(-problem.samples // column)  # micro-batches that there can be
        held = np.minimum(depths(chain, split, period_s), counts)
        least = np.minimum(depths(chain, split, rests_s[:, 0]), np.minimum(counts, 2))
        limits = caps / ROOM_SNAP - state - column * head
        easy: Bools = np.all(held * column * per_sample <= limits, axis=1)
        possible: Bools = np.all(least * column * per_sample <= limits, axis=1)
        return alone, easy, possible

    def _head_s(self, sizes: Ints) -> Floats:
        head, speed = self._problem.model.head, float(self._problem.speeds[self._pipe.ranks[0]])
        fixed_s, per_sample_s = fixed_and_per_sample(head)
        head_s: Floats = (fixed_s + per_sample_s * sizes.astype(np.float64)) / speed
        return head_s[:, None]

    def bottleneck(self, size: float) -> float:
        """Returns the longest stage or link for micro-batches of ``size`` samples [s]."""
        return max([a + b * size for a, b in self._longest])

    def stretch(self, size: int, micro_batches: int) -> float:
        """Returns period / bottleneck under the memory caps; ``inf`` if it does not fit."""
        micro_batches = min(micro_batches, self._settled.get(size, micro_batches))
        key = (size, micro_batches)
        found = self._stretches.get(key)
        if found is None:
            chain, cuts = self._problem.chain(self._pipe.ranks, size, micro_batches), np.array([self._pipe.cuts])
            split = times(chain, cuts)
            period_s = fitting_periods(chain, cuts, split)
            found = float(period_s[0] / split.bottleneck_s[0]) if split.bottleneck_s[0] > 0.0 else 1.0
            if period_s[0] < math.inf:
                held = int(depths(chain, split, period_s).max())
                if held < micro_batches:
                    self._settled[size] = held + 1
            else:
                found = math.inf
            self._stretches[key] = found
        return found

    def _most(self) -> int:
        most = self._problem.samples
        if any([mode.stretch == 1.0 or mode.alone >= most for mode in self.modes]):
            return most
        low, high = 0, most + 1  # T never decreases, so what fits is an interval
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) < math.inf else (low, middle)
        return low

    def seconds(self, samples: float) -> float:
        """Returns T(samples) [s], ``inf`` if they do not fit; ``samples`` is a whole number."""
        return self._best(int(samples))[0]

    def size(self, samples: int) -> int:
        """Returns the best size of full micro-batches, at most ``samples``; of equal ones the largest."""
        return min(self._best(samples)[1], samples)

    def _best(self, n: int) -> tuple[float, int]:
        best_s, best = math.inf, self.modes[-1].size
        if n < 1:
            return 0.0, best
        fixed_s, per_sample_s = self._fill
        for size, alone, fill_s, bottleneck_s, stretch in reversed(self.modes):
            if n <= size:
                time_s = fixed_s + per_sample_s * n if n <= alone else math.inf
            else:
                full = (n - 1) // size
                time_s = fill_s + (full - 1) * bottleneck_s
                if time_s >= best_s or stretch == math.inf:
                    continue
                rest_s = self.bottleneck(n - full * size)
                if stretch != 1.0:
                    if time_s + rest_s >= best_s:
                        continue
                    stretch = self.stretch(size, full + 1)
                    time_s, rest_s = fill_s + (full - 1) * bottleneck_s * stretch, rest_s * stretch
                time_s += rest_s
            if time_s < best_s:
                best_s, best = time_s, size
        return best_s, best

    def most_samples(self, deadline_s: float) -> float:
        """Returns how many samples are done by the deadline, fractions of micro-batches counted.

        Never too few, but where memory is short and there are few micro-batches.
        """
        return self.pace(deadline_s)[0]

    def pace(self, deadline_s: float) -> tuple[float, float]:
        """Returns `most_samples`, at most `most`, and how many more are done per second from then on."""
        fixed_s, per_sample_s = self._fill
        most, per_s = 0.0, 0.0
        if deadline_s >= fixed_s:
            most = self._alone
            if (deadline_s - fixed_s) < per_sample_s * most:
                most, per_s = (deadline_s - fixed_s) / per_sample_s, 1.0 / per_sample_s
        for rate, at_zero in self._rates:
            full = rate * deadline_s + at_zero
            if full > most:
                most, per_s = full, rate
        return (most, per_s) if most < self.most else (self.most, 0.0)

    def _steady(self) -> list[tuple[float, float]]:
        """Returns (samples per second, samples at time 0) of full micro-batches; of modes that are ever the best one.

        Before the first micro-batch is through such a line is below the one of a single micro-batch, and does no harm.
        """
        part = self._problem.part(self._pipe.ranks)
        known = {mode.size: mode.stretch for mode in self.modes}
        while True:
            lines: list[tuple[float, float, int]] = []
            for size, _, fill_s, bottleneck_s, _ in self.modes:
                stretch = known[size] if known[size] == known[size] else 1.0  # nan: as good as can be
                if stretch < math.inf:
                    per_s = size / max(bottleneck_s * stretch, 1e-300)
                    lines.append((per_s, size - fill_s * per_s, size))
            kept = _highest(lines)
            guessed = [size for _, _, size in kept if known[size] != known[size]]
            if not guessed:
                return [(per_s, at_zero) for per_s, at_zero, _ in kept]
            for size in guessed:
                known[size] = self.stretch(size, max(2, -(-part // size)))


def _steps(sums: Floats) -> Floats:
    """Returns the differences along the last axis: `np.diff` at half the price."""
    return sums[..., 1:] - sums[..., :-1]


def _highest(lines: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Returns those of lines (slope, height at 0, ...) that are the highest somewhere right of 0."""
    kept: list[tuple[float, float, int]] = []
    for line in sorted(lines):
        while kept and (line[1] >= kept[-1][1] or (len(kept) > 1 and _hidden(kept[-2], kept[-1], line))):
            kept.pop()
        kept.append(line)
    return kept


def _hidden(a: tuple[float, float, int], b: tuple[float, float, int], c: tuple[float, float, int]) -> bool:
    """Returns whether b, of the middle slope, is nowhere above both others."""
    return (a[1] - c[1]) * (b[0] - a[0]) <= (a[1] - b[1]) * (c[0] - a[0])


def _envelope(lines: Floats, most: float) -> list[tuple[float, float]]:
    """Returns those of the lines (a, b) that are the highest somewhere for sizes of 1 to ``most``."""
    a, b = lines
    x, kept = 1.0, list[tuple[float, float]]()
    while True:
        height = a + b * x
        top = np.flatnonzero(height >= height.max() * (1.0 - 1e-15))
        i = int(top[np.argmax(b[top])])
        kept.append((float(a[i]), float(b[i])))
        steeper = np.flatnonzero(b > b[i])
        if not steeper.size:
            return kept
        x = float(((a[i] - a[steeper]) / (b[steeper] - b[i])).min())
        if not x < most:
            return kept
