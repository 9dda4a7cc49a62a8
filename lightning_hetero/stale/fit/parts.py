"""What user code sees of the parts that a rank trains within one batch of Lightning's (layer L).

A rank may train several parts of a global batch within one batch of the loop, none, or one that counts nothing because
another rank has computed its samples. Epoch values, torchmetrics and, in automatic optimization, the numbers and lists
that the module keeps count each sample that is trained on once: what a part brought is taken back if its push counts
nothing. Hooks that look at a batch or its outputs get each part that counts, see
`lightning_compat.batches`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_SMALL = 64  # entries of a dict or set that is copied before each part


class Parts:
    """See the module; one per fit and rank.

    Args:
        trainer: the running trainer.

    Attributes:
        counts: whether the part that Lightning has as its batch counts.
        more: outputs, batch and samples of each other part trained within it that counts.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.counts = True
        self.more: list[tuple[Any, Any, int]] = []
        self._trainer = trainer
        self._metrics, self._synced = nn.ModuleList(), list[nn.Module]()
        self._first = True  # the part is Lightning's batch
        self._take_back: list[Callable[[], None]] = []
        self._ended: list[tuple[Any, Any, int]] = []  # likewise, of the part that is trained now

    def begin_epoch(self) -> None:
        """Looks for the module's torchmetrics."""
        metrics = compat.metrics_of(self._trainer.lightning_module)
        self._metrics = nn.ModuleList(metrics)
        self._synced = [metric for metric in metrics if metric.dist_sync_on_step]

    def begin_batch(self, *, counts: bool) -> None:
        """Lightning gets its next batch; ``counts`` is False for a dummy."""
        self.counts = counts
        self.more.clear()
        self._first = True
        self._forget()

    def _forget(self) -> None:
        self._take_back.clear()
        self._ended.clear()

    def step(self) -> ExitStack:
        """Around a training step: what metrics and the module have so far stays, whatever becomes of its part; no
        metric waits for the other ranks, so that the value of a step is the rank's own."""
        stack = ExitStack()
        module = self._trainer.lightning_module
        if module.automatic_optimization:  # else a counter may say when the next optimizer steps
            self._take_back.append(_save_attributes(module))
        if len(self._metrics):
            self._take_back.append(compat.save_metrics(self._metrics))
        for metric in self._synced:
            stack.enter_context(patched(metric, "dist_sync_on_step", False))
        return stack

    def logged(self, take_back: Callable[[], None]) -> None:
        """A value is about to count in its epoch."""
        self._take_back.append(take_back)

    def ended(self, outputs: Any, batch: Any, samples: int) -> None:
        """A batch that is not Lightning's is trained."""
        self._ended.append((outputs, batch, samples))

    def pushed(self, *, wasted: bool) -> None:
        """The last push of a part is answered."""
        if self._first:
            self.counts = not wasted
        if wasted:
            for take_back in reversed(self._take_back):
                take_back()
        else:
            self.more += self._ended
        self._first = False
        self._forget()


def _save_attributes(module: LightningModule) -> Callable[[], None]:
    """Returns what puts back the user's plain attributes: values, what lists have had so far, small dicts and sets, and
    lists in these dicts.

    What is deeper, and a tensor that is changed in place, is unchanged.
    """
    own, theirs = vars(module), compat.module_attributes()
    kept = {name: value for name, value in own.items() if name not in theirs}
    copies = {n: v.copy() for n, v in kept.items() if isinstance(v, dict | set) and len(v) <= _SMALL}
    inside = [value for copy in copies.values() if isinstance(copy, dict) for value in copy.values()]
    lengths = [(value, len(value)) for value in [*kept.values(), *inside] if isinstance(value, list)]

    def put_back() -> None:
        own.update(kept)
        for values, length in lengths:
            del values[length:]
        for name, copy in copies.items():
            kept[name].clear()
            kept[name].update(copy)

    return put_back
