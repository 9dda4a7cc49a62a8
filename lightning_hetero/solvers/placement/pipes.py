"""What is to be planned, in arrays, with what was asked of it; and a pipeline's time by the number of samples it gets.

With devices and borders fixed, all times are affine in the size of a micro-batch, of layers and of links. So one set
of lines answers for every size. With u the size of full micro-batches, n samples make m = ceil(n / u) of them, all full
but the last one of r, and

    T(n; u) = fill(u) + (m - 2) period(u) + period(r),     T(n; u) = fill(n) for n <= u,     T(n) = min over u.

T never decreases in n: taking away the last sample leaves as many micro-batches or one less, none of them longer. Both
matter to `share`. ``period(r)`` is the bottleneck at size r, stretched as much as memory stretches that of full ones
(see `chain`: where memory is short, fewer are in flight and the period is longer than the bottleneck).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_hetero.solvers.chain import chain as chains
from lightning_hetero.solvers.chain.chain import DepthRule, Floats, Layers, fixed_and_per_sample, layers_of
from lightning_hetero.solvers.chain.model import ROOM_SNAP, Times, depths, fitting_periods, room, stage_bytes, times
from lightning_hetero.solvers.chain.split import split
from lightning_hetero.solvers.minimax import deal, fractional_s
from lightning_hetero.solvers.tied_layers import joined
from lightning_hetero.types import Cluster, Link, ModelCost


class Pipe(NamedTuple):
    """Ranks in the order of stages, the leader first; stage s holds the layers [cuts[s], cuts[s + 1])."""

    ranks: tuple[int, ...]
    cuts: tuple[int, ...]


class Problem:
    """What is to be planned, in arrays, and the splits and costs that were asked for.

    Pipelines whose devices and links are equal position by position share both.

    Args:
        model, cluster: costs.
        samples: global batch.
        sizes: of full micro-batches that may be chosen, increasing.
        depth: as in `DeviceChain`.

    Attributes:
        outside: what the leader computes and holds besides layers, before and behind the backbone, as one layer.
        outside_s: [2] its fixed time and time per sample [s].
        one: the backbone for micro-batches of one sample.
        work_s: [2, L + 1] fixed time and time per sample of the layers in front of i [s].
        speeds: [D] by device.
        caps: [D] memory by device [bytes].
        capped: whether a device has a memory cap.
    """

    def __init__(
        self, model: ModelCost, cluster: Cluster, samples: int, sizes: tuple[int, ...], *,
        depth: DepthRule = "per_link",
    ) -> None:  # fmt: skip
        self.model, self.cluster, self.samples, self.sizes = model, cluster, samples, sizes
        self.depth: DepthRule = depth
        self.n_layers, self.n_devices = len(model.layers), len(cluster.devices)
        self.outside, self.one = joined([model.before, model.head]), layers_of(model, 1)
        self.outside_s: Floats = np.array(fixed_and_per_sample(self.outside))
        self.work_s: Floats = np.zeros((2, self.n_layers + 1))
        for layer, cost in enumerate(model.layers):
            self.work_s[:, layer + 1] = self.work_s[:, layer] + fixed_and_per_sample(cost)
        self.speeds: Floats = np.array([d.speed for d in cluster.devices], dtype=np.float64)
        self.caps: Floats = np.array([d.mem_bytes for d in cluster.devices], dtype=np.float64)
        self.capped = bool(np.isfinite(self.caps).any())
        self._layers: dict[int, Layers] = {}

    @cached_property
    def latency_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return self._by_link(lambda link: link.latency_s)

    @cached_property
    def per_byte_s(self) -> Floats:
        """[D, D] of links, by source and target [s]."""
        return 1.0 / self._by_link(lambda link: link.bandwidth_bytes_per_s)

    @cached_property
    def per_byte_rows(self) -> list[list[float]]:
        """``per_byte_s``, to be asked for one number at a time."""
        return self.per_byte_s.tolist()

    @cached_property
    def param_bytes(self) -> Floats:
        """[L + 1] of the layers in front of i."""
        return np.concatenate([[0.0], np.cumsum([cost.param_bytes for cost in self.model.layers])])

    def _by_link(self, number: Callable[[Link], float]) -> Floats:
        return np.array([[number(link) for link in row] for row in self.cluster.links], dtype=np.float64)

    def chain(self, ranks: tuple[int, ...], size: int, micro_batches: int) -> chains.DeviceChain:
        """Returns the pipeline of ``ranks`` in this order for micro-batches of ``size`` samples."""
        if size not in self._layers:
            self._layers[size] = layers_of(self.model, size)
        return chains.chain_of(self._layers[size], self.cluster, ranks, micro_batches=micro_batches, depth=self.depth)

    def part(self, ranks: Sequence[int]) -> int:
        """Returns how many samples these devices get in proportion to speed, one at least."""
        return max(1, round(self.samples * float(self.speeds[list(ranks)].sum()) / float(self.speeds.sum())))

    # ---- splits and costs ----

    @cached_property
    def _alike(self) -> dict[tuple[int, ...], bytes]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[bytes, tuple[int, ...]], PipeCost]:
        return {}

    @cached_property
    def _splits(self) -> dict[tuple[bytes, int, int], tuple[int, ...]]:
        return {}

    def _key(self, ranks: tuple[int, ...]) -> bytes:
        if ranks not in self._alike:
            r, after = np.array(ranks), np.array([*ranks[1:], ranks[0]])
            rows = [self.speeds[r], self.caps[r]]
            if len(ranks) > 1:
                rows += [x[a, b] for x in (self.latency_s, self.per_byte_s) for a, b in ((r, after), (after, r))]
            self._alike[ranks] = np.array(rows).tobytes()
        return self._alike[ranks]

    def split(self, ranks: tuple[int, ...], size: int, samples: int) -> Pipe | None:
        """Returns the best pipeline of ``ranks`` in this order for ``samples`` in micro-batches of ``size``."""
        size = min(size, samples)
        micro_batches = -(-samples // size)
        key = (self._key(ranks), size, micro_batches)
        if key not in self._splits:
            self._splits[key] = split(self.chain(ranks, size, micro_batches)).cuts
        return Pipe(ranks, self._splits[key]) if self._splits[key] else None

    def cost(self, pipe: Pipe) -> PipeCost:
        """Returns the time of ``pipe`` by its samples; equal pipelines share it."""
        key = (self._key(pipe.ranks), pipe.cuts)
        if key not in self._known:
            self._known[key] = PipeCost(self, pipe)
        return self._known[key]


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

    def __init__(self, problem: Problem, pipe: Pipe) -> None:
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


def share(costs: Sequence[PipeCost], samples: int) -> tuple[list[int], float]:
    """Returns the samples of each pipeline, one at least, so that the slowest is done early, and when that is [s].

    None and ``inf`` if it cannot be. Exact: of all splits none is faster. It is `minimax`'s greedy, started where the
    pipelines do all samples if fractions of micro-batches count.
    """
    ones, most = [1] * len(costs), [cost.most for cost in costs]
    if not len(costs) <= samples <= sum(most) or min(most) < 1:
        return [], math.inf
    level_s = fractional_s(costs, samples, ones, most, start_s=max([cost.first_s for cost in costs]))
    shares = deal(costs, level_s, samples, ones, most)
    return shares, max([cost.seconds(n) for cost, n in zip(costs, shares, strict=True)])
