"""Whether plans follow the present speeds, or the usual ones where slow spells pass before a plan holds (layer P).

Two plans are compared in each batch, and neither need be the one in force: the best one for the speeds that were
measured last when a plan for this batch was due, and the best one for the usual speeds of that time. What the first
would have saved goes into an account. As long as the account is not below zero, plans follow the present speeds.

A spell costs the follower the batches from its end until the next plan holds. A change that lasts costs it no more
than the other plan and saves time from then on. So the account falls where spells are shorter than the delay, and has
grown again a few batches after a lasting change, whatever plan was in force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_DELAY, _MOST_DELAY = 2, 64  # batches from a decision until it holds: before one was seen, and that are remembered
_FIRST, _LEAST, _MOST = 0.5, -1.0, 2.0  # of the account [batches]
_LOST, PROVEN = 2.0, 1.0  # weight of what is lost; account from which layers move for speeds that are not usual


class SpellGuard:
    """The account of one run.

    Attributes:
        account: what following the present speeds would have saved lately [batches].
        delay: batches from a decision until it holds.
    """

    def __init__(self) -> None:
        self.account, self.delay = _FIRST, _DELAY
        self._planned: deque[tuple[Sequence[float], Sequence[float]]] = deque(maxlen=_MOST_DELAY)

    @property
    def follows(self) -> bool:
        """Whether plans are made for the present speeds; else for the usual ones."""
        return self.account >= 0.0

    def learn(self, measured: Sequence[float], present: Sequence[float], usual: Sequence[float]) -> None:
        """Settles the account with a batch; all by rank: time per unit of work, relative.

        Args:
            measured: in this batch.
            present, usual: what a plan can be made for after it.
        """
        if len(self._planned) >= self.delay:
            present_s, usual_s = (relative_s(each, measured) for each in self._planned[-self.delay])
            saved = 1.0 - present_s / usual_s
            self.account = min(max(self.account + min(saved, _LOST * saved), _LEAST), _MOST)
        self._planned.append((present, usual))


def relative_s(planned: Sequence[float], slowness: Sequence[float]) -> float:
    """Returns the time of a unit of work that is divided so that ranks as slow as ``planned`` end together.

    >>> relative_s([1.0, 1.0], [1.0, 3.0]), relative_s([1.0, 3.0], [1.0, 3.0])
    (1.5, 0.75)
    """
    return max(s / p for s, p in zip(slowness, planned, strict=True)) / sum(1.0 / p for p in planned)
