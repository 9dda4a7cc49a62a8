"""What a plan is worth under the budget: drift plus penalty (layer P).

Each batch, minimise

    J = V T' / T_ref + sum over constraints of max(Q_k, 0) r_k          T' = T + pause / H

T is the modelled time of a batch, ``pause`` what it takes to get to the plan, H how many batches the present state
should last, T_ref the first plan's time. r_k is what a batch takes of constraint k as a part of its budget:

    per sample   C / (N limit)
    per hour     (C - limit T') / (limit T_ref) + 1     (the queue counts batches of length T_ref)

and what a batch takes is linear in the time and the samples of the groups:

    money     T' * prices of the ranks in use (+ a part of those of idle ones)
    energy    T' * idle power, + (power - idle power) * own work
    traffic   activations and gradients on links, + synchronisation

so that J = alpha T' + sum gamma_g n_g + rest for a given structure, which `Objective.judge` minimises exactly.

**Per hour** alpha can be negative: a slower plan, at the same money, spends less per hour. It would then pay to dawdle.
So the weight of time never falls below a hundredth of V / T_ref, and a plan that is slower and no cheaper per batch
is refused (`accepts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.controller.priced_shares import priced_shares, times_of
from lightning_hetero.controller.settings import HOUR_S, Budget, Resource
from lightning_hetero.controller.spending import Spending, Use
from lightning_hetero.solvers.chain.layers import Floats
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
        self._tables: dict[Pipe, Floats] = {}

    # ---- resources ----

    def use(self, resource: Resource, pipes: Sequence[Pipe]) -> Use:
        """Returns what a batch takes of ``resource``."""
        spending, per_sample = self._spending, (0.0,) * len(pipes)
        if resource != "money":
            per_sample = tuple(self._per_sample(resource, pipe) for pipe in pipes)
        if resource == "traffic":
            size = float(self.problem.param_bytes[-1]) + self.problem.outside.param_bytes
            return Use(0.0, per_sample, 2.0 * (len(pipes) - 1) * size)
        rates = spending.price_per_s if resource == "money" else spending.idle_power_w
        held = float(rates[[rank for pipe in pipes for rank in pipe.ranks]].sum())
        return Use(held + spending.rest_cost * (float(rates.sum()) - held), per_sample, 0.0)

    def _per_sample(self, resource: Resource, pipe: Pipe) -> float:
        problem, cuts, ranks = self.problem, np.array(pipe.cuts), np.array(pipe.ranks)
        if resource == "traffic":
            return 2.0 * float(problem.one.cut_sizes[cuts[1:]].sum()) if len(ranks) > 1 else 0.0
        size = problem.cost(pipe).size(problem.part(pipe.ranks))
        work = np.diff(problem.work_s[:, cuts], axis=1)
        work[:, 0] += problem.outside_s
        busy_s = (work[0] / size + work[1]) / problem.speeds[ranks]
        return float(busy_s @ (self._spending.power_w - self._spending.idle_power_w)[ranks])

    # ---- J ----

    def _terms(self, pipes: Sequence[Pipe]) -> tuple[float, list[float], float]:
        """Returns alpha, gamma by group, and what does not depend on the shares."""
        alpha, gamma, rest = self._per_time, [0.0] * len(pipes), 0.0
        for budget, queue in self._weights:
            use, scale = self.use(budget.resource, pipes), queue * self._part(budget, 1.0)
            alpha += scale * (use.per_s - (budget.limit / HOUR_S if budget.per_hour else 0.0))
            rest += scale * use.fixed
            for i, per_sample in enumerate(use.per_sample):
                gamma[i] += scale * per_sample
        return max(alpha, _LEAST * self._per_time), gamma, rest

    def scale_at(self, judged: Judged) -> float:
        """Returns a size of J to measure gains against: that of a structure, its pause and per-hour limits left out."""
        size = self._per_time * judged.time_s
        return size + sum(queue * self._part(of, judged.amounts[of.resource]) for of, queue in self._weights)

    def _part(self, budget: Budget, amount: float) -> float:
        return budget.part(amount, self.problem.samples, self._spending.reference_s)

    def judge(self, pipes: Sequence[Pipe], limit: float = math.inf) -> Judged | None:
        """Returns the structure with its best shares; None if it does not fit, or J is not below ``limit``."""
        problem, pipes = self.problem, tuple(pipes)
        alpha, gamma, _ = self._terms(pipes)
        if max(gamma) > min(gamma):
            tables = [self._table(pipe) for pipe in pipes]
            shares, compute_s = priced_shares(tables, problem.samples, alpha, gamma)
        else:
            if pipes not in self._known:
                self._known[pipes] = share([problem.cost(pipe) for pipe in pipes], problem.samples)
            shares, compute_s = self._known[pipes]
        if not shares:
            return None
        judged = self._judged(pipes, shares, compute_s)
        return judged if judged.value < limit else None

    def _table(self, pipe: Pipe) -> Floats:
        if pipe not in self._tables:
            self._tables[pipe] = times_of(self.problem.cost(pipe), self.problem.samples)
        return self._tables[pipe]

    def at(self, pipes: Sequence[Pipe], shares: Sequence[int]) -> Judged | None:
        """Returns the structure with these shares; None if they do not fit."""
        compute_s = max(self.problem.cost(pipe).seconds(n) for pipe, n in zip(pipes, shares, strict=True))
        return None if compute_s == math.inf else self._judged(tuple(pipes), shares, compute_s)

    def _judged(self, pipes: tuple[Pipe, ...], shares: Sequence[int], compute_s: float) -> Judged:
        alpha, gamma, rest = self._terms(pipes)
        time_s = compute_s + sync_s(self.problem, pipes)
        pause_s = self._migration.pause_s(self.problem, self.present, pipes)
        value = alpha * (time_s + pause_s / self._horizon) + rest
        value += sum(c * n for c, n in zip(gamma, shares, strict=True))
        resources: set[Resource] = {budget.resource for budget in self._spending.budgets}
        amounts: dict[Resource, float] = {r: self.use(r, pipes).amount(time_s, shares) for r in resources}
        return Judged(value, pipes, tuple(shares), time_s, pause_s, amounts)

    def accepts(self, new: Judged, old: Judged) -> bool:
        """Returns whether ``new`` is faster than ``old``, or saves something that counts now."""
        if new.time_s <= old.time_s * (1.0 + _ROUNDING):
            return True
        saved: list[Resource] = [weight.budget.resource for weight in self._weights]
        return any(new.amounts[r] < old.amounts[r] * (1.0 - _ROUNDING) for r in saved)
