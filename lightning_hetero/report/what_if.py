"""What other engines, a mended rank or fewer cards would take, from what was recorded (layer P).

Nothing is modelled here. `Recorded` says what a rank would have taken for another number of samples in a recorded step;
the engines' own decide code does the rest: balanced by `BalancePolicy`, fed with those times step by step, stale by the
simulator of its coordinator. The second half counts, as in the first they learn. Taken as they were: the exchange, what
a rank's samples cost in that step, and that all ranks can hold what they get. Of a pipeline with several stages ranks'
times do not compare; there the plan's own model answers, see `stages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lightning_hetero.predictors import Kalman
from lightning_hetero.report.run import Run, Step
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.shares.replay import followed_s
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulator import Costs, simulate
from lightning_hetero.types import AffineCost, LearnedCost

__all__ = ["Dropped", "Mended", "Recorded", "WhatIf", "recorded_of", "what_if"]

_MOST_STEPS = 160  # of the last ones: what engines are asked about
_FEW_STEPS = 48  # for the curves, which ask many times
_MOST_RANKS = 12  # of a curve
_SIMULATED = 40_000  # steps x ranks^2 of the stale engine's simulator: about two seconds
_LEAST_SIMULATED = 6  # steps
_DIFFERENT = 1.1  # most over least samples of a rank from which its fixed part can be told


class Recorded:
    """Full global batches of a run, and what ranks would have taken for other shares.

    Args:
        steps: in which all of the ranks took part, or those before tell of those that did not.
        ranks: to look at.
        samples: a full global batch.
        exchange_s: of each step.
        mended: a rank that is as fast as the median of the others; None: none is.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        ranks: Sequence[int],
        samples: int,
        exchange_s: Sequence[float],
        *,
        mended: int | None = None,
    ) -> None:
        self.steps, self.ranks, self.samples, self.exchange_s = list(steps), list(ranks), samples, list(exchange_s)
        self._mended = mended
        self._costs: dict[int, LearnedCost] = {rank: _cost(self.steps, rank) for rank in ranks}
        self._factors: list[dict[int, float]] = []
        last = dict.fromkeys(ranks, 1.0)
        for step in self.steps:
            for rank in ranks:
                turn = step.turns.get(rank)
                if turn is not None and turn.samples > 0 and turn.compute_s > 0:
                    last[rank] = turn.compute_s / self._costs[rank].seconds(turn.samples)
            self._factors.append(dict(last))

    def seconds(self, rank: int, step: int, samples: float) -> float:
        """Returns what a rank would have taken in the step with that number for so many samples [s]."""
        if rank == self._mended:
            return median(self._seconds(other, step, samples) for other in self.ranks if other != rank)
        return self._seconds(rank, step, samples)

    def _seconds(self, rank: int, step: int, samples: float) -> float:
        return self._costs[rank].seconds(samples) * self._factors[step][rank]

    def last(self, steps: int) -> Recorded:
        """Returns the last steps alone."""
        return Recorded(self.steps[-steps:], self.ranks, self.samples, self.exchange_s[-steps:], mended=self._mended)

    def mend(self, rank: int) -> Recorded:
        """Returns the same with a rank as fast as the median of the others."""
        return Recorded(self.steps, self.ranks, self.samples, self.exchange_s, mended=rank)

    def without(self, dropped: Sequence[int]) -> Recorded:
        """Returns the same global batches on fewer ranks."""
        kept = [rank for rank in self.ranks if rank not in dropped]
        return Recorded(self.steps, kept, self.samples, self.exchange_s)

    def per_sample_s(self, rank: int) -> float:
        """Returns a rank's mean time per sample at an equal share [s]."""
        equal = self.samples / len(self.ranks)
        return math.fsum(self.seconds(rank, t, equal) for t in range(len(self.steps))) / len(self.steps) / equal

    def step_s(self, engine: str) -> float:
        """Returns what a global batch takes under ``ddp``, ``balanced`` or ``stale``, the mean of the second half [s].

        NaN where the engine could not divide the batch among the ranks, and of ``stale`` for less than six steps, or
        more ranks (80) than are simulated in a few seconds.
        """
        if len(self.ranks) == 1:
            taken = [self.seconds(self.ranks[0], t, self.samples) for t in range(len(self.steps))]
            return _second_half(taken)
        return {"ddp": self._ddp_s, "balanced": self._balanced_s, "stale": self._stale_s}[engine]()

    def _ddp_s(self) -> float:
        equal = self.samples / len(self.ranks)
        taken = [
            exchange_s + max(self.seconds(rank, t, equal) for rank in self.ranks)
            for t, exchange_s in enumerate(self.exchange_s)
        ]
        return _second_half(taken)

    def _balanced_s(self) -> float:
        policy = BalancePolicy()
        try:
            policy.start(world_size=len(self.ranks), total=self.samples, bounds=ShareBounds())
        except ValueError:
            return math.nan
        work_s = followed_s(policy, lambda i, t, n: self.seconds(self.ranks[i], t, n), len(self.steps))
        return _second_half([sum(both) for both in zip(self.exchange_s, work_s, strict=True)])

    def _stale_s(self) -> float:
        steps = min(len(self.steps), _SIMULATED // len(self.ranks) ** 2)
        first, half = len(self.steps) - steps, steps // 2
        if self.samples < len(self.ranks) or steps < _LEAST_SIMULATED:
            return math.nan
        exchange_s = math.fsum(self.exchange_s[first:]) / steps

        def work_s(rank: int, step: int, now_s: float, samples: int) -> float:
            del now_s
            return self.seconds(self.ranks[rank], first + min(step, steps - 1), samples)

        everyone = range(len(self.ranks))
        trace = simulate(
            Coordinator(Flexible(), workers=everyone),
            work_s,
            workers=everyone,
            epochs=[[self.samples * (t + 1) for t in range(steps)]],
            costs=Costs(pull_s=exchange_s / 2.0, push_s=exchange_s / 2.0),
        )
        return (trace.updates_s[-1] - trace.updates_s[half - 1]) / (len(trace.updates_s) - half)


def _second_half(seconds: Sequence[float]) -> float:
    last = seconds[len(seconds) // 2 :]
    return math.fsum(last) / len(last)


def _cost(steps: Sequence[Step], rank: int) -> LearnedCost:
    """Returns a rank's cost as the engines' predictor learns it, where its samples differ; one number of samples tells
    nothing of a fixed part, and work is then taken to grow with samples, as in `lightning_hetero.cluster.what_if`."""
    seen = [t for s in steps if (t := s.turns.get(rank)) is not None and t.samples > 0 and t.compute_s > 0]
    if not seen:
        return AffineCost(fixed_s=0.0, per_sample_s=0.0)
    if max(t.samples for t in seen) > _DIFFERENT * min(t.samples for t in seen):
        predictor = Kalman()
        for turn in seen:
            predictor.update(turn.samples, turn.compute_s)
        return predictor.cost()
    return AffineCost(fixed_s=0.0, per_sample_s=median(t.compute_s / t.samples for t in seen))


def recorded_of(run: Run) -> Recorded | None:
    """Returns what can be asked about a run; None where ranks' times do not compare, or too little was measured."""
    if run.ranks < 2 or run.staged or not run.steps:
        return None
    if run.meets:
        steps = [run.steps[n] for n in run.full if len(run.steps[n].turns) == run.ranks]
        full = round(steps[0].samples) if steps else 0
        exchange_s = [step.step_s - max(t.compute_s for t in step.turns.values()) for step in steps]
    else:
        from_rank = {rank for step in run.steps for rank in step.turns}
        if len(from_rank) < run.ranks:
            return None
        full = round(median(step.samples for step in run.steps))
        steps = list(run.steps)
        least_s = min(min(t.wait_s for t in step.turns.values()) for step in steps)
        exchange_s = [least_s] * len(steps)
    ranks = [r for r in range(run.ranks) if any(r in s.turns and s.turns[r].compute_s > 0 for s in steps)]
    if len(ranks) < run.ranks or len(steps) < 2 or full < 1:
        return None
    return Recorded(steps, ranks, full, exchange_s).last(_MOST_STEPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mended:
    """A step if one rank were as fast as the median of the others [s]."""

    rank: int
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A step of the same global batch without some ranks [s]; ``ranks``: the slowest first."""

    ranks: tuple[int, ...]
    ddp_s: float
    engine_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """What a global batch takes, and would take [s].

    Attributes:
        engine: of the run.
        samples: a full global batch.
        steps: recorded ones that were asked about.
        measured_s: as it was, the mean over the second half of these.
        engines: by engine.
        few_s: as the run's engine would, over the fewer steps that mended ranks and dropped cards are asked about.
        mended: of each rank, or the slowest of many, by rank.
        dropped: without the slowest 0, 1, 2, ... ranks.
        beside: the engine that `dropped` compares with DDP.
    """

    engine: str
    samples: int
    steps: int
    measured_s: float
    engines: dict[str, float]
    few_s: float
    mended: tuple[Mended, ...]
    dropped: tuple[Dropped, ...]
    beside: str

    @property
    def best(self) -> tuple[str, float]:
        """The engine that takes least, and what it takes [s]; the one in use where none takes 2 % less, and an exact
        one where stale gradients would not save 5 %."""
        known = {name: seconds for name, seconds in self.engines.items() if not math.isnan(seconds)}
        best = min(known, key=lambda name: known[name])
        if best == "stale" and known.get("balanced", math.inf) < 1.05 * known["stale"]:
            best = "balanced"
        mine = known.get(self.engine, self.measured_s)
        return (best, known[best]) if known[best] < 0.98 * mine else (self.engine, mine)


def what_if(run: Run) -> WhatIf | None:
    """Returns what others would take; None where nothing can be said, see `recorded_of`."""
    known = recorded_of(run)
    if known is None:
        return None
    engine = run.engine if run.engine in ("ddp", "balanced", "stale") else "ddp"
    taken = [step.step_s for step in known.steps] if run.meets else run.taken_s(known.steps)
    few = known.last(_FEW_STEPS)
    slowest_first = sorted(known.ranks, key=lambda rank: -known.per_sample_s(rank))
    asked = sorted(slowest_first[:_MOST_RANKS])
    beside = engine if engine != "ddp" else "balanced"
    dropped: list[Dropped] = []
    for count in range(min(len(known.ranks), _MOST_RANKS)):
        rest = few.without(slowest_first[:count])
        dropped.append(
            Dropped(
                ranks=tuple(slowest_first[:count]), ddp_s=rest.step_s("ddp"), engine_s=rest.step_s(beside)
            )
        )
    return WhatIf(
        engine=run.engine,
        samples=known.samples,
        steps=len(known.steps),
        measured_s=_second_half(taken),
        engines={name: known.step_s(name) for name in ("ddp", "balanced", "stale")},
        few_s=dropped[0].ddp_s if engine == "ddp" else dropped[0].engine_s,
        mended=tuple(Mended(rank=rank, step_s=few.mend(rank).step_s(engine)) for rank in asked),
        dropped=tuple(dropped),
        beside=beside,
    )
