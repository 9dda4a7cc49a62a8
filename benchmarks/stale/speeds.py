"""Speeds of simulated workers that change with time, and the least time any schedule needs on them (layer P)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


class SimulatedSpeeds:
    """Speeds that are constant between given moments; a chunk under way slows down with its worker.

    Args:
        pieces: per rank ``(from_s, speed)`` pairs, the first from 0, strictly increasing; the last holds for ever.
            Speed 1 does one unit of work per second.
        sample_work: work of one sample [units].
        launch_work: work of starting a chunk [units]: slower on slow workers, unlike ``Costs.launch_s``.

    Raises:
        ValueError: no ranks, times out of order, or a speed that is not positive.

    >>> halved = SimulatedSpeeds([[(0.0, 1.0), (6.0, 0.5)], [(0.0, 1.0)]])
    >>> halved.work_s(0, 0, 0.0, 8), halved.work_s(1, 0, 0.0, 8)
    (10.0, 8.0)
    >>> halved.ideal_s([9])  # 4.5 samples each
    4.5
    """

    def __init__(
        self, pieces: Sequence[Sequence[tuple[float, float]]], *, sample_work: float = 1.0, launch_work: float = 0.0
    ) -> None:
        if not pieces:
            raise ValueError("pieces is empty: give one list of (from_s, speed) pairs per rank")
        for rank, one in enumerate(pieces):
            starts = [t for t, _ in one]
            if not starts or starts[0] != 0.0 or any(not b > a for a, b in pairwise(starts)):
                raise ValueError(f"pieces[{rank}] must begin at 0 s and increase strictly, got times {starts}")
            if bad := [v for _, v in one if not (math.isfinite(v) and v > 0.0)]:
                raise ValueError(f"pieces[{rank}] has the speeds {bad}: they must be finite numbers > 0")
        if not (sample_work > 0.0 and launch_work >= 0.0):
            raise ValueError(f"sample_work={sample_work!r} must be > 0 and launch_work={launch_work!r} >= 0")
        self.sample_work, self.launch_work = sample_work, launch_work
        self._starts = [[t for t, _ in one] for one in pieces]
        self._speeds = [[v for _, v in one] for one in pieces]
        # Work done at each start.
        self._done = [
            list(accumulate(((b - a) * v for (a, v), (b, _) in pairwise(one)), initial=0.0)) for one in pieces
        ]

    def done(self, rank: int, until_s: float) -> float:
        """Returns the work a worker that never rests has done by then [units]."""
        i = self._piece(rank, until_s)
        return self._done[rank][i] + (until_s - self._starts[rank][i]) * self._speeds[rank][i]

    def seconds(self, rank: int, from_s: float, work: float) -> float:
        """Returns how long ``work`` units take, begun at ``from_s`` [s]."""
        starts, speeds, i = self._starts[rank], self._speeds[rank], self._piece(rank, from_s)
        if i == len(starts) - 1 or work <= (starts[i + 1] - from_s) * speeds[i]:
            return work / speeds[i]  # within one piece: no difference of large sums
        target = self.done(rank, from_s) + work
        j = bisect_right(self._done[rank], target) - 1
        return starts[j] + (target - self._done[rank][j]) / speeds[j] - from_s

    def work_s(self, rank: int, step: int, now_s: float, samples: int) -> float:
        """Returns the time of a chunk; see `benchmarks.stale.simulator.ChunkTime`."""
        del step
        return self.seconds(rank, now_s, self.launch_work + self.sample_work * samples)

    def ideal_s(self, batches: Sequence[int]) -> float:
        """Returns a work-conserving bound on the time of these updates, one after another [s].

        Update k needs ``batches[k]`` samples, fractions allowed, from workers that never rest, transfer for nothing and
        stop in the right moment; whoever takes part in an update pays one launch for it. So it lasts the least T with

            sum_r max(0, work of r in T - launch) = work of the batch.

        A chunk that spans several updates saves launches: where these are a good part of a step, an asynchronous
        schedule may be a little faster than this.
        """
        now_s = 0.0
        for batch in batches:
            now_s += self._least_s(now_s, self.sample_work * batch)
        return now_s

    def _least_s(self, from_s: float, work: float) -> float:
        ranks = range(len(self._speeds))
        # If speeds stayed as they are: the fastest take part, each next one if its launch ends before they are done.
        least_s, total_work, total_speed = math.inf, work, 0.0
        for v in sorted((self._speeds[r][self._piece(r, from_s)] for r in ranks), reverse=True):
            if self.launch_work / v >= least_s:
                break
            total_work, total_speed = total_work + self.launch_work, total_speed + v
            least_s = total_work / total_speed
        if all(from_s + least_s <= self._next_change_s(r, from_s) for r in ranks):
            return least_s
        begun = [self.done(r, from_s) + self.launch_work for r in ranks]

        def enough(seconds: float) -> bool:
            return math.fsum(max(0.0, self.done(r, from_s + seconds) - begun[r]) for r in ranks) >= work

        low, high = 0.0, least_s
        while not enough(high):
            low, high = high, 2.0 * high
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _piece(self, rank: int, now_s: float) -> int:
        return bisect_right(self._starts[rank], now_s) - 1

    def _next_change_s(self, rank: int, now_s: float) -> float:
        i = self._piece(rank, now_s) + 1
        return self._starts[rank][i] if i < len(self._starts[rank]) else math.inf
