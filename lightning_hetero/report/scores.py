"""Who is slow, beside the others and beside itself, per item of work (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from lightning_hetero.cluster.stragglers import Straggler, StragglerTest
from lightning_hetero.report.run import Run, Step
from lightning_hetero.types import SpeedSample

__all__ = ["Scores", "scores_of", "windows"]

_MOST_WINDOWS = 24
_HOT = 1.15  # seconds per item over what it is compared with
_SPELL = 1.5  # a while, of one rank


def windows(steps: Sequence[Step], most: int = _MOST_WINDOWS) -> list[list[Step]]:
    """Returns the steps in at most so many windows of about equal length, in order."""
    count = min(most, len(steps))
    return [list(steps[i * len(steps) // count : (i + 1) * len(steps) // count]) for i in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Seconds per item by rank and window, as ratios: 1 is what it is compared with, 1.5 takes half as long again.

    Attributes:
        first: number of each window's first step.
        others: a rank over the ranks' median (of two ranks, the faster) of the same window; NaN: not measured.
        itself: a rank over its own fastest fifth of windows.
        named: ranks found to be slow by the test that `StragglerMonitor` uses, each the first time.
    """

    first: tuple[int, ...]
    others: tuple[tuple[float, ...], ...]
    itself: tuple[tuple[float, ...], ...]
    named: tuple[Straggler, ...]

    @property
    def typical(self) -> list[float]:
        """Each rank's median beside the others."""
        return [_median(row) for row in self.others]

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that are slow beside the others in most windows."""
        return [rank for rank, ratio in enumerate(self.typical) if ratio > _HOT]

    @property
    def slow_windows(self) -> list[int]:
        """Windows in which most ranks are slow beside themselves: something that all share."""
        columns = list(zip(*self.itself, strict=True))
        return [i for i, column in enumerate(columns) if _median(column) > _HOT]

    @property
    def spells(self) -> list[int]:
        """Ranks that are slow beside themselves for a while, but not beside the others as a rule."""
        alone = set(range(len(self.itself))) - set(self.slow_ranks)
        all_slow = set(self.slow_windows)
        return [
            rank
            for rank in sorted(alone)
            if any(ratio > _SPELL and i not in all_slow for i, ratio in enumerate(self.itself[rank]))
        ]


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def scores_of(run: Run) -> Scores | None:
    """Returns the scores of a run; None for one rank, without measured steps, or where ranks do not compare."""
    if run.ranks < 2 or run.staged or not run.steps:
        return None
    parts = windows(run.steps)
    per_item = [[_per_item(part, rank) for part in parts] for rank in range(run.ranks)]
    middles = [_low([row[i] for row in per_item]) for i in range(len(parts))]
    fastest = [_fastest(row) for row in per_item]
    test, named = StragglerTest(run.ranks), dict[int, Straggler]()
    for step in run.steps:
        records = [
            SpeedSample(rank=r, step=step.index, samples=round(t.samples), compute_s=t.compute_s, work=t.work)
            for r, t in step.turns.items()
            if t.samples > 0
        ]
        for found in test.add(records, epoch=step.epoch, step=step.index):
            named.setdefault(found.rank, found)
    firsts = [0]
    for part in parts[:-1]:
        firsts.append(firsts[-1] + len(part))
    return Scores(
        first=tuple(firsts),
        others=tuple(tuple(_ratio(v, m) for v, m in zip(row, middles, strict=True)) for row in per_item),
        itself=tuple(tuple(_ratio(v, own) for v in row) for row, own in zip(per_item, fastest, strict=True)),
        named=tuple(named.values()),
    )


def _per_item(steps: Sequence[Step], rank: int) -> float:
    turns = [t for s in steps if (t := s.turns.get(rank)) is not None and t.items > 0 and t.compute_s > 0]
    items = math.fsum(t.items for t in turns)
    return math.fsum(t.compute_s for t in turns) / items if items > 0 else math.nan


def _low(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median_low(known) if known else math.nan


def _fastest(values: Sequence[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 5] if known else math.nan


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan
