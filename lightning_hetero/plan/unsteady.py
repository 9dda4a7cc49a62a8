"""Devices whose times differ from step to step: what waiting for the slowest, or following it, then costs (layer P).

A barrier takes the mean of the maximum, not the maximum of the means. Steps follow one another as they were measured,
again and again; nothing is assumed of how they are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lightning_hetero.plan.setup import Setup
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import SpeedSample

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
    taken_s: list[float] = []
    late: list[SpeedSample] = []
    for step in range(_ROUNDS * steps):
        compute_s = [
            cost.seconds(max(n, 1)) * setup.slowness_at(rank, step)
            for rank, (cost, n) in enumerate(zip(costs, policy.shares, strict=True))
        ]
        taken_s.append(max(compute_s))
        records = [
            SpeedSample(rank=rank, step=step, samples=max(n, 1), compute_s=seconds)
            for rank, (n, seconds) in enumerate(zip(policy.shares, compute_s, strict=True))
        ]
        if late:  # evaluated while gradients travel, so it counts from the batch after the next
            policy.observe(late)
            late = []
        if policy.urgent([r.samples for r in records], compute_s):
            policy.observe(records)
        else:
            late = records
    return fmean(taken_s[steps:])
