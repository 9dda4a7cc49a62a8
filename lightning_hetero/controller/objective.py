"""What a plan is worth under the budget: drift plus penalty (layer P).

Each batch, minimise

    J = V T' / T_ref + sum over constraints of max(Q_k, 0) r_k          T' = T + pause / H

T is the modelled time of a batch, ``pause`` what it takes to get to the plan, H how many batches the present state
should last, T_ref the first plan's time. r_k is what a batch takes of constraint k as a part of its budget:

    per sample   C / (N limit)
    per hour     (C - limit T') / (limit T_ref) + 1     (the queue counts batches of length T_ref)

and what a batch takes is linear in the time and the samples of the groups:

    money     T' * prices of the ranks in use (+ a part of those at rest)
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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.controller.priced_shares import priced_shares, times_of
from lightning_hetero.controller.settings import Budget, Resource
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.search import Judged
from lightning_hetero.solvers.placement.shares import level, share
from lightning_hetero.solvers.placement.sync import sync_s

_HOUR_S = 3600.0
_ROUNDING = 1e-9
_LEAST = 0.01  # part of its own weight that time has at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What ranks cost.

    Attributes:
        per_s: money per second, by rank.
        power_w: while it computes, by rank.
        idle_power_w: while it is held and does not compute, by rank.
        rest_cost: part of price and idle power that is due for a rank at rest.
    """

    per_s: Floats
    power_w: Floats
    idle_power_w: Floats
    rest_cost: float


class Weight(NamedTuple):
    """A constraint and its queue, max(Q, 0)."""

    budget: Budget
    queue: float


class Use(NamedTuple):
    """What a batch takes of a resource: per second, per sample of each group, and in any case."""

    per_s: float
    per_sample: tuple[float, ...]
    fixed: float

    def amount(self, seconds: float, shares: Sequence[int]) -> float:
        return self.per_s * seconds + sum(c * n for c, n in zip(self.per_sample, shares, strict=True)) + self.fixed


class Objective:
    """J under the present state; judges structures.

    Args:
        problem: model and cluster as they are now.
        prices: of the ranks.
        weights: constraints and queues; none: time alone.
        v: V.
        reference_s: T_ref.
        present: the plan in force: migrations start from it.
        migration: how long they take.
        horizon: H, batches.
        known: shares that are best for the time, by structure; kept as long as ``problem`` is.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        prices: Prices,
        weights: Sequence[Weight] = (),
        v: float = 1.0,
        reference_s: float,
        present: Sequence[Pipe],
        migration: MigrationModel,
        horizon: float,
        known: dict[tuple[Pipe, ...], tuple[list[int], float]] | None = None,
    ) -> None:
        self.problem, self.present = problem, tuple(present)
        self._prices, self._weights = prices, [w for w in weights if w.queue > 0.0]
        self._constraints = tuple(w.budget for w in weights)
        self._v, self._reference_s = v, reference_s
        self._migration, self._horizon = migration, horizon
        self._known = {} if known is None else known
        self._pieces: dict[tuple[Resource, Pipe], float] = {}
        self._tables: dict[Pipe, Floats] = {}

    # ---- resources ----

    def use(self, resource: Resource, pipes: Sequence[Pipe]) -> Use:
        """Returns what a batch takes of ``resource``."""
        prices, used = self._prices, [rank for pipe in pipes for rank in pipe.ranks]
        if resource == "traffic":
            per_sample = tuple(self._per_sample(resource, pipe) for pipe in pipes)
            size = float(self.problem.param_bytes[-1]) + self.problem.outside.param_bytes
            return Use(0.0, per_sample, 2.0 * (len(pipes) - 1) * size)
        rates = prices.per_s if resource == "money" else prices.idle_power_w
        held = float(rates[used].sum())
        per_s = held + prices.rest_cost * (float(rates.sum()) - held)
        if resource == "money":
            return Use(per_s, (0.0,) * len(pipes), 0.0)
        return Use(per_s, tuple(self._per_sample(resource, pipe) for pipe in pipes), 0.0)

    def _per_sample(self, resource: Resource, pipe: Pipe) -> float:
        found = self._pieces.get((resource, pipe))
        if found is not None:
            return found
        problem, cuts, ranks = self.problem, np.array(pipe.cuts), np.array(pipe.ranks)
        if resource == "traffic":
            value = 2.0 * float(problem.one.cut_sizes[cuts[1:]].sum()) if len(ranks) > 1 else 0.0
        else:
            part = problem.part(pipe.ranks)
            size = problem.cost(pipe).size(part)
            work = np.diff(problem.work_s[:, cuts], axis=1)
            work[:, 0] += problem.outside_s
            busy_s = (work[0] / size + work[1]) / problem.speeds[ranks]
            value = float(busy_s @ (self._prices.power_w[ranks] - self._prices.idle_power_w[ranks]))
        self._pieces[resource, pipe] = value
        return value

    # ---- J ----

    def _terms(self, pipes: Sequence[Pipe]) -> tuple[float, list[float], float]:
        """Returns alpha, gamma by group, and what does not depend on the shares."""
        alpha, gamma, rest = self._v / self._reference_s, [0.0] * len(pipes), 0.0
        for (_, resource, per_hour, limit), queue in self._weights:
            use = self.use(resource, pipes)
            per_s = limit / _HOUR_S
            scale = queue / (per_s * self._reference_s if per_hour else limit * self.problem.samples)
            alpha += scale * (use.per_s - (per_s if per_hour else 0.0))
            rest += scale * use.fixed
            for i, per_sample in enumerate(use.per_sample):
                gamma[i] += scale * per_sample
        return max(alpha, _LEAST * self._v / self._reference_s), gamma, rest

    def scale_at(self, judged: Judged) -> float:
        """Returns a size of J to measure gains against: that of a structure, its pause and per-hour limits left out."""
        size = self._v * judged.time_s / self._reference_s
        for (_, resource, per_hour, limit), queue in self._weights:
            budget = limit / _HOUR_S * self._reference_s if per_hour else limit * self.problem.samples
            size += queue * judged.amounts[resource] / budget
        return size

    def judge(self, pipes: Sequence[Pipe], limit: float = math.inf) -> Judged | None:
        """Returns the structure with its best shares; None if it does not fit, or J is not below ``limit``."""
        problem, pipes = self.problem, tuple(pipes)
        alpha, gamma, rest = self._terms(pipes)
        if max(gamma) > min(gamma):
            tables = [self._table(pipe) for pipe in pipes]
            shares, compute_s = priced_shares(tables, problem.samples, alpha, gamma)
        else:
            if pipes not in self._known:
                self._known[pipes] = share([problem.cost(pipe) for pipe in pipes], problem.samples)
            shares, compute_s = self._known[pipes]
        if not shares:
            return None
        pause_s = self._migration.pause_s(problem, self.present, pipes)
        wire_s = sync_s(problem, pipes)
        value = alpha * (compute_s + wire_s + pause_s / self._horizon) + rest
        value += sum(c * n for c, n in zip(gamma, shares, strict=True))
        if not value < limit:
            return None
        return self._judged(value, pipes, shares, compute_s + wire_s, pause_s)

    def estimate(self, pipes: Sequence[Pipe], limit: float = math.inf) -> float:
        """Returns about J, with fractional shares; ``inf`` if the structure does not fit or is not below ``limit``.

        A lower bound of J where memory is not short: it tells which structures are worth to be judged.
        """
        problem = self.problem
        alpha, gamma, rest = self._terms(pipes)
        value = rest + min(gamma) * problem.samples
        value += alpha * level([problem.cost(pipe) for pipe in pipes], problem.samples)
        if value < limit:
            value += alpha * sync_s(problem, pipes)
        if value < limit:
            value += alpha * self._migration.pause_s(problem, self.present, pipes) / self._horizon
        return value if value < limit else math.inf

    def _table(self, pipe: Pipe) -> Floats:
        found = self._tables.get(pipe)
        if found is None:
            found = self._tables[pipe] = times_of(self.problem.cost(pipe), self.problem.samples)
        return found

    def at(self, pipes: Sequence[Pipe], shares: Sequence[int]) -> Judged | None:
        """Returns the structure with these shares; None if they do not fit."""
        problem, pipes = self.problem, tuple(pipes)
        compute_s = max(problem.cost(pipe).seconds(n) for pipe, n in zip(pipes, shares, strict=True))
        if compute_s == math.inf:
            return None
        alpha, gamma, rest = self._terms(pipes)
        time_s = compute_s + sync_s(problem, pipes)
        pause_s = self._migration.pause_s(problem, self.present, pipes)
        value = alpha * (time_s + pause_s / self._horizon) + rest
        value += sum(c * n for c, n in zip(gamma, shares, strict=True))
        return self._judged(value, pipes, shares, time_s, pause_s)

    def _judged(
        self, value: float, pipes: tuple[Pipe, ...], shares: Sequence[int], time_s: float, pause_s: float
    ) -> Judged:
        resources: set[Resource] = {budget.resource for budget in self._constraints}
        amounts: dict[Resource, float] = {r: self.use(r, pipes).amount(time_s, shares) for r in resources}
        return Judged(value, pipes, tuple(shares), time_s, pause_s, amounts)

    def accepts(self, new: Judged, old: Judged) -> bool:
        """Returns whether ``new`` is faster than ``old``, or saves something that counts now."""
        if new.time_s <= old.time_s * (1.0 + _ROUNDING):
            return True
        saved: list[Resource] = [weight.budget.resource for weight in self._weights]
        return any(new.amounts[r] < old.amounts[r] * (1.0 - _ROUNDING) for r in saved)
