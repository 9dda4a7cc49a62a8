"""Makes this process behave like one rank of a `Scenario`: slower, noisy, short of memory, failing (layer T).

    begin(step, samples)          real forward            finish()
    [1]-----------------------[2]----------------------[3]--------[4]

[1] scripted faults and the memory cap, [2] the clock starts, [3] what the emulated device still needs is
slept. A sleep costs no processor time, so many emulated devices run truthfully on few cores, whatever their
speeds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from lightning_hetero.emulate.scenario import Scenario

__all__ = ["Throttle"]


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Throttle:
    """Slows down one rank's steps by sleeping, and carries out the faults scripted for it.

    With ``sample_s`` or ``step_s`` in the scenario the emulated time is slept on top of the real work: the
    emulated device is slower by exactly that. Otherwise the real work is stretched by ``1 / speed`` (times
    jitter). A sleep that took too long is made up for in the next steps, so that the sum keeps to the
    scenario. What is carried over is at most one step's sleep: a process that was suspended does not run at
    full speed for minutes afterwards.

    Args:
        scenario: what to emulate.
        rank: the rank this process plays.
        clock: returns seconds; injectable for tests, like the next two.
        sleep: sleeps for a number of seconds.
        kill: ends this process at once.

    Raises:
        TypeError: ``scenario`` is no `Scenario`.
        ValueError: a negative rank, or real work would have to be done faster than it is (a speed above 1
            without ``sample_s`` and ``step_s``).
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        kill: Callable[[], None] = _kill_self,
    ) -> None:
        if not isinstance(scenario, Scenario):
            raise TypeError(f"scenario={scenario!r} must be a Scenario, e.g. Scenario(speeds=[1.0, 0.5])")
        if rank < 0:
            raise ValueError(f"rank={rank!r} must be >= 0")
        if not scenario.emulated and scenario.top_speed > 1.0:
            raise ValueError(
                f"the scenario's highest speed is {scenario.top_speed:g}, but real work can only be"
                f" stretched: divide all speeds by {scenario.top_speed:g}, or give sample_s to emulate times"
            )
        self.scenario = scenario
        self.rank = rank
        self._clock, self._sleep, self._kill = clock, sleep, kill
        self._step: int | None = None  # the step begun and not finished
        self._samples = 0
        self._since_s = 0.0
        self._overslept_s = 0.0
        self._faults_until: int | None = None  # last step whose faults were carried out

    @property
    def counts_samples(self) -> bool:
        """Whether the number of samples matters, or `begin` may be told 0."""
        return self.scenario.sample_s is not None or self.scenario.mem_cap(self.rank) is not None

    def begin(self, step: int, samples: int) -> None:
        """Begins a step: faults and memory cap first, then the clock starts.

        A fault comes once, at the first step begun that is not before its own: a rank may skip steps, or begin one
        several times.

        Args:
            step: training step, counted over batches from 0.
            samples: samples in this rank's forward pass.

        Raises:
            RuntimeError: the scenario scripts an exception here.
            torch.OutOfMemoryError: more samples than the scenario's memory cap of this rank.
        """
        self._step = None
        self._run_faults(step)
        cap = self.scenario.mem_cap(self.rank)
        if cap is not None and samples > cap:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: rank {self.rank} got {samples} samples at step {step}, its memory"
                f" holds at most {cap} (Scenario.mem_samples): give this rank fewer samples or raise the cap"
            )
        self._step, self._samples = step, samples
        self._since_s = self._clock()

    def finish(self, *, work_factor: float = 1.0) -> float:
        """Ends the step's work: sleeps for what the emulated device still needs. Does nothing before `begin`.

        Args:
            work_factor: when real work is stretched, the work since `begin` stands for this many times as
                much, e.g. 3 for a forward pass whose backward pass cannot be stretched on its own.

        Returns:
            The time asked from the scenario for this step [s], before the correction for earlier sleeps.
        """
        if self._step is None:
            return 0.0
        step, self._step = self._step, None
        if self.scenario.emulated:
            wanted_s = self.scenario.work_s(self.rank, step, self._samples)
        else:
            real_s = (self._clock() - self._since_s) * work_factor
            wanted_s = max(0.0, real_s * (self.scenario.stretch(self.rank, step) - 1.0))
        self._sleep_for(wanted_s)
        return wanted_s

    def _sleep_for(self, wanted_s: float) -> None:
        pause_s = wanted_s - self._overslept_s
        if pause_s <= 0.0:
            self._overslept_s = -pause_s
            return
        before_s = self._clock()
        self._sleep(pause_s)
        late_s = self._clock() - before_s - pause_s
        self._overslept_s = min(max(0.0, late_s), wanted_s)

    def _run_faults(self, step: int) -> None:
        # A step that is smaller than the last one is a new run, e.g. another fit.
        last = self._faults_until
        first = step if last is None or step < last else last + 1
        self._faults_until = step
        for at in range(first, step + 1):
            self._run_fault(at)

    def _run_fault(self, step: int) -> None:
        fault = self.scenario.fault(self.rank, step)
        if fault is None:
            return
        if fault.kind == "kill":
            self._kill()
        elif fault.kind == "stall":
            self._sleep(fault.stall_s)
        else:
            raise RuntimeError(
                f"scripted fault: the scenario raises an exception in rank {self.rank} at step {step}"
            )
