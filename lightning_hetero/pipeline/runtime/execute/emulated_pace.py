"""Lets a stage of a pipeline take the time of an emulated device (layer T).

    forward of a stage of rank r:   sleep until  work_s(r, step, samples) x (the forward part of its layers)  has passed

The scenario says what a rank needs for the whole model; the profile says which part of that each layer is. With
scenarios that stretch real work, the work done is stretched. A sleep takes no processor time, so that many emulated
devices run truthfully on few cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.emulate.throttle import Pacer
from lightning_hetero.measure.device import Stamp, device_of
from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.types import GroupPlan, LayerCost, ModelCost

__all__ = ["BusyTime", "ScenarioPace", "parts_of"]


def parts_of(model: ModelCost, group: GroupPlan, rank: int, samples: int) -> dict[tuple[Kind, int], float]:
    """Returns which part of the whole model's time each computation of a rank is, by kind and stage.

    Args:
        model: costs by layer.
        group: the rank's.
        rank: global rank.
        samples: at which the costs are compared.
    """

    def forward_s(cost: LayerCost) -> float:
        return cost.forward.seconds(samples)

    def backward_s(cost: LayerCost) -> float:
        return cost.backward.seconds(samples)

    everything = (model.before, *model.layers, model.head)
    whole_s = sum(forward_s(cost) + backward_s(cost) for cost in everything) or 1.0
    stage = group.ranks.index(rank)
    own = model.layers[group.cuts[stage] : group.cuts[stage + 1]]
    first = (model.before,) if stage == 0 else ()
    parts = {
        (Kind.FORWARD, stage): sum(map(forward_s, (*first, *own))) / whole_s,
        (Kind.BACKWARD, stage): sum(map(backward_s, (*first, *own))) / whole_s,
    }
    if stage == 0:
        parts[Kind.HEAD, len(group.ranks)] = (forward_s(model.head) + backward_s(model.head)) / whole_s
    return parts


class BusyTime:
    """Adds up what a rank's computations took, emulated time included; the stage runner's `Pace`.

    That is what they took on the device, between two stamps: of one that is asynchronous the host only starts them.

    Args:
        pace: of an emulated device; None: the real one's.
        device: of this rank's layers.
        clock: seconds; injectable for tests.
    """

    def __init__(
        self,
        pace: ScenarioPace | None = None,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pace = pace
        self._device, self._clock = device_of(device), clock
        self._busy_s = 0.0
        self._in_step = False
        self._began: Stamp | None = None
        self._spans: list[tuple[Stamp, Stamp]] = []  # of which nobody has waited for the second

    @property
    def busy_s(self) -> float:
        """In this training step, so far; waits for what runs on the device [s]."""
        if self._spans:
            self._spans[-1][1].wait()  # the others are before it
        self._busy_s += sum(began.seconds_until(ended) for began, ended in self._spans)
        self._spans.clear()
        return self._busy_s

    def begin(self, step: int) -> None:
        """Starts a training step, at 0."""
        self._busy_s, self._in_step = 0.0, True
        self._spans.clear()
        if self.pace is not None:
            self.pace.begin(step)

    def end(self) -> None:
        """Ends the training step."""
        self._in_step = False
        if self.pace is not None:
            self.pace.end()

    def began(self) -> None:
        """A computation begins."""
        if self._device.asynchronous and self._in_step:
            self._began = self._device.stamp(timing=True)

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        """Takes note of a computation."""
        if self._began is not None:
            began, self._began = self._began, None
            ended = self._device.stamp(timing=True)
            self._spans.append((began, ended))
            if self.pace is not None:
                ended.wait()
                elapsed_s = began.seconds_until(ended)
        else:
            self._busy_s += elapsed_s
        if self.pace is not None:
            before_s = self._clock()
            self.pace.computed(kind, stage, samples, elapsed_s)
            self._busy_s += self._clock() - before_s


class ScenarioPace:
    """One rank's pace in a `Scenario`; told of each computation, it sleeps for what is missing.

    The time of a computation includes the real work: an emulated device cannot be faster than that. What takes too long
    is made up for as by every other engine, see `lightning_hetero.emulate.Pacer`.

    Args:
        scenario: what to emulate.
        rank: global rank.
        parts: see `parts_of`; not needed where real work is stretched.
        stages: of the pipeline, for several calls of the backbone: stage s of call k is number k * stages + s.
        step_of: returns the scenario's step from the number of batches trained so far: it may pass with time.
        pacer: of the plan before, whose sums go on; None: a new one.
        clock, sleep: seconds; injectable for tests.

    Attributes:
        pacer: keeps the sums.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        *,
        parts: dict[tuple[Kind, int], float],
        stages: int,
        calls: int = 1,
        step_of: Callable[[int], int] = int,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scenario, self._rank, self._step_of = scenario, rank, step_of
        self._parts, self._stages, self._calls = parts, stages, calls
        self.pacer = pacer or Pacer(clock=clock, sleep=sleep)
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """From here on, until `end`, computations belong to this training step."""
        self._step = self._step_of(step)

    def end(self) -> None:
        """What follows, e.g. validation, runs at full speed."""
        self._step = None

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        """Sleeps for what the emulated device still needs for a computation that took ``elapsed_s`` here."""
        if self._step is None:
            return
        if self._scenario.emulated:
            own = self._stages if kind is Kind.HEAD else stage % self._stages
            part = self._parts.get((kind, own), 0.0)
            calls = 1 if kind is Kind.HEAD else self._calls
            wanted_s = self._scenario.work_s(self._rank, self._step, samples) * part / calls
        else:
            wanted_s = elapsed_s * self._scenario.stretch(self._rank, self._step)
        self.pacer.pace(wanted_s, elapsed_s)
