"""Ranks that are slow per item of work, compared with the others and with themselves (layer P).

How a run went over time: what it logged, and its throughput.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RecordedRun, RunStep, following

_WINDOWS = 60  # of the throughput

Curve = list[tuple[float, float]]
"""Time since the first step began [s], and a value."""


def losses_of(run: RecordedRun) -> dict[str, Curve]:
    """Returns the logged losses by name, at the end of the step that they were logged in; of one that was logged per
    step and per epoch that of the steps."""
    found: dict[str, Curve] = {}
    for number, values in run.metrics:
        for name, value in values.items():
            if "loss" in name.lower():
                found.setdefault(name, []).append((run.steps[number].end_s, value))
    return {name: curve for name, curve in found.items() if f"{name.removesuffix('_epoch')}_step" not in found}


def last_metrics(run: RecordedRun) -> Mapping[str, float]:
    """Returns what was logged last, by name; not Lightning's second and third name for the same."""
    found = {name: value for _, values in run.metrics for name, value in values.items()}
    double = [f"{name}_{by}" for name in found for by in ("step", "epoch")]
    return {name: value for name, value in found.items() if name not in double}


def throughput_of(run: RecordedRun) -> Curve:
    """Returns samples per second over windows of steps, pauses between epochs left out."""
    pairs = [(step.samples, step.end_s - before.end_s, step.end_s) for before, step in following(run.steps)]
    size = -(-len(pairs) // _WINDOWS) or 1
    windows = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    taken = [(math.fsum(s for s, _, _ in w), math.fsum(s for _, s, _ in w), w[-1][2]) for w in windows]
    return [(end_s, samples / seconds) for samples, seconds, end_s in taken if seconds > 0.0]


HOT = 1.15  # times what it is compared with, from which on a rank is slow
_LITTLE = 0.05  # of a step; less than that is no finding
_SPELL = 1.5  # times its own fastest windows, from which on a rank is slow for a while
_MOST_WINDOWS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Seconds per item by rank and window, as ratios: 1 is what it is compared with, 1.5 takes half as long again.

    Attributes:
        first: number of each window's first step.
        others: a rank over the ranks' median (of two ranks, the faster) of the same window; NaN: not measured.
        itself: a rank over its own fastest fifth of windows.
    """

    first: tuple[int, ...]
    others: tuple[tuple[float, ...], ...]
    itself: tuple[tuple[float, ...], ...]

    @property
    def typical(self) -> list[float]:
        """Each rank's median compared with the others."""
        return [_of_known(median, row) for row in self.others]

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks that are slow compared with the others in most windows."""
        return [rank for rank, ratio in enumerate(self.typical) if ratio > HOT]

    @property
    def slow_windows(self) -> list[int]:
        """Windows in which most ranks are slower than usual: something that all share."""
        columns = zip(*self.itself, strict=True)
        return [i for i, column in enumerate(columns) if _of_known(median, column) > HOT]

    @property
    def spells(self) -> list[int]:
        """Ranks that are slower than usual for a while, but as a rule not slower than the others."""
        slow, shared = set(self.slow_ranks), set(self.slow_windows)
        alone = [(rank, row) for rank, row in enumerate(self.itself) if rank not in slow]
        return [rank for rank, row in alone if any(v > _SPELL and i not in shared for i, v in enumerate(row))]


def scores_of(run: RecordedRun) -> Scores | None:
    """Returns the scores of a run; None for one rank, without measured steps, or where ranks do not compare."""
    if run.ranks < 2 or run.staged or not run.steps:
        return None
    steps, count = run.steps, min(_MOST_WINDOWS, len(run.steps))
    firsts = [i * len(steps) // count for i in range(count)]
    windows = [steps[a:b] for a, b in pairwise([*firsts, len(steps)])]
    per_item = [[_per_item(window, rank) for window in windows] for rank in range(run.ranks)]
    middles = [_of_known(median_low, column) for column in zip(*per_item, strict=True)]
    fastest = [_of_known(lambda known: sorted(known)[len(known) // 5], row) for row in per_item]
    return Scores(
        first=tuple(firsts),
        others=tuple(tuple(_over(v, m) for v, m in zip(row, middles, strict=True)) for row in per_item),
        itself=tuple(tuple(_over(v, own) for v in row) for row, own in zip(per_item, fastest, strict=True)),
    )


def _per_item(steps: Sequence[RunStep], rank: int) -> float:
    turns = [t for s in steps if (t := s.turns.get(rank)) is not None and t.items > 0 and t.compute_s > 0]
    items = math.fsum(t.items for t in turns)
    return math.fsum(t.compute_s for t in turns) / items if items > 0 else math.nan


def late_between(run: RecordedRun, ledger: RunLedger) -> tuple[int, float, float] | None:
    """Returns the rank that takes longest between two steps, e.g. for its loader: its median [s], and that over the
    ranks'; None: they take about as long, or, as on a GPU, the host does not tell."""
    gaps: list[list[float]] = [[] for _ in range(run.ranks)]
    for before, step in following(ledger.steady if run.sees_waiting else ()):
        for rank in before.turns.keys() & step.turns.keys():
            turn = step.turns[rank]
            gaps[rank].append(turn.end_s - before.turns[rank].end_s - turn.compute_s - turn.wait_s)
    if run.ranks < 2 or not all(gaps):
        return None
    taken_s = [max(0.0, median(own)) for own in gaps]
    usual_s, most_s = median_low(taken_s), max(taken_s)
    if most_s - usual_s < _LITTLE * ledger.step_s or most_s < HOT * usual_s:
        return None
    return taken_s.index(most_s), most_s, _over(most_s, usual_s)


def _of_known(average: Callable[[list[float]], float], values: Iterable[float]) -> float:
    """Returns an average of what is no NaN; NaN where nothing is known."""
    known = [value for value in values if not math.isnan(value)]
    return average(known) if known else math.nan


def _over(value: float, base: float) -> float:
    """Returns a ratio; NaN where either is not known."""
    if math.isnan(value) or math.isnan(base):
        return math.nan
    return value / base if base > 0.0 else math.inf if value > 0.0 else 1.0
