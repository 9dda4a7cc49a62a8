"""Whether all ranks wait, behind a batch, for what is decided on it (layer P).

To wait costs every batch what rank 0 needs for its decision and a message; not to wait, that a decision holds two
batches later. So they wait where something has just changed a lot, which all of them see in what they told one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["Jumps"]

_BATCHES = 4  # compared with one another: a change is believed when it has been measured twice
_BAND = 0.15  # relative; more than steps of an unchanged device usually differ


class Jumps:
    """Compares a few batches; the same on all ranks, if what they are given is.

    >>> jumps, steady, slow = Jumps(), [(8, 0.1), (8, 0.1)], [(8, 0.1), (8, 0.2)]
    >>> [jumps.add(work, {}) for work in 4 * [steady] + 5 * [slow]]
    [True, True, True, False, True, True, True, False, False]
    """

    def __init__(self) -> None:
        self._seconds: deque[dict[tuple[str, int], float]] = deque(maxlen=_BATCHES)

    def add(self, work: Sequence[tuple[int, float]], rest_s: Mapping[int, float]) -> bool:
        """Takes in a batch; returns whether to wait.

        Args:
            work: by rank: samples, own work [s].
            rest_s: by rank at rest: what a computation that is always the same took [s].
        """
        now = {("work", rank): work_s / n for rank, (n, work_s) in enumerate(work) if n and work_s > 0.0}
        now |= {("rest", rank): seconds for rank, seconds in rest_s.items()}
        self._seconds.append(now)
        if len(self._seconds) < _BATCHES:
            return True
        for key, value in now.items():
            values = [seconds.get(key, value) for seconds in self._seconds]
            if max(values) > (1.0 + _BAND) * min(values):
                return True
        return False
