"""How much work a rank's batch is, in the user's items, e.g. tokens, and when to ask (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BatchCost", "CountedOnHost", "check_batch_cost", "cost_in", "count_work"]

BatchCost = Callable[[Any], float]


def check_batch_cost(given: object) -> None:
    """Checks the argument ``batch_cost``.

    Raises:
        TypeError: it is neither a function nor None.
    """
    if not (given is None or callable(given)):
        raise TypeError(
            f"batch_cost={given!r} must be a function of the batch that returns its work, e.g. its tokens, or None"
        )


def cost_in(module: nn.Module, given: BatchCost | None) -> BatchCost | None:
    """Returns what counts a batch's work, as given or the module's own method; None: nothing does."""
    return given or getattr(module, "batch_cost", None)


def count_work(cost: BatchCost, batch: Any, rank: int) -> float:
    """Returns the work of this rank's batch.

    Raises:
        ValueError: ``cost`` returns no finite number above 0.
    """
    work = float(cost(batch))
    if not (math.isfinite(work) and work > 0):
        raise ValueError(
            f"batch_cost returned {work!r} on rank {rank}; it must be a finite number > 0, the work of this rank's"
            " batch, e.g. its tokens, padding included"
        )
    return work


class CountedOnHost:
    """Asks a user's function of a batch before the batch is moved, where the answer does not wait for the device.

    Not where a hook may make another batch of it on its way, and no more once a function could not do with the host's.

    Args:
        trainer: the running trainer.
        count: asks the function.
    """

    def __init__(self, trainer: Trainer, count: Callable[[Any], None]) -> None:
        self._count = count
        owners = trainer.lightning_module, getattr(trainer, "datamodule", None)
        hooks = "transfer_batch_to_device", "on_after_batch_transfer"
        self._same = not any(is_overridden(hook, owner) for hook in hooks for owner in owners)

    def before(self, batch: Any) -> bool:
        """Returns whether it was asked; if not, it is to be asked for the batch that was moved."""
        if self._same:
            try:
                self._count(batch)
            except Exception:  # whatever it is, the device's batch will show it, too
                self._same = False
        return self._same
