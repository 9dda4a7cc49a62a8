"""How many samples a rank computes on in a batch, whatever the batch is (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.reporting import reporting_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["count_samples"]


def count_samples(
    trainer: Trainer, batch: Any, samples: Callable[[Any], int] | None = None, *, whole: bool = True
) -> int:
    """Returns the number of samples of the training batch that is about to run, or has just run, on this rank.

    In this order: a strategy that decides the shares says so itself (`Reporting.current_samples`);
    ``samples(batch)`` if given; the train loader's ``batch_size``, less in its last batch, because a tensor found in a
    graph or another object may count nodes; the first tensor's first dimension, as Lightning itself counts.

    Args:
        whole: False: ``batch`` is a piece of that batch, of which neither strategy nor loader knows.

    Raises:
        lightning.pytorch.utilities.exceptions.MisconfigurationException: nothing tells, and the batch has no tensor.
    """
    reporting = reporting_of(trainer) if whole else None
    if reporting is not None and (known := reporting.current_samples()) is not None:
        return known
    if samples is not None:
        return int(samples(batch))
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
