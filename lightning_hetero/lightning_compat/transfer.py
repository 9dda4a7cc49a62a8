"""A batch's way to the device (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["batch_to_device"]


def batch_to_device(trainer: Trainer, batch: Any, move: Callable[[Any], Any] | None = None) -> Any:
    """Moves a training batch as the loop does, with the user's hooks; by ``move`` in the place of the strategy.

    Private: ``LightningModule._on_before_batch_transfer``, which knows whether the user's hooks take an index.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0) if move is None else move(batch)
