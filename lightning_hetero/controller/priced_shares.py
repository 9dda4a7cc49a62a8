"""Whole samples per group where groups differ in what a sample costs (layer P).

Minimises ``alpha max_g T_g(n_g) + sum gamma_g n_g`` over n_g >= 1 that sum up to N. For a given deadline z the best is
greedy: the cheapest group takes all it does by z, then the next. And the best deadline is some T_g(n): so all of them
are tried at once, in arrays. Exact, since T_g never decreases. Where all gamma are equal it is `pipes.share`'s
problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.placement.pipes import PipeCost


def priced_shares(
    tables: Sequence[Floats], samples: int, alpha: float, gamma: Sequence[float]
) -> tuple[list[int], float]:
    """Returns the samples of each group and when the slowest is done [s]; none and ``inf`` if it cannot be.

    Args:
        tables: T_g(1), T_g(2), ... as far as samples fit, see `times_of`.
        samples: N.
        alpha: weight of the time, >= 0.
        gamma: weight of a sample, by group.

    >>> import numpy as np
    >>> fast, cheap = np.arange(1.0, 9.0), 3.0 * np.arange(1.0, 9.0)
    >>> priced_shares([fast, cheap], 8, 1.0, [0.0, 0.0])  # the earliest end
    ([6, 2], 6.0)
    >>> priced_shares([fast, cheap], 8, 1.0, [5.0, 0.0])  # 5 for each sample of the fast one
    ([1, 7], 21.0)
    """
    groups = len(tables)
    if samples < groups or min(map(len, tables)) < 1 or sum(map(len, tables)) < samples:
        return [], math.inf
    tables = [table[: samples - groups + 1] for table in tables]
    deadlines = np.unique(np.concatenate(tables))
    deadlines = deadlines[deadlines >= max(table[0] for table in tables)]
    left = np.full(len(deadlines), samples - groups, dtype=np.int64)
    value: Floats = alpha * deadlines + sum(gamma)
    given = np.ones((groups, len(deadlines)), dtype=np.int64)
    for g in sorted(range(groups), key=lambda g: (gamma[g], g)):
        more = np.minimum(np.searchsorted(tables[g], deadlines, side="right") - 1, left)
        given[g] += more
        left -= more
        value = value + gamma[g] * more
    value[left > 0] = math.inf
    best = int(np.argmin(value))
    if not value[best] < math.inf:
        return [], math.inf
    shares = [int(n) for n in given[:, best]]
    return shares, max(float(table[n - 1]) for table, n in zip(tables, shares, strict=True))


def times_of(cost: PipeCost, samples: int) -> Floats:
    """Returns T(1), T(2), ... of a group for up to ``samples``, as many as fit."""
    times = np.array([cost.seconds(n) for n in range(1, min(samples, cost.most) + 1)])
    return np.maximum.accumulate(times) if len(times) else times
