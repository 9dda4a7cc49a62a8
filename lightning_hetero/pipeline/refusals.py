"""What a pipeline cannot do with a module or an optimizer, said before training starts (layer L)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hetero.lightning_compat import trainer_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["refuse_module", "refuse_optimizers"]


def refuse_module(module: LightningModule, *, syncs_batch_norm: bool) -> None:
    """Checks what a module asks for.

    Args:
        module: the user's.
        syncs_batch_norm: whether the Trainer was told ``sync_batchnorm=True``.

    Raises:
        TypeError: manual optimization, a backward pass of the user's own, synchronised BatchNorm, or BatchNorm with
            StochasticWeightAveraging.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise TypeError(
            f"{name} optimizes manually: it decides inside of training_step when gradients are there and a step is"
            " due, but in a pipeline several micro-batches are inside of it at a time. Use automatic optimization, or"
            " strategy='hetero_balanced', which supports manual optimization"
        )
    if is_overridden("backward", module):
        raise TypeError(
            f"{name} overrides backward(); in a pipeline each stage runs a backward pass of its own and there is no"
            " single one to replace. Remove it (scaling the loss in training_step does the same), or use"
            " strategy='hetero_balanced'"
        )
    if syncs_batch_norm:
        raise TypeError(
            "sync_batchnorm=True makes all ranks meet inside of each BatchNorm, but in a pipeline they are never in"
            " the same layer at the same time. Set it to False: statistics are then of one micro-batch, so choose"
            " micro_batch_size="
            " large enough; or use strategy='hetero_balanced'"
        )
    swa = any(isinstance(c, StochasticWeightAveraging) for c in trainer_callbacks(module.trainer))
    if swa and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        raise TypeError(
            "StochasticWeightAveraging with BatchNorm replaces the running statistics of all layers and renews them in"
            " one more epoch, but in a pipeline each rank has those of its own layers, and they would be of"
            " micro-batches. Use WeightAveraging, which averages the statistics, too, or GroupNorm, or"
            " strategy='hetero_balanced'"
        )


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Checks the optimizers.

    Raises:
        TypeError: LBFGS, or none.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise TypeError(
            "LBFGS needs inner products over all parameters, and each rank of a pipeline holds some of them only;"
            " use another optimizer, or one device"
        )
    if not any(group.get("params") for optimizer in optimizers for group in optimizer.param_groups):
        raise TypeError(
            "configure_optimizers returned none; a pipeline trains in automatic optimization, which needs one. To run a"
            " model without training it, use trainer.validate, test or predict"
        )
