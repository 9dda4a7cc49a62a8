"""Virtual queues: how much of a long-term budget is overspent so far (layer P).

After Neely (*Stochastic Network Optimization*, 2010), with a bank of savings, which is ours: a queue may fall to -B
instead of 0, so that what was saved can be spent later. Counted in batches' budgets:

    Q <- max(Q + r - 1, -B)         r = what the batch took / what it may take on average

**Why the mean is kept.** Q(t+1) >= Q(t) + r(t) - 1, so over n batches from Q(0) = 0 the mean of r is at most
1 + Q(n) / n, whatever B is. A bank only delays the moment from which Q pushes back, by at most B batches' budgets;
where B = 0, savings are forgotten at once and money is left over.
"""

from __future__ import annotations

__all__ = ["VirtualQueue"]


class VirtualQueue:
    """One constraint's queue.

    Args:
        bank: B, most that can be saved up [batches' budgets].
        value: to start from.

    >>> queue = VirtualQueue(bank=2.0)
    >>> [queue.add(ratio) for ratio in (0.0, 0.0, 0.0, 2.5, 2.5)]
    [-1.0, -2.0, -2.0, -0.5, 1.0]
    >>> queue.weight
    1.0
    """

    __slots__ = ("bank", "value")

    def __init__(self, *, bank: float, value: float = 0.0) -> None:
        self.bank, self.value = bank, value

    def add(self, ratio: float, batches: float = 1.0) -> float:
        """Adds a period of ``batches`` (by default one) which took ``ratio`` of its budget; returns the value."""
        self.value = max(self.value + (ratio - 1.0) * batches, -self.bank)
        return self.value

    @property
    def weight(self) -> float:
        """What the constraint counts in a decision: max(Q, 0)."""
        return max(self.value, 0.0)
