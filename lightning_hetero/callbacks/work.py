"""How much work a rank's batch is, in the user's items, e.g. tokens (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["BatchCost", "check_batch_cost", "cost_in", "count_work"]

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
