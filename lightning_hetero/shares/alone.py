"""Which devices are worth it: those that are fastest without the others (layer P).

A slow device can cost more than it gives: what a step costs it whatever its samples, or its link in the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_hetero.solvers import minimax_none_or_least
from lightning_hetero.types import Cost


def fastest_alone(
    costs: Sequence[Cost], total: int, *, upper: Sequence[int], least: int = 1, quantum: int = 1,
    among: Sequence[Sequence[int]] = (), exchange_s: Callable[[Sequence[int]], float] = lambda ranks: 0.0,
) -> tuple[tuple[int, ...], float]:  # fmt: skip
    """Returns the ranks that a batch is best divided among if the others are left out, and its time then [s].

    Least times first that ranks need for an equal share; where several are as good, the most ranks.

    Args:
        costs: a step's own work, by rank.
        total: samples of a batch.
        upper: most samples, by rank.
        least, quantum: as in `minimax_none_or_least`.
        among: ranks that can be alone besides all of them, e.g. those of one network.
        exchange_s: what some ranks take to exchange gradients; by default nothing, where it is not known [s].
    """
    even, everyone = total / len(costs), range(len(costs))
    found: tuple[tuple[int, ...], float] = tuple(everyone), math.inf
    for ranks in (everyone, *among):
        order = sorted(ranks, key=lambda rank: costs[rank].seconds(even))
        for n in range(len(order), 0, -1):
            kept = order[:n]
            best = minimax_none_or_least(
                [costs[rank] for rank in kept], total, least=least, upper=[upper[rank] for rank in kept],
                quantum=quantum,
            )  # fmt: skip
            if best.makespan_s + exchange_s(sorted(kept)) < found[1]:
                found = tuple(kept), best.makespan_s + exchange_s(sorted(kept))
    return found
