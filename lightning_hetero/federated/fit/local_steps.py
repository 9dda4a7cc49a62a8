"""This rank's local steps between two averages: what they count, and what they took (layer L)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.run import EventLog
from lightning_hetero.checked import real
from lightning_hetero.measure.compiles import CompileWatch, NewSizes
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.measure.step_clock import Stopwatch


class LocalSteps:
    """Counts and times what this rank trains.

    Args:
        trainer: the running trainer.
        device: of this rank.
        weight_of: the user's ``batch_weight``; None: samples count.
        events: of this rank.

    Attributes:
        samples: of the batch that runs, or ran last; 0: it counts nothing; None: none has run.
        weight: what was trained since the last average, in samples or in the user's unit.
        made: local steps since then.
        unaveraged: whether any batch has ended since then.
        trained: whether this rank has trained in this epoch.
        measured: samples, local steps and seconds since the last decision, of steps whose time is believed.
        wait_s: how long this rank waited when the ranks met last.
        compiles: says whether something was compiled in a step.
        watch: of own work; resumed where this rank begins to draw a batch and to train on it, and paused around a
            collective that user code asks for.
    """

    def __init__(
        self, trainer: Trainer, device: HostDevice, weight_of: Callable[[Any], float] | None, events: EventLog
    ) -> None:
        self.samples: int | None = None
        self.weight, self.made, self.unaveraged = 0.0, 0, False
        self.trained = False
        self.measured = (0.0, 0.0, 0.0)
        self.wait_s = 0.0
        self.compiles = CompileWatch()
        self._trainer, self._weight_of, self._events = trainer, weight_of, events
        self.watch = Stopwatch(device)
        self._timed: deque[tuple[int, int, int, bool]] = deque()  # epoch, batch, samples; is it believed?
        self._sizes = NewSizes(device)
        self._warm = False

    @property
    def counts_nothing(self) -> bool:
        """Whether the batch that runs is there only so that this rank logs what the others do."""
        return self.samples == 0

    def count(self, batch: Any) -> None:
        """Adds what the batch counts in the next average."""
        if not self.samples:
            return
        self.weight += self.samples if self._weight_of is None else real("batch_weight(batch)", self._weight_of(batch))

    def end(self, number: int, *, is_step: bool) -> None:
        """A batch of the epoch is over, which this rank has trained or passed over.

        Args:
            number: of the batch.
            is_step: whether an optimizer step ends with it.
        """
        self.unaveraged = True
        if not self.samples:
            self.watch.reset()
            return
        self.watch.close()
        new = self._sizes.first(self.samples)
        believed = self._warm and not self.compiles.ask() and not new
        self._timed.append((compat.epoch_running(self._trainer), number, self.samples, believed))
        self._warm = self.trained = True
        self.made += is_step
        self._take_times()

    def _take_times(self) -> None:
        """Takes in the steps whose times are known: on an accelerator, of those before."""
        while (seconds := self.watch.take()) is not None:
            epoch, number, samples, believed = self._timed.popleft()
            if believed:
                total = self.measured
                self.measured = total[0] + samples, total[1] + 1.0, total[2] + seconds
            data = {"samples": samples, "compute_s": seconds, "wait_s": self.wait_s}
            self._events.note("step", epoch, number, data)
            self.wait_s = 0.0

    def settle(self) -> None:
        """Before the ranks meet: waits for the device, because the work of this round belongs to this rank's time."""
        self.watch.wait()
        self._take_times()

    def averaged(self, wait_s: float) -> None:
        """The ranks have met, for which this one has waited so long."""
        self.weight, self.made, self.unaveraged, self.wait_s = 0.0, 0, False, wait_s
