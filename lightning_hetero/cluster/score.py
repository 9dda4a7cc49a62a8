"""How far ranks fall behind, and what stock DDP's monitor says at the end of a fit (layer P).

Names ranks that are slow at their work: a sequential test on seconds per item.

A slow step says little: its batch may be long, or the host was busy for a moment. So the test looks at each rank's
time per item of work compared with the other ranks' of the same step, and adds up evidence:

    d = log(seconds per item) - median over the other ranks of the same
    S = max(0, S + clip(D / v (d - D / 2), +-LIMIT / STEPS))           slow once S > LIMIT, since S left 0 last
    v   variance of d, from the rank's own |d - d before|: its mean is 2 sigma / sqrt(pi), wherever the level lies

That is Page's cumulative sum (1954) of the log likelihood ratio of normal errors, "D slower" against "as fast as the
others". D is a slowdown of 1.3, so what is less than 1.14 (its root) never adds up. The clip lets no single step,
however slow, be evidence enough: it takes STEPS of them. LIMIT, the clip and the noise from differences, which neither
a change of level nor a slow start inflates, are ours. A named rank is taken back when as much speaks against it.

With normal noise a false alarm comes, by Wald's bound, less than once in exp(16), some nine million, measurements. How
much noise lets a slowdown of 1.3 be found in 20 steps: `tests/pure/cluster/test_stragglers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_hetero.cluster.engine_times import would_take_s
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.types import SpeedSample

_MOST_SHARES = 8  # one by one


def items_of(records: Sequence[SpeedSample]) -> list[float]:
    """Returns each rank's work: its items if those of all are known, else its samples, at least 1."""
    if records and all(r.work > 0 for r in records if r.compute_s > 0):
        return [r.work for r in records]
    return [float(max(1, r.samples)) for r in records]


def straggler_scores(records: Sequence[SpeedSample]) -> list[float]:
    """Returns each rank's speed relative to the fastest, in (0, 1]; NaN where nothing was measured.

    Speed is items (samples, if work is not counted) per second of own work: neither is a rank that got less work taken
    for a fast one, nor one with a long batch for a slow one.
    """
    speeds = [n / r.compute_s if r.compute_s > 0 else math.nan for r, n in zip(records, items_of(records), strict=True)]
    fastest = max((s for s in speeds if not math.isnan(s)), default=math.nan)
    return [s / fastest for s in speeds]


def shares_text(samples: Sequence[int]) -> str:
    """Returns shares in a few letters.

    >>> shares_text([21, 11]), shares_text([4] * 8 + [32])
    ('21/11', '4..32')
    """
    if len(samples) <= _MOST_SHARES:
        return "/".join(map(str, samples))
    return f"{min(samples)}..{max(samples)}"


def imbalance(compute_s: Sequence[float]) -> float:
    """Returns the slowest rank's work over the mean of all; 1.0 is perfect balance, NaN if nothing was measured."""
    total = math.fsum(compute_s)
    return max(compute_s) * len(compute_s) / total if total > 0 else math.nan


def last_lines(ledger: RunLedger, *, sharded: bool = False) -> str:
    """Returns lines for people on a fit under stock DDP: what its ranks waited, and what others would take.

    Work is taken to grow in proportion to samples: one batch size says nothing of a fixed part. Loading data and the
    optimizer's step are in none of the times. Nothing is said of a pipeline: what layers and links cost is not
    measured.

    Args:
        ledger: of the fit.
        sharded: whether the model is, so that only one engine trains it.

    Returns:
        Nothing for fewer than two ranks, or where nothing is known.
    """
    ranks, batch = len(ledger.ranks), ledger.batch
    if ranks < 2 or not ledger.steps:
        return ""
    total = ledger.total
    waited = (
        f"StragglerMonitor: {100.0 * ledger.waited:.0f} % of your {ranks} ranks' time in steps was waiting for slower"
        f" ranks ({total.idle_s:.1f} of {total.total_s:.1f} device-seconds)."
    )
    if ledger.too_few:
        return f"{waited} {ledger.too_few}."
    try:
        found, step_s = would_take_s(costs_of(ledger), batch), ledger.step_s
    except ValueError:  # a rank has no samples, or there are too few to share
        return waited

    def told(seconds: float) -> str:
        ratio = step_s / seconds
        return f"{seconds * 1e3:.1f} ms ({f'{ratio:.2f} times as fast' if ratio >= 1.02 else 'not faster'})"

    took = f"{waited} A step took {step_s * 1e3:.1f} ms.\nIf work grows with samples, it would take about"
    balanced = f"{took} {told(found['balanced'])} with strategy='hetero_{'sharded' if sharded else 'balanced'}'"
    return f"{balanced}." if sharded else f"{balanced}, and {told(found['stale'])} with 'hetero_stale'."


_SLOWER = math.log(1.3)
_LIMIT = 16.0
_STEPS = 8
_NOISE, _TRUST = 0.1, 4  # standard deviation of d assumed at first, and how many differences it counts as
_MEMORY = 50  # differences
_LEAST_NOISE = 0.01
_WIDE = 4.0  # a difference counts as at most so many of the mean one
_PER_SIGMA = math.sqrt(math.pi) / 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that has become slow.

    Attributes:
        rank: global rank.
        epoch, step: of the first measurement that spoke for it.
        slowdown: its seconds per item over the others' median since then, > 1.
    """

    rank: int
    epoch: int
    step: int
    slowdown: float


class _Rank:
    """What is known of one rank."""

    def __init__(self) -> None:
        self.named = False
        self.evidence = 0.0  # for the contrary of `named`
        self.since = (0, 0)
        self.total, self.count = 0.0, 0  # of d since then
        self.level = 0.0  # while it is named
        self.before: float | None = None
        self.noise, self.differences = _NOISE / _PER_SIGMA, _TRUST

    def add(self, d: float, tag: tuple[int, int]) -> bool:
        """Takes in one measurement; returns whether `named` has changed."""
        before, self.before = self.before, d
        if before is not None:
            difference = min(abs(d - before), _WIDE * self.noise)
            self.differences = min(self.differences + 1, _MEMORY)
            self.noise += (difference - self.noise) / self.differences
        sigma = max(self.noise * _PER_SIGMA, _LEAST_NOISE)
        # Few differences know their mean badly.
        variance = sigma * sigma * (1.0 + _TRUST / self.differences)
        most = _LIMIT / _STEPS
        gain = min(max(_SLOWER / variance * (d - _SLOWER / 2.0), -most), most)
        if self.evidence <= 0.0:
            self.since, self.total, self.count = tag, 0.0, 0
        self.evidence = max(0.0, self.evidence + (-gain if self.named else gain))
        self.total, self.count = self.total + d, self.count + 1
        if self.named:
            self.level += (d - self.level) / _MEMORY
        if self.evidence <= _LIMIT:
            return False
        self.named, self.evidence, self.level = not self.named, 0.0, self.total / self.count
        return True


class StragglerTest:
    """Watches all ranks' records of one fit.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]

    def add(self, records: Sequence[SpeedSample], *, epoch: int, step: int) -> list[Straggler]:
        """Takes in one step's records, of ranks that were measured in it; returns the ranks that are slow from now on.

        Records without work or time are passed over; a single rank has nobody to be compared with.
        """
        measured = [(r.rank, n, r.compute_s) for r, n in zip(records, items_of(records), strict=True)]
        logs = {rank: math.log(s / n) for rank, n, s in measured if n > 0 and s > 0}
        if len(logs) < 2:
            return []
        found: list[Straggler] = []
        for rank, own in logs.items():
            state = self._ranks[rank]
            d = own - median(value for other, value in logs.items() if other != rank)
            if state.add(d, (epoch, step)) and state.named:
                since = state.since
                found.append(Straggler(rank=rank, epoch=since[0], step=since[1], slowdown=math.exp(state.level)))
        return found

    def slowdowns(self) -> list[float]:
        """Returns each rank's seconds per item over the others' median if it is slow, else 1; NaN before any record."""
        if all(state.before is None for state in self._ranks):
            return [math.nan] * len(self._ranks)
        return [math.exp(max(0.0, state.level)) if state.named else 1.0 for state in self._ranks]
