"""Who worked, who waited, and for whom (layer P).

Of a step in which all ranks meet, with c_r own work and w_r waiting, exchange included:

    step       T = max_r (c_r + w_r)
    exchange   T - max_r c_r        what the rank that comes last sees of it
    idle       max_r c_r - c_r      for the slowest rank; it is that rank's doing

`lightning_hetero.cluster.what_if` says the same of stock DDP. A pipeline's ranks idle in its bubbles, too, so there the
exchange is the one that was planned, and all else that is no work is idle. The stale engine has no common end of a
step: the least that a rank sees of the server is the exchange, and what is beyond is waiting. A rank without samples
rests because that was decided: it waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.cluster.what_if import exchange_alone
from lightning_hetero.report.run import Run, Step

__all__ = ["Spent", "Waiting", "least_wait_s", "spent_in", "waiting_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Where one rank's time went [s]."""

    compute_s: float = 0.0
    exchange_s: float = 0.0
    idle_s: float = 0.0
    rest_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exchange_s + self.idle_s + self.rest_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            compute_s=self.compute_s + other.compute_s,
            exchange_s=self.exchange_s + other.exchange_s,
            idle_s=self.idle_s + other.idle_s,
            rest_s=self.rest_s + other.rest_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Sums over the steps of a run.

    Attributes:
        ranks: what each rank's time went into.
        caused_s: by rank: how long the others idled in steps in which it was the slowest.
        steps: how many.
        early: part of the waiting that was in the first tenth of the steps, of ten steps or more; else 0.
    """

    ranks: Mapping[int, Spent]
    caused_s: Mapping[int, float]
    steps: int
    early: float = 0.0

    @property
    def total(self) -> Spent:
        return sum(self.ranks.values(), Spent())

    @property
    def waited(self) -> float:
        """Part of the ranks' time that was idle."""
        return self.total.idle_s / self.total.total_s if self.total.total_s > 0.0 else 0.0

    @property
    def exchange(self) -> float:
        """Part of the ranks' time that went into the exchange."""
        return self.total.exchange_s / self.total.total_s if self.total.total_s > 0.0 else 0.0

    @property
    def caused(self) -> tuple[int, float]:
        """The rank that most of the idling was for, and its part of all; -1: nobody idled."""
        total_s = math.fsum(self.caused_s.values())
        if not total_s > 0.0:
            return -1, 0.0
        rank = max(self.caused_s, key=lambda r: self.caused_s[r])
        return rank, self.caused_s[rank] / total_s


def least_wait_s(run: Run) -> float:
    """Returns the least that a rank of the stale engine sees of its server in a step [s]."""
    waits: dict[int, list[float]] = {}
    for step in run.steps:
        for rank, turn in step.turns.items():
            waits.setdefault(rank, []).append(turn.wait_s)
    return min((exchange_alone(own, run.ranks) for own in waits.values()), default=0.0)


def spent_in(run: Run, step: Step, *, least_s: float = 0.0) -> dict[int, Spent]:
    """Returns where the ranks' time of a step went; ``least_s``: of `least_wait_s`, for the stale engine."""
    if not run.meets:
        return {
            rank: Spent(
                compute_s=turn.compute_s,
                exchange_s=min(turn.wait_s, least_s),
                idle_s=max(0.0, turn.wait_s - least_s),
            )
            for rank, turn in step.turns.items()
        }
    step_s, most_s = step.step_s, max(turn.compute_s for turn in step.turns.values())
    exchange_s = step_s - most_s
    if run.staged:
        exchange_s = min(exchange_s, float(run.plans[-1].get("sync_s") or 0.0))
    working = {rank for rank, turn in step.turns.items() if turn.samples > 0}
    if run.staged:
        working = {rank for group in run.plans[-1]["groups"] for rank in group["ranks"]}

    def spent(rank: int, compute_s: float) -> Spent:
        left_s = step_s - exchange_s - compute_s
        rests = rank not in working
        return Spent(
            compute_s=compute_s,
            exchange_s=exchange_s,
            idle_s=0.0 if rests else left_s,
            rest_s=left_s if rests else 0.0,
        )

    return {rank: spent(rank, turn.compute_s) for rank, turn in step.turns.items()}


def waiting_of(run: Run, steps: Sequence[Step] | None = None) -> Waiting:
    """Returns the sums over the steps, by default all in which more than one rank took part."""
    chosen = [step for step in run.steps if len(step.turns) > 1 or run.ranks == 1] if steps is None else steps
    least_s = 0.0 if run.meets else least_wait_s(run)
    ranks = {rank: Spent() for rank in range(run.ranks)}
    caused_s = dict.fromkeys(range(run.ranks), 0.0)
    waited: list[float] = []
    for step in chosen:
        spent = spent_in(run, step, least_s=least_s)
        for rank, own in spent.items():
            ranks[rank] = ranks.get(rank, Spent()) + own
        waited.append(math.fsum(one.idle_s for one in spent.values()))
        caused_s[step.slowest] = caused_s.get(step.slowest, 0.0) + waited[-1]
    total_s = math.fsum(waited)
    early = math.fsum(waited[: len(waited) // 10]) / total_s if total_s > 0.0 else 0.0
    return Waiting(ranks=ranks, caused_s=caused_s, steps=len(chosen), early=early)
