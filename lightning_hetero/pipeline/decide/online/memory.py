"""What the controller remembers of structures: good ones, barred ones, and the one on trial (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from lightning_hetero.solvers.placement.pipes import Pipe

__all__ = ["Bars", "Library", "Trial"]

Pipes = tuple[Pipe, ...]


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
        old: structure and shares before.
        predicted_s: time of a batch, promised; corrected like all predictions.
        gain_s: promised.
        for_time: it was chosen to be faster; else to save.
        measured: times of its batches so far [s].
    """

    generation: int
    old: Pipes
    old_shares: Sequence[int]
    predicted_s: float
    gain_s: float
    for_time: bool
    measured: list[float] = field(default_factory=list[float])

    @property
    def measured_s(self) -> float:
        """Median of what was measured, so that one hiccup decides nothing."""
        return median(self.measured) if self.measured else math.nan
