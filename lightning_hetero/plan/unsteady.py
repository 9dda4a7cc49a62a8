"""Devices whose times differ from step to step: what waiting for the slowest, or following it, then costs (layer P).

A barrier takes the mean of the maximum, not the maximum of the means. Steps follow one another as they were measured,
again and again; nothing is assumed of how they are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lightning_hetero.plan.setup import Setup
from lightning_hetero.shares import replay
from lightning_hetero.shares.policy import BalancePolicy

__all__ = ["followed_s", "slowest_s"]

_ROUNDS = 3  # through the series; the first is not counted


def slowest_s(setup: Setup, work_s: Sequence[float]) -> float:
    """Returns the mean time of the slowest rank's work, with the same work in every step [s]."""
    return fmean(
        max(setup.slowness_at(rank, step) * seconds for rank, seconds in enumerate(work_s))
        for step in range(setup.series)
    )


def followed_s(setup: Setup, policy: BalancePolicy) -> float:
    """Returns the mean time of the slowest rank's work while the balanced engine's policy decides the shares [s].

    Args:
        setup: what is asked about; ranks hold their shares in one piece.
        policy: under way; it goes on.
    """
    costs, steps = setup.step_costs(), setup.series
    taken_s = replay.followed_s(
        policy, lambda rank, step, n: costs[rank].seconds(n) * setup.slowness_at(rank, step), _ROUNDS * steps
    )
    return fmean(taken_s[steps:])
