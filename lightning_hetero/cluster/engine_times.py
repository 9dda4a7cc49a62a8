"""What engines take when each rank's times are given: the planner, the report and the monitor all ask here (layer P).

Where times differ from step to step, a barrier takes the mean of the maximum, not the maximum of the means: the steps
follow one another as they were measured, again and again; nothing is assumed of how they are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from lightning_hetero.record.costs import RecordedCosts
from lightning_hetero.shares import replay
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers.minimax import fractional_s
from lightning_hetero.types import AffineCost, Cost, SpeedSample

OVERHEAD = 1.03  # of an update of the stale engine, over ranks that never wait: what its policy wastes or holds back
LOOPS = {"ddp": 2.2, "balanced": 2.7, "stale": 3.7, "pipeline": 4.4}
"""Processor time of a step that computes next to nothing under each engine, the server's included, over Lightning's on
one device: both are bookkeeping, so the machine cancels out. By ``python -m benchmarks.planner --only bookkeeping``."""
_MOST_STEPS = 400
_SETTLED = 30  # records without a change of shares: evidence grows with them
_ROUNDS = 2  # through the series of unsteady times; the first is not counted

Series = Sequence[Sequence[float]]
"""By rank, times of successive steps over what their costs say; empty: always as these say."""


def slowest_s(work_s: Sequence[float], slowness: Series) -> float:
    """Returns the mean time of the slowest rank's work, with the same work in every step [s]."""
    steps = zip(*slowness, strict=True) if slowness else [[1.0] * len(work_s)]
    return fmean(max(s * at for s, at in zip(work_s, step, strict=True)) for step in steps)


def settled(
    costs: Sequence[AffineCost], batch: int, caps: Sequence[int] = (), lower: int | None = None
) -> tuple[BalancePolicy, int]:
    """Lets the balanced engine's default policy decide on exact times until its shares stay.

    Args:
        costs: by rank.
        batch: samples to share.
        caps: how many samples each rank's memory holds; a larger share is computed in pieces. Empty: all of them.
        lower: least samples per rank; None: the engine's default.

    Returns:
        The policy, and after how many steps its shares stayed.

    Raises:
        ValueError: these samples cannot be shared, e.g. there are fewer than ranks.
    """
    caps = caps or [batch] * len(costs)
    policy, since = BalancePolicy(), 0
    policy.start(world_size=len(costs), total=batch, bounds=ShareBounds(lower=lower))
    limits = [None if most == batch else most for most in caps]
    for step in range(_MOST_STEPS):
        shares = policy.shares
        times_s = list(map(in_pieces_s, costs, shares, caps))
        policy.limit(limits, list(map(min, shares, caps)), times_s)  # shown to fit is what memory holds of a share
        taken = enumerate(zip(shares, times_s, strict=True))
        policy.observe([SpeedSample(rank=r, step=step, samples=n, compute_s=s) for r, (n, s) in taken])
        if policy.shares != shares:
            since = step + 1
        elif step - since >= _SETTLED:
            break
    return policy, since


def in_pieces_s(cost: AffineCost, samples: int, most: int) -> float:
    """Returns the time of a share whose pieces have at most ``most`` samples; a rank without any computes a dummy.

    >>> cost = AffineCost(fixed_s=1.0, per_sample_s=1.0)
    >>> in_pieces_s(cost, 5, 5), in_pieces_s(cost, 5, 2), in_pieces_s(cost, 0, 5)
    (6.0, 8.0, 2.0)
    """
    if samples <= most:
        return cost.seconds(max(samples, 1))
    full, rest = divmod(samples, most)
    return full * cost.seconds(most) + (cost.seconds(rest) if rest else 0.0)


def shared_s(policy: BalancePolicy, costs: Sequence[AffineCost], slowness: Series) -> float:
    """Returns the mean time of the slowest rank's work while the policy, settled, goes on deciding [s]."""
    series = len(slowness[0])
    taken_s = replay.followed_s(
        policy, lambda rank, step, n: costs[rank].seconds(n) * slowness[rank][step % series], _ROUNDS * series
    )
    return fmean(taken_s[series:])


def never_waiting(lines: Sequence[AffineCost], slowness: Series, transfers_s: Sequence[float]) -> list[AffineCost]:
    """Returns what chunks of samples cost ranks that never wait, their messages to and from a server included."""
    times = [fmean(own) for own in slowness] or [1.0] * len(lines)
    slowed = [line.times(factor) for line, factor in zip(lines, times, strict=True)]
    return [replace(cost, fixed_s=cost.fixed_s + s) for cost, s in zip(slowed, transfers_s, strict=True)]


def least_s(costs: Sequence[Cost], total: float) -> float:
    """Returns the least time in which workers that never rest compute so many samples, fractions allowed [s].

    A worker that is given nothing pays nothing.

    >>> fast, slow = AffineCost(fixed_s=0.0, per_sample_s=1.0), AffineCost(fixed_s=9.0, per_sample_s=1.0)
    >>> round(least_s([fast, slow], 8.0), 9), round(least_s([fast, fast], 8.0), 9)
    (8.0, 4.0)
    """
    return fractional_s(costs, total, [0.0] * len(costs), [total] * len(costs))


def ddp_s(costs: RecordedCosts, batch: int) -> float:
    """Returns what a global batch would take under stock DDP: equal shares; one rank has no exchange [s]."""
    ranks = len(costs.lines)
    equal_s = [line.seconds(-(-batch // ranks)) for line in costs.lines]
    return slowest_s(equal_s, costs.slowness) + (costs.rest_s if ranks > 1 else 0.0)


def would_take_s(costs: RecordedCosts, batch: int) -> dict[str, float]:
    """Returns what a global batch would take under DDP, the balanced and the stale engine, by name [s].

    The planner says the same of the same costs, where all ranks can hold what they get.
    """
    chunks = never_waiting(costs.lines, costs.slowness, [costs.rest_s] * len(costs.lines))
    return {
        "ddp": ddp_s(costs, batch),
        "balanced": shared_s(settled(costs.lines, batch)[0], costs.lines, costs.slowness) + costs.rest_s,
        "stale": OVERHEAD * least_s(chunks, batch),
    }
