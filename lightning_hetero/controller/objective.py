"""What a plan is worth under the budget: drift plus penalty (layer P).

Each batch, minimise

    J = V T' / T_ref + sum over constraints of max(Q_k, 0) r_k          T' = T + pause / H

T is the modelled time of a batch, ``pause`` what it takes to get to the plan, H how many batches the present state
should last, T_ref the first plan's time. r_k is what a batch takes of constraint k as a part of its budget:

    per sample   C / (N limit)
    per hour     (C - limit T') / (limit T_ref) + 1     (the queue counts batches of length T_ref)

and C = T' * prices of the ranks in use (+ a part of those of idle ones), so that J = alpha T' for a given structure:
the shares that are best for the time are best.

**Per hour** alpha can be negative: a slower plan, at the same money, spends less per hour. It would then pay to dawdle.
So the weight of time never falls below a hundredth of V / T_ref, and a plan that is slower and no cheaper per batch
is refused (`accepts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.controller.settings import HOUR_S, Budget
from lightning_hetero.controller.spending import Spending
from lightning_hetero.solvers.placement.pipes import Pipe, Problem, share
from lightning_hetero.solvers.placement.search import BatchTime, Judged
from lightning_hetero.solvers.placement.sync import sync_s

_ROUNDING = 1e-9
_LEAST = 0.01  # part of its own weight that time has at least


class Objective(BatchTime):
    """J under the present state; judges structures.

    Args:
        problem: model and cluster as they are now.
        spending: prices, constraints and their queues, V and T_ref.
        present: the plan in force: migrations start from it.
        migration: how long they take.
        horizon: H, batches.
        known: shares that are best for the time, by structure; kept as long as ``problem`` is.
    """

    def __init__(
        self, problem: Problem, spending: Spending, *, present: Sequence[Pipe], migration: MigrationModel,
        horizon: float, known: dict[tuple[Pipe, ...], tuple[list[int], float]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(problem)
        self.present = tuple(present)
        self._spending, self._weights = spending, [weight for weight in spending.weights if weight.queue > 0.0]
        self._per_time = spending.v / spending.reference_s
        self._migration, self._horizon = migration, horizon
        self._known = {} if known is None else known

    # ---- J ----

    def _rate(self, pipes: Sequence[Pipe]) -> float:
        """Returns the money that the structure costs per second."""
        return self._spending.rate([rank for pipe in pipes for rank in pipe.ranks])

    def _alpha(self, rate: float) -> float:
        """Returns the weight of a second that costs ``rate``."""
        alpha = self._per_time
        for budget, queue in self._weights:
            alpha += queue * self._part(budget, 1.0) * (rate - (budget.limit / HOUR_S if budget.per_hour else 0.0))
        return max(alpha, _LEAST * self._per_time)

    def scale_at(self, judged: Judged) -> float:
        """Returns a size of J to measure gains against: that of a structure, its pause and per-hour limits left out."""
        size = self._per_time * judged.time_s
        return size + sum(queue * self._part(of, judged.money) for of, queue in self._weights)

    def _part(self, budget: Budget, amount: float) -> float:
        return budget.part(amount, self.problem.samples, self._spending.reference_s)

    def judge(self, pipes: Sequence[Pipe], limit: float = math.inf) -> Judged | None:
        """Returns the structure with its best shares; None if it does not fit, or J is not below ``limit``."""
        pipes = tuple(pipes)
        if pipes not in self._known:
            self._known[pipes] = share([self.problem.cost(pipe) for pipe in pipes], self.problem.samples)
        shares, compute_s = self._known[pipes]
        if not shares:
            return None
        judged = self._judged(pipes, shares, compute_s)
        return judged if judged.value < limit else None

    def at(self, pipes: Sequence[Pipe], shares: Sequence[int]) -> Judged | None:
        """Returns the structure with these shares; None if they do not fit."""
        compute_s = max(self.problem.cost(pipe).seconds(n) for pipe, n in zip(pipes, shares, strict=True))
        return None if compute_s == math.inf else self._judged(tuple(pipes), shares, compute_s)

    def _judged(self, pipes: tuple[Pipe, ...], shares: Sequence[int], compute_s: float) -> Judged:
        rate, time_s = self._rate(pipes), compute_s + sync_s(self.problem, pipes)
        pause_s = self._migration.pause_s(self.problem, self.present, pipes)
        value = self._alpha(rate) * (time_s + pause_s / self._horizon)
        return Judged(value, pipes, tuple(shares), time_s, pause_s, rate * time_s)

    def accepts(self, new: Judged, old: Judged) -> bool:
        """Returns whether ``new`` is faster than ``old``, or saves something that counts now."""
        if new.time_s <= old.time_s * (1.0 + _ROUNDING):
            return True
        return bool(self._weights) and new.money < old.money * (1.0 - _ROUNDING)
