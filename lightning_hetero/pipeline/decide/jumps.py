"""Whether all ranks wait, behind a batch, for what is decided on it (layer P).

To wait costs every batch what rank 0 needs for its decision and a message; not to wait, that a decision holds two
batches later. So they wait where something has just changed a lot, which all of them see in what they told one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["Jumps"]

_BATCHES = 4  # compared with one another: a change is believed when it has been measured twice
_SETTLING = 5  # batches under a plan that answers a jump: how fast devices are is known from few batches yet
_BAND = 0.15  # relative; more than steps of an unchanged device usually differ


class Jumps:
    """Compares a few batches; the same on all ranks, if what they are given is.

    >>> jumps, steady, slow = Jumps(), [(8, 0.1), (8, 0.1)], [(8, 0.1), (8, 0.2)]
    >>> sum(jumps.add(0, steady, {}) for _ in range(20))
    5
    >>> [jumps.add(0, slow, {}) for _ in range(5)]
    [True, True, True, False, False]
    >>> any(jumps.add(1, slow, {}) for _ in range(5))  # a small correction of shares
    False
    """

    def __init__(self) -> None:
        self._seconds: deque[dict[tuple[str, int], float]] = deque(maxlen=_BATCHES)
        self._generation, self._settling, self._waits = -1, 0, True

    def add(self, generation: int, work: Sequence[tuple[int, float]], rest_s: Mapping[int, float]) -> bool:
        """Takes in a batch; returns whether to wait.

        Args:
            generation: of the plan that it ran under.
            work: by rank: samples, own work [s].
            rest_s: by rank at rest: what a computation that is always the same took [s].
        """
        if generation != self._generation:
            self._generation, self._settling = generation, _SETTLING if self._waits else 0
        now = {("work", rank): work_s / n for rank, (n, work_s) in enumerate(work) if n and work_s > 0.0}
        now |= {("rest", rank): seconds for rank, seconds in rest_s.items()}
        self._seconds.append(now)
        self._waits = self._settling > 0 or self._has_jumped(now)
        self._settling = max(0, self._settling - 1)
        return self._waits

    def _has_jumped(self, now: Mapping[tuple[str, int], float]) -> bool:
        for key, value in now.items():
            values = [seconds.get(key, value) for seconds in self._seconds]
            if max(values) > (1.0 + _BAND) * min(values):
                return True
        return False
