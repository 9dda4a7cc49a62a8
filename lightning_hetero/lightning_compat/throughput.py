"""Lightning's `ThroughputMonitor` counting what all ranks have trained (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage

from lightning_hetero.lightning_compat.batches import trainer_callbacks
from lightning_hetero.lightning_compat.patches import replace_methods

Trained = Callable[[], tuple[int, int] | None]
"""Returns the samples of all ranks and the global batches trained so far; None: parts are equal."""


def count_throughput(trainer: Trainer, trained: Trained) -> Callable[[], None]:
    """Lets the Trainer's monitors of throughput count what all ranks have trained; returns undo.

    They multiply rank 0's samples by the number of devices, although its part may be larger or smaller than others'.
    """

    def start(monitor: Any, trainer: Any) -> None:
        type(monitor)._start(monitor, trainer)
        if trainer.training:
            _AllRanks(monitor._throughputs[RunningStage.TRAINING], trained)

    undo = ExitStack()
    for monitor in trainer_callbacks(trainer):
        if isinstance(monitor, ThroughputMonitor):
            undo.callback(replace_methods(monitor, _start=partial(start, monitor)))
    return undo.close


class _AllRanks:
    """Puts rates of all ranks instead of multiples of this rank's; those called ``device/`` stay its own.

    Items, e.g. tokens, are taken to be in proportion to samples.
    """

    def __init__(self, own: Throughput, trained: Trained) -> None:
        self._own, self._trained = own, trained
        self._all = Throughput(window_size=own._time.maxlen, separator=own.separator)
        self._begin = trained() or (0, 0)
        self._before, self._items = (0, 0, 0), 0  # samples of all, own samples and items
        own.update, own.compute = self.update, self.compute  # type: ignore[method-assign]

    def update(self, *, time: float, batches: int, samples: int, lengths: Any = None, flops: Any = None) -> None:
        own = self._own
        type(own).update(own, time=time, batches=batches, samples=samples, lengths=lengths, flops=flops)
        if (now := self._trained()) is None:
            return
        everyone, steps = (a - b for a, b in zip(now, self._begin, strict=True))
        if lengths is not None:
            new, own_new, own_items = everyone - self._before[0], samples - self._before[1], lengths - self._before[2]
            self._items += max(new, round(new * own_items / own_new))
        self._before = everyone, samples, lengths or 0
        items = None if lengths is None else self._items
        self._all.update(time=time, batches=steps, samples=everyone, lengths=items)

    def compute(self) -> dict[str, Any]:
        own = self._own
        metrics, device = type(own).compute(own), f"device{own.separator}"
        for name, value in self._all.compute().items() if self._all._time else ():
            name = name.removeprefix(device)
            if name in metrics and name.endswith("_per_sec"):
                metrics[name] = value * own.world_size if name.startswith("batches") else value
        return metrics
