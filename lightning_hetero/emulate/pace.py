"""Lets a rank of a pipeline take the time of an emulated device (layer T).

    forward of a stage of rank r:   sleep until  work_s(r, step, samples) x (the forward part of its layers)  has passed

The scenario says what a rank needs for the whole model; the profile says which part of that each layer is. With
scenarios that stretch real work, the work done is stretched. A sleep takes no processor time, so that many emulated
devices run truthfully on few cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.emulate.throttle import Pacer


class _Busy(Protocol):
    """See `BusyTime`."""

    @property
    def busy_s(self) -> float: ...

    def begin(self, step: int) -> None: ...

    def end(self) -> None: ...

    def began(self) -> None: ...

    def computed(self, kind: Any, stage: int, samples: int, elapsed_s: float) -> None: ...


class EmulatedPace:
    """Stands in for what adds up a rank's computations; told of each one, it sleeps for what is missing.

    The time of a computation includes the real work: an emulated device cannot be faster than that. What takes too long
    is made up for as by every other engine, see `lightning_hetero.emulate.Pacer`.

    Args:
        busy: that it stands for.
        scenario: what to emulate.
        rank: global rank.
        step_of: returns the scenario's step from the number of batches trained so far: it may pass with time.
        clock, sleep: seconds; injectable for tests.

    Attributes:
        parts: of the whole model's time, by kind of computation and stage; empty: this rank rests.
        pacer: which sleeps.
    """

    def __init__(
        self,
        busy: _Busy,
        scenario: Scenario,
        rank: int,
        *,
        step_of: Callable[[int], int] = int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._scenario, self._rank, self._step_of = busy, scenario, rank, step_of
        self._clock, self.pacer = clock, Pacer(clock=clock, sleep=sleep)
        self.parts: Mapping[tuple[Any, int], float] = {}
        self._step: int | None = None
        self._real_s = 0.0  # in this step, so far
        self._slept_s = 0.0

    @property
    def busy_s(self) -> float:
        """In this training step, so far, sleep included [s]."""
        return self._busy.busy_s + self._slept_s

    def begin(self, step: int) -> None:
        """Starts a training step: until `end`, computations belong to it."""
        self._busy.begin(step)
        self._step = self._step_of(step) if self.parts else None  # a rank at rest computes nothing
        self._real_s = self._slept_s = 0.0

    def end(self) -> None:
        """Ends the training step; what follows, e.g. validation, runs at full speed."""
        self._busy.end()
        self._step = None

    def began(self) -> None:
        """A computation begins."""
        self._busy.began()

    def computed(self, kind: Any, stage: int, samples: int, elapsed_s: float) -> None:
        """Takes note of a computation, and sleeps for what the emulated device still needs for it."""
        self._busy.computed(kind, stage, samples, elapsed_s)
        if self._step is None:
            return
        before_s, self._real_s = self._real_s, self._busy.busy_s
        took_s = self._real_s - before_s
        if self._scenario.emulated:
            part = self.parts.get((kind, stage), 0.0)
            wanted_s = self._scenario.work_s(self._rank, self._step, samples) * part
        else:
            wanted_s = took_s * self._scenario.stretch(self._rank, self._step)
        began_s = self._clock()
        self.pacer.pace(wanted_s, took_s)
        self._slept_s += self._clock() - began_s
