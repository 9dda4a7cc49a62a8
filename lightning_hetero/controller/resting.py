"""What is known of a rank at rest: nothing that it computes is the run's, so a change of its time counts (layer P)."""

from __future__ import annotations

import math

from lightning_hetero.predictors import Kalman

__all__ = ["Resting"]

_UNSTEADY, _STEADY = 3, 10  # first times of a rank at rest: ignored so many; compared with the mean up to so many
_CHANGED, _SURE = 0.5, 4.0  # relative change of its time that counts, if it is so many standard deviations


class Resting:
    """A rank since it rests.

    Args:
        factor: its time over the profile's, measured when it worked last.
        why: it rests, in words.
    """

    def __init__(self, factor: float, why: str = "") -> None:
        self.factor, self.why = factor, why
        self._filter, self._first_s, self._seen = Kalman(), math.nan, 0

    def add(self, rest_s: float) -> float | None:
        """Takes in what a computation took that is always the same [s].

        Returns:
            The rank's speed over the profile's, if that time has changed since it rests.
        """
        self._seen += 1
        if self._seen <= _UNSTEADY:
            return None
        self._filter.update(1, rest_s)
        now_s = self._filter.predict(1)
        if self._seen <= _STEADY:
            self._first_s = now_s
            return None
        ratio = now_s / self._first_s
        sure = abs(now_s - self._first_s) > _SURE * self._filter.std_s(1)
        if not sure or max(ratio, 1.0 / ratio) <= 1.0 + _CHANGED:
            return None
        # Never better than it was at work, or in the beginning: the first times may have been held up.
        return 1.0 / max(self.factor * ratio, min(self.factor, 1.0))
