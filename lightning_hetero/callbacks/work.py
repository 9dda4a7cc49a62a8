"""How much a rank's batch is: in samples, whatever the batch is, or in the user's items, e.g. tokens (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.reporting import reporting_of

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

    def moved(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Returns the batch, moved to the device by ``move``, once it is counted."""
        counted = self._same
        if counted:
            try:
                self._count(batch)
            except Exception:  # whatever it is, the device's batch will show it, too
                counted = self._same = False
        batch = move(batch)
        if not counted:
            self._count(batch)
        return batch


def count_samples(trainer: Trainer, batch: Any, *, whole: bool = True) -> int:
    """Returns the number of samples of the training batch that is about to run, or has just run, on this rank.

    In this order: a strategy that decides the shares says so itself (`Reporting.current_samples`); the train loader's
    ``batch_size``, less in its last batch, because a tensor found in a graph or another object may count nodes; the
    first tensor's first dimension, as Lightning itself counts.

    Args:
        whole: False: ``batch`` is a piece of that batch, of which neither strategy nor loader knows.

    Raises:
        lightning.pytorch.utilities.exceptions.MisconfigurationException: nothing tells, and the batch has no tensor.
    """
    reporting = reporting_of(trainer) if whole else None
    if reporting is not None and (known := reporting.current_samples()) is not None:
        return known
    loader = trainer.train_dataloader
    if whole and isinstance(loader, DataLoader) and loader.batch_size is not None and isinstance(loader.sampler, Sized):
        done = (compat.upcoming_batch(trainer) - 1) * loader.batch_size
        return max(1, min(loader.batch_size, len(loader.sampler) - done))
    # extract_batch_size walks every element of the batch; the first tensor is all it takes from an ordinary one.
    first = batch
    while isinstance(first, list | tuple | Mapping) and len(first) > 0:
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if isinstance(first, Tensor) and first.ndim > 0:
        return int(first.size(0))
    return extract_batch_size(batch)
