"""Whole samples per group where groups differ in what a sample costs (layer P).

Minimises ``alpha max_g T_g(n_g) + sum gamma_g n_g`` over n_g >= 1 that sum up to N. For a given deadline z the best is
greedy: the cheapest group takes all it does by z, then the next. And the best deadline is some T_g(n): so all of them
are tried at once, in arrays. Exact, since T_g never decreases. Where all gamma are equal it is `shares.share`'s problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.pipes import PipeCost

__all__ = ["priced_shares"]


def priced_shares(
    costs: Sequence[PipeCost], samples: int, alpha: float, gamma: Sequence[float]
) -> tuple[list[int], float]:
    """Returns the samples of each group and when the slowest is done [s]; none and ``inf`` if it cannot be.

    Args:
        costs: T_g.
        samples: N.
        alpha: weight of the time, >= 0.
        gamma: weight of a sample, by group.
    """
    most = samples - len(costs) + 1
    if most < 1 or any(cost.most < 1 for cost in costs) or sum(cost.most for cost in costs) < samples:
        return [], math.inf
    tables = [_table(cost, min(most, cost.most)) for cost in costs]
    deadlines = np.unique(np.concatenate(tables))
    deadlines = deadlines[deadlines >= max(table[0] for table in tables)]
    by_cost = sorted(range(len(costs)), key=lambda g: (gamma[g], g))
    left = np.full(len(deadlines), samples - len(costs), dtype=np.int64)
    value: Floats = alpha * deadlines + sum(gamma)
    given = np.ones((len(costs), len(deadlines)), dtype=np.int64)
    for g in by_cost:
        more = np.minimum(np.searchsorted(tables[g], deadlines, side="right") - 1, left)
        given[g] += more
        left -= more
        value = value + gamma[g] * more
    value[left > 0] = math.inf
    best = int(np.argmin(value))
    if not value[best] < math.inf:
        return [], math.inf
    shares = [int(n) for n in given[:, best]]
    return shares, max(cost.seconds(n) for cost, n in zip(costs, shares, strict=True))


def _table(cost: PipeCost, most: int) -> Floats:
    """Returns T(1), ..., T(most)."""
    return np.maximum.accumulate([cost.seconds(n) for n in range(1, most + 1)])
