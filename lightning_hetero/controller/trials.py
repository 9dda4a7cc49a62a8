"""What becomes of structures: good ones are remembered, new ones tried, those that disappoint barred (layer P)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from lightning_hetero.controller.messages import Outcome
from lightning_hetero.solvers.placement.pipes import Pipe

__all__ = ["Bars", "Library", "Trial", "Trials"]

Pipes = tuple[Pipe, ...]

_BIAS_OF = 9  # batches that measured over modelled is the median of


class Library:
    """The last structures that were good, newest last; at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.structures: list[Pipes] = []

    def add(self, pipes: Pipes) -> None:
        """Remembers a structure as the newest."""
        self.structures = [*(s for s in self.structures if s != pipes), pipes][-self._most :]


class Bars:
    """Structures that disappointed: out of the question for a while, twice as long each time.

    >>> bars, structure = Bars(batches=50), (Pipe((0,), (0, 3)),)
    >>> bars.add(structure, 100)
    >>> bars.barred(structure, 149), bars.barred(structure, 150)
    (True, False)
    >>> bars.add(structure, 200)
    >>> bars.barred(structure, 299), bars.barred(structure, 300)
    (True, False)
    """

    def __init__(self, *, batches: int) -> None:
        self._batches = batches
        self._until: dict[Pipes, tuple[int, int]] = {}  # batch, times

    def add(self, pipes: Pipes, batch: int) -> None:
        """Bars a structure from ``batch`` on."""
        times = self._until.get(pipes, (0, 0))[1] + 1
        self._until[pipes] = batch + self._batches * 2 ** (times - 1), times

    def barred(self, pipes: Pipes, batch: int) -> bool:
        """Returns whether it still is."""
        return batch < self._until.get(pipes, (0, 0))[0]


@dataclass(kw_only=True, slots=True)
class Trial:
    """A structure in force for too short a time to be believed.

    Attributes:
        generation: of its plan.
        old: structure before.
        predicted_s: time of a batch, promised; corrected like all predictions.
        gain_s: promised.
        for_time: it was chosen to be faster; else to save.
        measured: times of its batches so far [s].
    """

    generation: int
    old: Pipes
    predicted_s: float
    gain_s: float
    for_time: bool
    measured: list[float] = field(default_factory=list[float])

    @property
    def measured_s(self) -> float:
        """Median of what was measured, so that one hiccup decides nothing."""
        return median(self.measured) if self.measured else math.nan


class Trials:
    """Holds what batches took against what was modelled, or promised.

    Args:
        batches: of a new structure that make a trial.
        margin: relative excess over the promise from which it has failed, if it is also slower than the old one.

    Attributes:
        present: the trial of the structure in force; None: it is believed.
        bias_of: measured over modelled, of the last batches that were no trial's.
    """

    def __init__(self, batches: int, margin: float) -> None:
        self._batches, self._margin = batches, margin
        self.present: Trial | None = None
        self.bias_of: deque[float] = deque(maxlen=_BIAS_OF)

    @property
    def bias(self) -> float:
        """What batches took over what the model said of them."""
        return median(self.bias_of) if self.bias_of else 1.0

    @property
    def over(self) -> Trial | None:
        """The trial that can be judged now."""
        trial = self.present
        return trial if trial is not None and len(trial.measured) >= self._batches else None

    def add(self, measured_s: float, modelled_s: float) -> None:
        """Takes in a batch; ``modelled_s`` is NaN where the plan in force does not fit the devices any more."""
        if self.present is not None:
            self.present.measured.append(measured_s)
        elif modelled_s > 0.0:
            self.bias_of.append(measured_s / modelled_s)

    def settle(self, trial: Trial, old_s: float) -> Outcome:
        """Judges a trial.

        Args:
            trial: the present one; it is none any more.
            old_s: what a batch would take under the structure before by now [s].
        """
        self.present, measured_s = None, trial.measured_s
        late = measured_s > (1.0 + self._margin) * trial.predicted_s
        return Outcome(
            generation=trial.generation,
            predicted_s=trial.predicted_s,
            measured_s=measured_s,
            predicted_gain_s=trial.gain_s,
            realised_gain_s=old_s - measured_s,
            kept=not (trial.for_time and late and measured_s > old_s),
        )
