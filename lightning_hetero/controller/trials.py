"""What becomes of structures: good ones are remembered, new ones tried, those that disappoint barred (layer P)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from lightning_hetero.controller.messages import Outcome
from lightning_hetero.solvers.placement.neighbours import Pipes

_REMEMBERED = 12  # structures
_TRIED, _MARGIN = 3, 0.1  # batches of a trial, and the excess over the promise from which it has failed
_BARRED = 50  # batches, at first
_BIAS_OF = 9  # batches that measured over modelled is the median of


@dataclass(kw_only=True, slots=True)
class Trial:
    """A structure in force for too short a time to be believed.

    Attributes:
        generation: of its plan.
        old: structure before.
        predicted_s: time of a batch, promised; corrected like all predictions.
        for_time: it was chosen to be faster; else to save.
        measured: times of its batches so far [s].
    """

    generation: int
    old: Pipes
    predicted_s: float
    for_time: bool
    measured: list[float] = field(default_factory=list[float])

    @property
    def measured_s(self) -> float:
        """Median of what was measured, so that one hiccup decides nothing."""
        return median(self.measured) if self.measured else math.nan


class Trials:
    """Holds what batches took against what was modelled or promised, and which structures are good or barred.

    Attributes:
        present: the trial of the structure in force; None: it is believed.
        next: the trial that begins when the change under way comes into force.
        bias_of: measured over modelled, of the last batches that were no trial's.
        remembered: the last structures that were good, newest last.
    """

    def __init__(self) -> None:
        self.present: Trial | None = None
        self.next: Trial | None = None
        self.bias_of: deque[float] = deque(maxlen=_BIAS_OF)
        self.remembered: list[Pipes] = []
        self._barred: dict[Pipes, tuple[int, int]] = {}  # until which batch, and how many times
        self._outcome: Outcome | None = None

    def start_with(self, pipes: Pipes) -> None:
        """No trial is under way; a structure is in force."""
        self.present = self.next = None
        self.remember(pipes)

    def enter(self) -> None:
        """The change under way has come into force."""
        self.present, self.next = self.next, None

    def remember(self, pipes: Pipes) -> None:
        """Remembers a structure as the newest."""
        self.remembered = [*(s for s in self.remembered if s != pipes), pipes][-_REMEMBERED:]

    def bar(self, pipes: Pipes, batch: int) -> None:
        """Bars a structure that disappointed from ``batch`` on for a while, twice as long each time.

        >>> trials, structure = Trials(), (Pipe((0,), (0, 3)),)
        >>> trials.bar(structure, 100)
        >>> trials.barred(structure, 149), trials.barred(structure, 150)
        (True, False)
        >>> trials.bar(structure, 200)
        >>> trials.barred(structure, 299), trials.barred(structure, 300)
        (True, False)
        """
        times = self._barred.get(pipes, (0, 0))[1] + 1
        self._barred[pipes] = batch + _BARRED * 2 ** (times - 1), times
        self.next = None

    def barred(self, pipes: Pipes, batch: int) -> bool:
        """Returns whether a structure still is barred."""
        return batch < self._barred.get(pipes, (0, 0))[0]

    @property
    def bias(self) -> float:
        """What batches took over what the model said of them."""
        return median(self.bias_of) if self.bias_of else 1.0

    @property
    def over(self) -> Trial | None:
        """The trial that can be judged now."""
        trial = self.present
        return trial if trial is not None and len(trial.measured) >= _TRIED else None

    def add(self, measured_s: float, modelled_s: float) -> None:
        """Takes in a batch; ``modelled_s`` is NaN where the plan in force does not fit the devices any more."""
        if self.present is not None:
            self.present.measured.append(measured_s)
        elif modelled_s > 0.0:
            self.bias_of.append(measured_s / modelled_s)

    def settle(self, trial: Trial, old_s: float) -> Outcome:
        """Judges a trial; the outcome goes with the next decision.

        Args:
            trial: the present one; it is none any more.
            old_s: what a batch would take under the structure before by now [s].
        """
        self.present, measured_s = None, trial.measured_s
        late = measured_s > (1.0 + _MARGIN) * trial.predicted_s
        self._outcome = Outcome(
            generation=trial.generation, measured_s=measured_s, realised_gain_s=old_s - measured_s,
            kept=not (trial.for_time and late and measured_s > old_s),
        )  # fmt: skip
        return self._outcome

    def taken_outcome(self) -> Outcome | None:
        """Returns what became of the last trial, once."""
        outcome, self._outcome = self._outcome, None
        return outcome
