"""The largest batch that a rank's memory holds, found by trial as Lightning's ``BatchSizeFinder`` does (layer P).

    power      twice as many samples as long as they fit
    binsearch  the same, then halves of what is between the largest that fitted and the least that did not
"""

from __future__ import annotations

from typing import Literal

from lightning_hetero.checked import real

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
        counts = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials}
        for name, value in {**counts, "max_val": max_val}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number >= 1")
        if not 0.0 <= real("margin", margin) < 1.0:
            raise ValueError(f"margin={margin!r} must be at least 0 and below 1: the part of the found size left free")
        self._mode, self._margin, self._most, self.steps = mode, margin, max_val, steps_per_trial
        self._left, self._failed = max_trials, max_val + 1
        self._fitted = 0
        self.size: int = min(init_val, max_val)
        self.done = False

    def tell(self, fitted: bool) -> None:
        """Takes in how the trial has ended; nothing, once the search is `done`."""
        if self.done:
            return
        self._left -= 1
        if fitted:
            self._fitted = max(self._fitted, self.size)
        else:
            self._failed = min(self._failed, self.size)
        low, high = self._fitted, self._failed
        if low and high > self._most:
            self.size = min(2 * low, self._most)
        else:
            self.size = low + (high - low) // 2
        found = self._mode == "power" and low and high <= self._most
        self.done = bool(found or high - low <= 1 or (low and self._left < 1))
        if self.done:
            self.size = low

    @property
    def found(self) -> int:
        """The largest size that fitted, less the margin where a search has come close to the limit; 0: none."""
        near = self._mode == "binsearch" and self._failed <= self._most
        return max(min(self._fitted, 1), int(self._fitted * (1.0 - self._margin))) if near else self._fitted
