"""How long a rank's own computations take, and how emulated devices and links make a run take longer (layer T).

    forward of a stage of rank r:   sleep until  work_s(r, step, samples) x (the forward part of its layers)  has passed

The scenario says what a rank needs for the whole model; the profile says which part of that each layer is. With
scenarios that stretch real work, the work done is stretched. A sleep takes no processor time, so that many emulated
devices run truthfully on few cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.emulate.throttle import Pacer
from lightning_hetero.measure.device import Stamp, device_of
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.types import Link

_CHECK_S = 1.0  # how often a sleep looks for failures elsewhere


class BusyTime:
    """Adds up what a rank's computations took on its device; of one that is asynchronous the host only starts them.

    Args:
        device: of this rank's layers.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self._device = device_of(device)
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

    def end(self) -> None:
        """Ends the training step."""
        self._in_step = False

    def began(self) -> float:
        """A computation begins; returns when [s, time.perf_counter]."""
        if self._device.asynchronous and self._in_step:
            self._began = self._device.stamp(timing=True)
        return time.perf_counter()

    def ended(self, kind: Kind, stage: int, samples: int, began_s: float) -> None:
        """The computation has ended that began then, see `computed`."""
        self.computed(kind, stage, samples, time.perf_counter() - began_s)

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        """Takes note of a computation.

        Args:
            kind: forward, head or backward.
            stage: of the schedule.
            samples: in the micro-batch.
            elapsed_s: what it took on the host.
        """
        if self._began is not None:
            began, self._began = self._began, None
            self._spans.append((began, self._device.stamp(timing=True)))
        else:
            self._busy_s += elapsed_s


class EmulatedPace(BusyTime):
    """Sleeps for what is missing to an emulated device's time; sleep counts as computation.

    The time of a computation includes the real work: an emulated device cannot be faster than that. What takes too long
    is made up for as by every other engine, see `lightning_hetero.emulate.Pacer`.

    Args:
        device: of this rank's layers.
        scenario: what to emulate.
        rank: global rank.
        step_of: returns the scenario's step from the number of batches trained so far: it may pass with time.
        clock, sleep: seconds; injectable for tests.

    Attributes:
        parts: of the whole model's time, by kind of computation and stage; empty: this rank is idle.
        pacer: which sleeps.
    """

    def __init__(
        self, device: torch.device, scenario: Scenario, rank: int, *, step_of: Callable[[int], int] = int,
        clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        super().__init__(device)
        self._scenario, self._rank, self._step_of = scenario, rank, step_of
        self._clock, self.pacer = clock, Pacer(clock=clock, sleep=sleep)
        self.parts: Mapping[tuple[Kind, int], float] = {}
        self._step = 0  # of the scenario

    def begin(self, step: int) -> None:
        """Starts a training step: until `end`, computations belong to it; what follows runs at full speed."""
        super().begin(step)
        if self.parts:  # a rank at rest computes nothing
            self._step = self._step_of(step)

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        before_s = self._busy_s
        super().computed(kind, stage, samples, elapsed_s)
        if not (self._in_step and self.parts):
            return
        took_s = self.busy_s - before_s
        if self._scenario.emulated:
            wanted_s = self._scenario.work_s(self._rank, self._step, samples) * self.parts.get((kind, stage), 0.0)
        else:
            wanted_s = took_s * self._scenario.stretch(self._rank, self._step)
        began_s = self._clock()
        self.pacer.pace(wanted_s, took_s)
        self._busy_s += self._clock() - began_s


class SlowClock(LinkClock):
    """The clock of an emulated link: whoever says that a message has come waits until it would have come over the link.

    Ranks share a clock, so they must be on one machine.

    Args:
        link: carries one message after the other.
        check: called while waiting, about once a second; raises if a rank has failed.
    """

    def __init__(self, link: Link, check: Callable[[], None]) -> None:
        super().__init__()
        self._link, self._check = link, check
        self._free_s = 0.0  # when the link is

    def came(self, *, sent_s: float, back_s: float, arrived_s: float, size_bytes: int, waited: bool = True) -> None:
        """Takes note of a message when it has arrived over the link."""
        self._free_s = max(sent_s, self._free_s) + size_bytes / self._link.bandwidth_bytes_per_s
        there_s = self._free_s + self._link.latency_s
        while (early_s := there_s - time.monotonic()) > 0.0:
            time.sleep(min(early_s, _CHECK_S))
            if early_s > _CHECK_S:
                self._check()
        arrived_s = max(arrived_s, there_s) if waited else there_s
        super().came(sent_s=sent_s, back_s=back_s, arrived_s=arrived_s, size_bytes=size_bytes)
