"""Names ranks that are slow at their work: a sequential test on seconds per item (layer P).

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

from lightning_hetero.cluster.score import items_of
from lightning_hetero.types import SpeedSample

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
