"""Makes this process behave like one rank of a `Scenario`: slower, noisy, short of memory, failing (layer T).

One rule for every engine: *the work of an emulated device takes the time that the scenario says, real work included*.
Work is forward and backward; loading, the exchange of gradients, the optimizer and the engine's own doing are real and
come on top. `Pacer` keeps the rule for one piece of work whose real time is known when it ends: a stage of a pipeline.
`Throttle` keeps it for a whole step of data parallelism, where the sleep must come before the backward pass:

    begin  begin_work     before_backward    backward_began   gradient_came  after_backward   end
    [1]----[2]~~forward~~~[3]....sleep....---[4]~~backward~~~~[5]............[6]--------------[7]

[1] scripted faults, [2] the clock (DDP waits for peers between [1] and [2]), [3] what forward left
of the time, less what the backward pass is expected to take, [4] to [5] what it takes, up to the last gradient and
before anybody waits for peers, [7] the difference is settled in the next step. A sleep costs no processor time, so many
emulated devices run truthfully on few cores, whatever their speeds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from lightning_hetero.emulate.scenario import Scenario

_MAKE_UP_S = 0.05
_BACKWARD_PER_FORWARD = 2.0  # of the first step; later it is as was measured
_MEMORY = 0.8  # weight of the steps before, in what a backward pass is expected to take


def scenario_steps(every_s: float | None, clock: Callable[[], float] = time.perf_counter) -> Callable[[int], int]:
    """Returns what tells a scenario's step from the number of batches trained so far.

    Args:
        every_s: a step passes every so many seconds since the first batch; None: with each batch.
        clock: seconds; injectable for tests.
    """
    if every_s is None:
        return int
    began_s: list[float] = []

    def passed(_: int) -> int:
        now_s = clock()
        if not began_s:
            began_s.append(now_s)
        return int((now_s - began_s[0]) / every_s)

    return passed


class Pacer:
    """Lets work take an emulated device's time, and keeps the sum: what came out too long is made up for later.

    Made up for is at most 50 ms: a timer's lateness, a core that was taken. What takes longer is a stall, which an
    emulation must not hide. The amount is one for all engines, whatever the length of their pieces of work.

    Args:
        clock: returns seconds; injectable for tests, like the next one.
        sleep: sleeps for a number of seconds.

    Attributes:
        wanted_s, taken_s: sums over all work, what the scenario says and what it took [s].
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._behind_s = 0.0
        self.wanted_s = self.taken_s = 0.0

    def sleep(self, missing_s: float) -> float:
        """Sleeps for ``missing_s``, less what earlier work took too long; returns how long it was."""
        pause_s = missing_s - self._behind_s
        if pause_s <= 0.0:
            return 0.0
        before_s = self._clock()
        self._sleep(pause_s)
        return self._clock() - before_s

    def settle(self, wanted_s: float, taken_s: float) -> None:
        """Takes note of a piece of work that is over, sleeps included."""
        self.wanted_s += wanted_s
        self.taken_s += taken_s
        behind_s = self._behind_s + taken_s - wanted_s
        self._behind_s = min(max(behind_s, -_MAKE_UP_S), _MAKE_UP_S)

    def pace(self, wanted_s: float, spent_s: float) -> None:
        """Sleeps until a piece of work that really took ``spent_s`` has taken ``wanted_s``."""
        self.settle(wanted_s, spent_s + self.sleep(wanted_s - spent_s))


class Throttle:
    """Slows down one rank's steps by sleeping, and carries out the faults scripted for it.

    With ``sample_s`` or ``step_s`` in the scenario a step's forward and backward take the emulated time, real work
    included, so it must be longer than that. Otherwise the real work is stretched by ``1 / speed`` (times jitter).
    Either way the sleep comes before the backward pass, so that every peer waits for it, and counts on a backward
    pass as long, against its forward pass, as those before; where it was not, the next step makes up for it.

    Args:
        scenario: what to emulate.
        rank: the rank this process plays.
        clock, sleep: to measure and to wait [s].

    Attributes:
        pacer: keeps the sums.

    Raises:
        ValueError: a negative rank, or real work would have to be done faster than it is (a speed above 1
            without ``sample_s`` and ``step_s``).
    """

    def __init__(
        self, scenario: Scenario, rank: int, *,
        clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        if rank < 0:
            raise ValueError(f"rank={rank!r} must be >= 0")
        if not scenario.emulated and scenario.top_speed > 1.0:
            raise ValueError(
                f"the scenario's highest speed is {scenario.top_speed:g}, but real work can only be"
                f" stretched: divide all speeds by {scenario.top_speed:g}, or give sample_s to emulate times"
            )
        self.scenario, self.rank = scenario, rank
        self.pacer = Pacer(clock=clock, sleep=sleep)
        self._clock, self._sleep = clock, sleep
        self._step: int | None = None  # the step begun and not ended
        self._samples = 0
        self._since_s: float | None = None  # own work runs
        self._last_s: float | None = None  # the last gradient since then
        self._spent_s = 0.0
        self._forward_s: float | None = None  # spent before the sleep; None: it has not slept yet
        self._slept_s = 0.0
        self._earlier_s = (0.0, 0.0)  # forward and backward of earlier steps, weighted
        self._faults_until: int | None = None  # last step whose faults were carried out

    @property
    def counts_samples(self) -> bool:
        """Whether the number of samples matters, or `begin` may get 0."""
        return self.scenario.sample_s is not None or self.scenario.mem_cap(self.rank) is not None

    def begin(self, step: int, samples: int) -> None:
        """Begins a step: faults first, then the clock starts. Ends one that has slept.

        A fault comes once, at the first step begun that is not before its own: a rank may skip steps, or begin one
        several times.

        Args:
            step: training step, counted over batches from 0.
            samples: samples in this rank's forward pass.

        Raises:
            RuntimeError: the scenario scripts an exception here.
        """
        if self._forward_s is not None:
            self.end()
        self._step = None
        self._run_faults(step)
        self._step, self._samples = step, samples
        self._spent_s, self._slept_s = 0.0, 0.0
        self._since_s, self._last_s = self._clock(), None

    def hold(self, samples: int) -> None:
        """Holds so many samples in memory, for a forward pass within the step.

        Raises:
            torch.OutOfMemoryError: more than the scenario's memory cap of this rank.
        """
        cap = self.scenario.mem_cap(self.rank)
        if cap is not None and samples > cap:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: rank {self.rank} got {samples} samples at step {self._step}, its memory"
                f" holds at most {cap} (Scenario.mem_samples): give this rank fewer samples or raise the cap"
            )

    def begin_work(self) -> None:
        """The forward pass begins: what was between `begin` and here was waiting for peers."""
        if self._step is not None and self._forward_s is None:
            self._since_s = self._clock()

    def before_backward(self) -> None:
        """A backward pass is about to begin; before the first one of the step comes the sleep."""
        self._stop(self._clock())
        if self._step is None or self._forward_s is not None:
            return
        self._forward_s = self._spent_s
        forwards_s, backwards_s = self._earlier_s
        backward_s = self._forward_s * (backwards_s / forwards_s if forwards_s > 0.0 else _BACKWARD_PER_FORWARD)
        work_s = self._forward_s + backward_s
        self._slept_s = self.pacer.sleep(self._wanted_s(self._step, work_s) - work_s)

    def backward_began(self) -> None:
        """The backward pass has begun: what an engine does before it, e.g. to the loss, is no work of the device."""
        self._since_s, self._last_s = self._clock(), None

    def gradient_came(self) -> None:
        """A parameter got its gradient. The last one ends the work of a backward pass, whoever waits for peers then."""
        self._last_s = self._clock()

    def after_backward(self) -> None:
        """The backward pass has returned; what follows is work if another one comes."""
        self._stop(self._last_s)
        self._since_s, self._last_s = self._clock(), None

    def end(self) -> None:
        """Ends the step: the next one makes up for a wrong guess. A step without a backward pass sleeps now."""
        if self._step is None:
            return
        self._stop(self._last_s if self._forward_s is not None or self._last_s is not None else self._clock())
        wanted_s = self._wanted_s(self._step, self._spent_s)
        if self._forward_s is None:  # no backward pass, or one that nobody told of
            self._slept_s = self.pacer.sleep(wanted_s - self._spent_s)
        else:
            forwards_s, backwards_s = self._earlier_s
            backward_s = self._spent_s - self._forward_s
            self._earlier_s = _MEMORY * forwards_s + self._forward_s, _MEMORY * backwards_s + backward_s
        self.pacer.settle(wanted_s, self._spent_s + self._slept_s)
        self._step, self._forward_s = None, None

    def _stop(self, now_s: float | None) -> None:
        if self._since_s is not None and now_s is not None:
            self._spent_s += max(0.0, now_s - self._since_s)
        self._since_s = None

    def _wanted_s(self, step: int, real_s: float) -> float:
        if self.scenario.emulated:
            return self.scenario.work_s(self.rank, step, self._samples)
        return real_s * self.scenario.stretch(self.rank, step)

    def _run_faults(self, step: int) -> None:
        # A step that is smaller than the last one is a new run, e.g. another fit.
        last = self._faults_until
        first = step if last is None or step < last else last + 1
        self._faults_until = step
        for at in range(first, step + 1):
            fault = self.scenario.fault(self.rank, at)
            if fault is not None and fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault is not None and fault.kind == "stall":
                self._sleep(fault.stall_s)
            elif fault is not None:
                raise RuntimeError(f"scripted fault: the scenario raises an exception in rank {self.rank} at step {at}")
