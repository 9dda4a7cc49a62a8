"""A pipeline with its layers dealt out, and its time by the number of samples it gets.

With devices and borders fixed, all times are affine in the size of a micro-batch, of layers and of links. So one set
of lines answers for every size. With u the size of full micro-batches, n samples make m = ceil(n / u) of them, all full
but the last one of r, and

    T(n; u) = fill(u) + (m - 2) period(u) + period(r),     T(n; u) = fill(n) for n <= u,     T(n) = min over u.

T never decreases in n: taking away the last sample leaves as many micro-batches or one less, none of them longer. Both
matter to `shares`. ``period(r)`` is the bottleneck at size r, stretched as much as memory stretches that of full ones
(see `chain`: where memory is short, fewer are in flight and the period is longer than the bottleneck).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats, fixed_and_per_sample
from lightning_hetero.solvers.chain.model import ROOM_SNAP, Times, depths, fitting_periods, room, stage_bytes, times
from lightning_hetero.solvers.placement.arrays import Pipe, ProblemArrays


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
        work_s = problem.work_s[:, cuts]
        stages = (work_s[:, 1:] - work_s[:, :-1]) / problem.speeds[ranks]
        stages[:, 0] += problem.outside_s / problem.speeds[ranks[0]]
        trips, lines = np.zeros_like(stages), stages
        if len(ranks) > 1:
            size, after = problem.one.cut_sizes[cuts[1:]], np.array([*pipe.ranks[1:], pipe.ranks[0]])
            ahead = np.array([problem.latency_s[ranks, after], size * problem.per_byte_s[ranks, after]])
            back = np.array([problem.latency_s[after, ranks], size * problem.per_byte_s[after, ranks]])
            trips = ahead + back
            if len(ranks) == 2:  # the loop has no wire of its own
                ahead, back = ahead + back[:, ::-1], np.zeros_like(back)
            lines = np.concatenate([stages, ahead, back], axis=1)
        fill = (stages + trips).sum(axis=1)
        self._fill: tuple[float, float] = (float(fill[0]), float(fill[1]))
        self._longest = _longest(lines, float(problem.sizes[-1]))
        self._stretches: dict[tuple[int, int], float] = {}
        self._settled: dict[int, int] = {}  # by size: from so many micro-batches on, more are not in flight
        capped = np.isfinite(problem.caps[ranks]).any()
        fitting = self._fitting(stages, trips) if capped else [(size, 1.0) for size in problem.sizes]
        self.modes = [
            Mode(size, alone, self._fill[0] + self._fill[1] * size, self.bottleneck(size), stretch)
            for size, (alone, stretch) in zip(problem.sizes, fitting, strict=True)
        ]
        self._alone = max(mode.alone for mode in self.modes)
        self._rates = self._steady()
        self.most = self._most()
        self.first_s = self.seconds(1)

    def _fitting(self, stages: Floats, trips: Floats) -> list[tuple[int, float]]:
        """Returns `Mode.alone` and `Mode.stretch` by size.

        Args:
            stages, trips: [2, S] fixed times and times per sample.
        """
        problem, ranks = self._problem, self._pipe.ranks
        sizes, caps = np.array(problem.sizes)[:, None], problem.caps[list(ranks)]
        chain = problem.chain(ranks, 1, problem.samples)
        state, per_sample = (part[0] for part in stage_bytes(chain, np.array([self._pipe.cuts])))
        head = np.zeros(len(ranks))
        head[0] = problem.model.head.activation_bytes  # kept for one micro-batch at a time
        state = state - head
        alone = int(min(max(0.0, float(room(state, per_sample + head, caps).min())), problem.sizes[-1]))
        all_trips = trips[0] + trips[1] * sizes
        rests_s = np.cumsum((stages[0] + stages[1] * sizes + all_trips)[:, ::-1], axis=1)[:, ::-1]
        head_s = fixed_and_per_sample(problem.model.head)
        rests_s[:, 1:] += (head_s[0] + head_s[1] * sizes) / problem.speeds[ranks[0]]  # the leader's is in its stage
        period_s = np.array([self.bottleneck(size) for size in problem.sizes])
        split = Times(period_s, rests_s[:, 0], all_trips, rests_s)
        counts = -(-problem.samples // sizes)  # micro-batches that there can be
        held = np.minimum(depths(chain, split, period_s), counts)
        least = np.minimum(depths(chain, split, rests_s[:, 0]), np.minimum(counts, 2))
        limits = caps / ROOM_SNAP - state - sizes * head
        easy = np.all(held * sizes * per_sample <= limits, axis=1)
        possible = np.all(least * sizes * per_sample <= limits, axis=1)
        stretch = np.where(easy, 1.0, np.where(possible, np.nan, np.inf))
        return [(min(size, alone), one) for size, one in zip(problem.sizes, stretch.tolist(), strict=True)]

    def bottleneck(self, size: float) -> float:
        """Returns the longest stage or link for micro-batches of ``size`` samples [s]."""
        return max([a + b * size for a, b in self._longest])

    def stretch(self, size: int, micro_batches: int) -> float:
        """Returns period / bottleneck under the memory caps; ``inf`` if it does not fit."""
        micro_batches = min(micro_batches, self._settled.get(size, micro_batches))
        key = (size, micro_batches)
        if key not in self._stretches:
            chain, cuts = self._problem.chain(self._pipe.ranks, size, micro_batches), np.array([self._pipe.cuts])
            split = times(chain, cuts)
            period_s = fitting_periods(chain, cuts, split)
            least_s = float(split.bottleneck_s[0])
            self._stretches[key] = float(period_s[0]) / least_s if least_s > 0.0 else 1.0
            if period_s[0] < math.inf and (held := int(depths(chain, split, period_s).max())) < micro_batches:
                self._settled[size] = held + 1
        return self._stretches[key]

    def _most(self) -> int:
        most = self._problem.samples
        if any([mode.stretch == 1.0 or mode.alone >= most for mode in self.modes]):
            return most
        # T never decreases, so what fits is an interval.
        return bisect_left(range(1, most + 1), True, key=lambda n: self.seconds(n) == math.inf)

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
        fixed_s, per_sample_s = self._fill
        most = 0.0
        if deadline_s >= fixed_s:
            most = self._alone
            if (deadline_s - fixed_s) < per_sample_s * most:
                most = (deadline_s - fixed_s) / per_sample_s
        for rate, at_zero in self._rates:
            most = max(most, rate * deadline_s + at_zero)
        return min(most, self.most)

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


def _longest(lines: Floats, most: float) -> list[tuple[float, float]]:
    """Returns those of the lines (a, b) that are the highest somewhere for sizes of 1 to ``most``."""
    heights: list[tuple[float, float, int]] = [(float(b), float(a), 0) for a, b in zip(*lines, strict=True)]
    kept = [(a, b) for b, a, _ in _highest(heights)]
    while len(kept) > 1 and sum(kept[1]) >= sum(kept[0]):
        del kept[0]
    while len(kept) > 1 and kept[-2][0] + kept[-2][1] * most >= kept[-1][0] + kept[-1][1] * most:
        del kept[-1]
    return kept
