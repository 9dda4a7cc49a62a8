"""The exact split of a fixed order of devices into contiguous, non-empty stages.

Minimises the modelled total ``fill + (m - 1) * period`` or the period alone (`chain` states the model). Textbook:
min-max partition of a sequence by testing values. Ours: everything here, because of three traps. The greedy test
"furthest end first" is wrong where stages must be non-empty (it is not monotone in the period and gives plans up to
twice as slow); a split of the best period can be 2-9 % off in total; and memory depends on the period.

**Search.** Let f(P) be the least fill of splits that keep to the period P (`least_fill`): it falls with P, in steps. So
for periods in (P1, P2] the total is at least f(P2) + (m - 1) P1; and a split found at P2 that keeps to P' < P2 proves
f constant on [P', P2], where only P' is of interest. Interval by interval that is branch and bound over the period.

One pass costs O(S w b) for S stages, windows of w places and stages of up to b layers, times the periods asked for at
once; 64 devices x 1,000 layers take about three passes of 16 periods. Long windows make it slow: few micro-batches per
stage (the period then hardly matters), or caps so tight that the period is far above its bound while cuts differ in
bytes (labelled passes, one per period).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from lightning_hetero.solvers.chain.bounds import Walk, relaxed_bound, why_infeasible
from lightning_hetero.solvers.chain.chain import Chain
from lightning_hetero.solvers.chain.layers import Floats, Ints
from lightning_hetero.solvers.chain.least_fill import LeastFill
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate, fitting_periods, times
from lightning_hetero.types import Status

__all__ = ["split"]

Objective: TypeAlias = Literal["total", "bottleneck"]

_ROWS = 16
_SPREAD = 0.02  # the best total is rarely further above the lower bound of the period
_EDGES = 200_000  # rows * places * places per pass: beyond, another pass that knows more is better


def split(chain: Chain, *, objective: Objective = "total", tolerance: float = 1e-4) -> ChainPlan:
    """Returns the best split of the chain's layers over its devices in the given order.

    Exact: no split is better by more than ``tolerance``, relatively, among all contiguous ones with a layer or more
    per stage that fit the devices' memory at their period.

    Args:
        chain: layers, devices, links.
        objective: ``total``: the time of all micro-batches; ``bottleneck``: the period, and of equal ones less fill.
        tolerance: 1e-12 to 0.5; profiles are rarely better than 1e-4.

    Returns:
        A plan with ``lower_bound_s`` of the objective within the tolerance; or infeasible, and why.

    Raises:
        ValueError: unknown objective, or a tolerance out of range.

    >>> from lightning_hetero.solvers.chain.layers import Layers
    >>> from lightning_hetero.types import Device, Link
    >>> devices = [Device(name="fast", speed=2.0), Device(name="slow")]
    >>> layers = Layers(work_s=[1.0] * 6, cut_bytes=[0.0] * 7)
    >>> plan = split(Chain(layers=layers, devices=devices, links=[Link()], back=[Link()], micro_batches=8))
    >>> plan.cuts, plan.period_s, plan.fill_s, plan.total_s
    ((0, 4, 6), 2.0, 4.0, 18.0)
    """
    if objective not in ("total", "bottleneck"):
        raise ValueError(f"objective={objective!r} must be 'total' or 'bottleneck'")
    if not 1e-12 <= tolerance <= 0.5:
        raise ValueError(f"tolerance={tolerance!r} must lie in 1e-12 to 0.5 (relative)")
    n, s = len(chain.layers), len(chain)
    plan: ChainPlan | None = None
    if s == 1:
        plan = evaluate(chain, (0, n))
        bound_s = plan.total_s if objective == "total" else plan.period_s
        plan = replace(plan, lower_bound_s=bound_s) if plan.ok else None
    elif s <= n:
        plan = _Search(chain, objective, tolerance).run()
    return plan or ChainPlan(cuts=(), status=Status.INFEASIBLE, reason=why_infeasible(chain))


class _Gap(NamedTuple):
    """Periods above ``low_s`` and below ``high_s``; splits of these have a fill of at least ``fill_s``."""

    low_s: float
    high_s: float
    fill_s: float
    asked: bool = True  # for ``high_s``; else ``fill_s`` is a rough bound


class _Search:
    """Branch and bound over the period."""

    def __init__(self, chain: Chain, objective: Objective, tolerance: float) -> None:
        self._chain, self._walk = chain, Walk(chain)
        self._weights = (1.0, chain.micro_batches - 1.0) if objective == "total" else (0.0, 1.0)
        self._enough, self._rough = 1.0 - tolerance, max(1e-6, 0.1 * tolerance)
        self._best = (math.inf, math.inf)  # objective, fill
        self._cuts: tuple[int, ...] = ()
        self._proven_s = math.inf  # the least bound of a gap that was given up
        self._rows = _ROWS // 2

    def run(self) -> ChainPlan | None:
        gaps = self._open()
        while gaps := self._worthwhile(gaps):
            gaps.sort(key=self._bound)
            gaps = gaps[self._rows :] + self._divide(sorted(gaps[: self._rows]))
        if not self._cuts:
            return None
        return replace(evaluate(self._chain, self._cuts), lower_bound_s=min(self._best[0], self._proven_s))

    def _open(self) -> list[_Gap]:
        """Asks for longer and longer periods, from a lower bound up, until a split is found."""
        low_s, most_s = relaxed_bound(self._chain, tolerance=self._rough, walk=self._walk), self._chain.slowest_s
        self._least_s = low_s
        if math.isinf(low_s):
            return []
        if low_s == 0.0 or self._weights[1] == 0.0:  # nothing to start from, or the period does not matter
            return self._ask([low_s], [most_s])
        done_s, spread = low_s, _SPREAD
        while True:
            end_s = min(low_s * (1.0 + spread), most_s)
            steps = np.linspace(0.0, 1.0, self._rows) ** 2  # most of them near the bound
            asked: list[float] = np.unique(done_s + (end_s - done_s) * steps).tolist()
            gaps = self._ask([done_s, *asked[:-1]], asked)
            if self._cuts or end_s >= most_s:
                break
            done_s, spread = end_s, 4.0 * spread
        if self._cuts:
            latest_s, fill_s = self._latest()
            gaps.append(_Gap(end_s, latest_s, fill_s, asked=False))
        return gaps

    def _bound(self, gap: _Gap) -> float:
        return self._weights[0] * gap.fill_s + self._weights[1] * gap.low_s

    def _promises(self, gap: _Gap) -> bool:
        """Whether a gap may hold something better by more than the tolerance."""
        return gap.high_s > gap.low_s * (1.0 + 1e-15) and self._bound(gap) < self._best[0] * self._enough

    def _worthwhile(self, gaps: list[_Gap]) -> list[_Gap]:
        kept = [gap for gap in gaps if self._promises(gap)]
        given_up = [self._bound(gap) for gap in gaps if gap.high_s > gap.low_s and not self._promises(gap)]
        self._proven_s = min([self._proven_s, *given_up])
        return kept

    def _divide(self, gaps: list[_Gap]) -> list[_Gap]:
        """Asks for periods inside of gaps, evenly spaced; returns the gaps between them."""
        each = max(1, self._rows // len(gaps))
        lows: list[float] = []
        asked: list[float] = []
        rest: list[_Gap] = []
        for gap in gaps:
            end_s = high_s = gap.high_s
            if not gap.asked:
                # Reach out step by step: long periods leave wide windows, and the best gets better.
                high_s = min(high_s, self._latest()[0])
                end_s = min(high_s, gap.low_s + max(3.0 * (gap.low_s - self._least_s), _SPREAD * gap.low_s))
                if high_s <= gap.low_s:
                    continue
            points: list[float] = np.linspace(gap.low_s, end_s, each + 1 + gap.asked).tolist()
            if gap.asked:
                points.pop()
            if points[-1] < high_s:
                rest.append(gap._replace(low_s=points[-1], high_s=high_s))
            lows += points[:-1]
            asked += points[1:]
        return self._ask(lows, asked) + rest if asked else rest

    def _ask(self, lows: list[float], asked: list[float]) -> list[_Gap]:
        """Returns what is left between each low and the period asked for, given the best split of that period."""
        table = LeastFill(self._walk, np.array(asked))
        self._rows = int(min(max(_EDGES / table.width**2, 1), _ROWS))
        rows = np.flatnonzero(np.isfinite(table.fill_s))
        if not rows.size:
            return []
        reached: list[float] = self._take(table.cuts(rows)).tolist()
        numbers: list[int] = rows.tolist()
        gaps: list[_Gap] = []
        for row, period_s in zip(numbers, reached, strict=True):
            low_s, high_s, fill_s = lows[row], asked[row], float(table.fill_s[row])
            if period_s > high_s * (1.0 + 1e-12):
                # It does not fit at this pace: the fill is a lower bound only.
                if self._promises(_Gap(low_s, high_s, fill_s)):
                    exact = LeastFill(self._walk, np.array([high_s]), labelled=True)
                    fill_s = float(exact.fill_s[0])
                    if fill_s < math.inf:
                        high_s = min(high_s, float(self._take(exact.cuts(np.array([0])))[0]))
            else:
                high_s = min(high_s, period_s)
            if fill_s < math.inf:
                gaps.append(_Gap(low_s, high_s, fill_s))
        return gaps

    def _take(self, cuts: Ints) -> Floats:
        """Remembers the best of some splits [n, S + 1] and returns their periods [n]."""
        of = times(self._chain, cuts)
        periods_s = fitting_periods(self._chain, cuts, of)
        by_fill, by_period = self._weights
        for i, (fill_s, period_s) in enumerate(zip(of.fill_s.tolist(), periods_s.tolist(), strict=True)):
            if period_s == math.inf:
                continue
            value = (by_fill * fill_s + by_period * period_s, fill_s)
            if value < self._best:
                self._best, self._cuts = value, tuple(cuts[i].tolist())
        return periods_s

    def _latest(self) -> tuple[float, float]:
        """Returns the period from which on none can be better than the best, and a lower bound of the fill up to it.

        The bound forgets links' differences, memory and borders: the fastest devices take all they can. With k of them
        full that is k P for P = work / (their speed), and linear between: convex with the period's weight added.
        """
        if self._weights[0] == 0.0:
            return self._best[0], 0.0
        chain, layers = self._chain, self._chain.layers
        full_s = layers.lists[0][-1] / np.cumsum(np.sort(chain.speeds)[::-1])[::-1]  # rising
        rest_s = sum(chain.leader_s) + float(self._walk.least_trips.sum())
        fills = np.arange(len(chain), 0, -1) * full_s + rest_s
        totals = fills + self._weights[1] * full_s
        better = np.flatnonzero(totals < self._best[0])
        if not better.size:
            return 0.0, rest_s
        i = int(better[-1])
        if i == len(totals) - 1:
            return float((self._best[0] - fills[i]) / self._weights[1]), float(fills[i])
        part = float((self._best[0] - totals[i]) / (totals[i + 1] - totals[i]))
        return float(full_s[i] + part * (full_s[i + 1] - full_s[i])), float(
            fills[i] + part * (fills[i + 1] - fills[i])
        )
