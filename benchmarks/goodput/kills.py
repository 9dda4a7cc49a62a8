"""When workers are killed, and when their machines are there again: the same for all systems (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Outage", "outages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A machine goes and comes again.

    Attributes:
        rank: whose machine.
        at_s: when it goes [s], from when the job was started.
        back_s: when a process can be started on it again [s].
    """

    rank: int
    at_s: float
    back_s: float


def outages(ranks: Sequence[int], between_s: float, repair_s: float, until_s: float, seed: int) -> list[Outage]:
    """Returns Poisson outages, by time.

    Args:
        ranks: whose machines go; each at the same rate, while it is there.
        between_s: mean time between two outages of the job, were all machines there [s].
        repair_s: how long a machine is away [s].
        until_s: none begins later [s].
        seed: of their times.
    """
    found: list[Outage] = []
    for rank in ranks:
        random = np.random.default_rng([seed, rank])
        at_s = random.exponential(between_s * len(ranks))
        while at_s < until_s:
            found.append(Outage(rank=rank, at_s=at_s, back_s=at_s + repair_s))
            at_s += repair_s + random.exponential(between_s * len(ranks))
    return sorted(found, key=lambda one: one.at_s)
