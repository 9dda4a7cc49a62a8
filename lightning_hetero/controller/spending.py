"""What a run spends: prices, budgets, and a virtual queue per budget of how much is overspent so far (layer P).

After Neely (*Stochastic Network Optimization*, 2010), with a bank of savings, which is ours: a queue may fall to -B
instead of 0, so that what was saved can be spent later. Counted in batches' budgets:

    Q <- max(Q + r - 1, -B)         r = what the batch took / what it may take on average

**Why the mean is kept.** Q(t+1) >= Q(t) + r(t) - 1, so over n batches from Q(0) = 0 the mean of r is at most
1 + Q(n) / n, whatever B is. A bank only delays the moment from which Q pushes back, by at most B batches' budgets;
where B = 0, savings are forgotten at once and money is left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_hetero.controller.messages import Observation
from lightning_hetero.controller.settings import HOUR_S, Budget, ControllerSettings
from lightning_hetero.solvers.placement.search import Judged

_PART = 0.02  # of all batches: V and bank; an overspending of about that part is left at the end at most
_LEAST_V, _V, _MOST_V = 10.0, 50.0, 100.0


class Weight(NamedTuple):
    """A constraint and its queue, max(Q, 0)."""

    budget: Budget
    queue: float


def queued(value: float, ratio: float, batches: float = 1.0, *, bank: float) -> float:
    """Returns one constraint's queue behind a period of ``batches`` which took ``ratio`` of its budget.

    Args:
        value: of the queue before it.
        bank: B, most that can be saved up [batches' budgets].

    >>> queued(0.0, 0.5, 2.0, bank=2.0), queued(-1.0, 0.0, 5.0, bank=2.0), queued(-2.0, 2.5, bank=2.0)
    (-1.0, -2.0, -0.5)
    """
    return max(value + (ratio - 1.0) * batches, -bank)


class Spending:
    """What one run may spend and has spent.

    Args:
        settings: budgets, prices, V and bank; V and bank by the length of the run where they are None.
        ranks: number of them.
        samples: global batch.
        planned_batches: of the whole run, if known.

    Attributes:
        v: V.
        queues: by constraint, Q.
        price_per_s: money per second by now, by rank.
        rest_cost: part of the price that is due for an idle rank.
        reference_s: T_ref; to be set to the first plan's time.
    """

    def __init__(self, settings: ControllerSettings, ranks: int, samples: int, planned_batches: int | None) -> None:
        self.budgets, self._samples = settings.budgets(), samples
        part = None if planned_batches is None else _PART * planned_batches
        least_v = 1.0 if not self.budgets else _V if part is None else min(_MOST_V, max(_LEAST_V, part))
        self.v = least_v if settings.v is None else settings.v
        self._bank = settings.bank if settings.bank is not None else _V if part is None else max(1.0, part)
        self.queues = {budget.name: 0.0 for budget in self.budgets}
        self.price_per_s = np.array(settings.prices_of(ranks)) / HOUR_S
        self.rest_cost = settings.rest_cost
        self.reference_s = 1.0

    @property
    def weights(self) -> list[Weight]:
        """The constraints with their queues, for an `Objective`."""
        return [Weight(budget, max(self.queues[budget.name], 0.0)) for budget in self.budgets]

    def reprice(self, prices: Mapping[int, float]) -> list[str]:
        """Takes in prices per hour by rank; returns in words what has changed, if money counts at all."""
        changed: list[str] = []
        for rank, per_hour in prices.items():
            before = float(self.price_per_s[rank]) * HOUR_S
            if per_hour != before:
                self.price_per_s[rank] = per_hour / HOUR_S
                if self.budgets:
                    changed.append(f"price of rank {rank} {before:g} -> {per_hour:g}")
        return changed

    def rate(self, ranks: Sequence[int]) -> float:
        """Returns the money per second that these ranks cost, and the others, which rest."""
        held = float(self.price_per_s[list(ranks)].sum())
        return held + self.rest_cost * (float(self.price_per_s.sum()) - held)

    def add(self, seen: Observation, samples: int, ranks: Sequence[int]) -> None:
        """Adds what a batch of so many samples took, on these ranks, to the queues."""
        seconds = seen.batch_s + seen.pause_s
        if not seconds > 0.0:
            return
        for budget in self.budgets:
            batches = seconds / self.reference_s if budget.per_hour else samples / self._samples
            ratio, value = budget.part(self.rate(ranks) * seconds, samples, seconds), self.queues[budget.name]
            self.queues[budget.name] = queued(value, ratio, batches, bank=self._bank)

    def saved(self, now: Judged | None, new: Judged) -> dict[str, float]:
        """Returns by constraint what a batch takes less under ``new``, as a part of its budget."""
        if now is None:
            return {}
        return {
            b.name: b.part(now.money - new.money, self._samples, now.time_s)
            for b in self.budgets
        }

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON values for `load`."""
        return {
            "queues": dict(self.queues),
            "reference_s": self.reference_s,
            "prices_per_hour": (self.price_per_s * HOUR_S).tolist(),
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        """Goes on from what `to_plain` returned; constraints that are no more are left out."""
        for name, value in plain["queues"].items():
            if name in self.queues:
                self.queues[name] = float(value)
        self.reference_s = float(plain["reference_s"])
        self.price_per_s[:] = np.array(plain["prices_per_hour"]) / HOUR_S
