"""What the balanced engine's policy would have made of given times (layer P)."""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import SpeedSample


def followed_s(policy: BalancePolicy, seconds: Callable[[int, int, int], float], steps: int) -> list[float]:
    """Returns the time of the slowest rank's work in each step, while the policy decides the shares [s].

    Measurements are evaluated while gradients travel, so they count from the batch after the next; urgent ones at once.
    So it is in training.

    Args:
        policy: under way; it goes on.
        seconds: of a rank's work in a step, for so many samples.
        steps: number of them.

    >>> from lightning_hetero.shares.bounds import ShareBounds
    >>> policy = BalancePolicy()
    >>> policy.start(world_size=2, total=12, bounds=ShareBounds())
    >>> taken_s = followed_s(policy, lambda rank, step, samples: (1, 2)[rank] * samples, 20)
    >>> taken_s[0], taken_s[-1], policy.shares
    (12, 8, (8, 4))
    """
    taken_s: list[float] = []
    late: list[SpeedSample] = []
    for step in range(steps):
        held = [max(n, 1) for n in policy.shares]  # a rank without samples trains one that counts nothing
        compute_s = [seconds(rank, step, n) for rank, n in enumerate(held)]
        taken_s.append(max(compute_s))
        records = [
            SpeedSample(rank=rank, step=step, samples=n, compute_s=s)
            for rank, (n, s) in enumerate(zip(held, compute_s, strict=True))
        ]
        if late:
            policy.observe(late)
            late = []
        if policy.urgent(held, compute_s):
            policy.observe(records)
        else:
            late = records
    return taken_s
