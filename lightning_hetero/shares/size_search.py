"""The largest batch that a rank's memory holds, found by trial as Lightning's ``BatchSizeFinder`` does (layer P).

    power      twice as many samples as long as they fit
    binsearch  the same, then halves of what is between the largest that fitted and the least that did not
"""

from __future__ import annotations

from typing import Literal

from lightning_hetero.checked import count, real

SizeMode = Literal["power", "binsearch"]


class SizeSearch:
    """What to try next; every rank has one.

    Args:
        mode, steps_per_trial, init_val, max_trials, margin, max_val: see `HeteroBatchSizeFinder`.

    Attributes:
        size: samples of the next trial; once `done`, of the largest that fitted.
        steps: of a trial.
        done: whether there is nothing left to try.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, mode: SizeMode = "power", *, steps_per_trial: int = 3, init_val: int = 2, max_trials: int = 25,
        margin: float = 0.05, max_val: int = 8192,
    ) -> None:  # fmt: skip
        if mode not in ("power", "binsearch"):
            raise ValueError(f"mode={mode!r} must be 'power' or 'binsearch'")
        self._mode, self._margin, self._most = mode, real("margin", margin, most=0.99), count("max_val", max_val)
        self.steps, self._left = count("steps_per_trial", steps_per_trial), count("max_trials", max_trials)
        self.size, self.done = min(count("init_val", init_val), max_val), False
        self._fitted, self._failed = 0, max_val + 1

    def tell(self, fitted: bool) -> None:
        """Takes in how the trial has ended; nothing, once the search is `done`."""
        if self.done:
            return
        self._left -= 1
        if fitted:
            self._fitted = self.size
        else:
            self._failed = self.size
        low, high = self._fitted, self._failed
        free = high > self._most  # nothing has failed
        found = low > 0 and (self._left < 1 or (self._mode == "power" and not free))
        self.done = found or high - low <= 1
        self.size = low if self.done else min(2 * low, self._most) if free else (low + high) // 2

    @property
    def found(self) -> int:
        """The largest size that fitted, less the margin where a search has come close to the limit; 0: none."""
        near = self._mode == "binsearch" and self._failed <= self._most
        return max(min(self._fitted, 1), int(self._fitted * (1.0 - self._margin))) if near else self._fitted
