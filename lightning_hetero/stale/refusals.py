"""What cannot work with a parameter server that waits for nobody, refused with the reason and a way out (layer L)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.optim import Optimizer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.stale.norms import has_batch_norm

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["refuse_lbfgs", "refuse_what_waits"]


def refuse_what_waits(module: LightningModule, *, syncs_batch_norm: bool, scales_loss: bool) -> None:
    """Refuses what makes ranks wait for each other within a batch, or needs what only the server has.

    Args:
        module: attached to its trainer.
        syncs_batch_norm: the Trainer was asked to.
        scales_loss: the precision plugin has a `torch.amp.GradScaler`.

    Raises:
        TypeError: with the reason.
    """
    if syncs_batch_norm or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise TypeError(
            "SyncBatchNorm makes every rank wait for all others in every batch, which is what this strategy avoids;"
            " use BatchNorm (its running statistics are averaged over the samples), GroupNorm, or"
            " strategy='hetero_balanced'"
        )
    swa = any(isinstance(c, StochasticWeightAveraging) for c in compat.trainer_callbacks(module.trainer))
    if swa and has_batch_norm(module):
        raise TypeError(
            "StochasticWeightAveraging with BatchNorm runs an epoch over the averaged weights to renew the running"
            " statistics, and the parameter server does not have these weights; use WeightAveraging, which averages"
            " the statistics, too, or GroupNorm, or strategy='hetero_balanced'"
        )
    if scales_loss and not module.automatic_optimization:
        raise TypeError(
            "precision='16-mixed' with manual optimization: the loss scale would have to be agreed between the"
            " optimizer steps of one batch; use precision='bf16-mixed'"
        )


def refuse_lbfgs(optimizers: Iterable[Optimizer]) -> None:
    """Refuses an optimizer that evaluates the loss within its step.

    Raises:
        TypeError: there is one.
    """
    if any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
        raise TypeError(
            "LBFGS evaluates the loss several times per step, and here the step is made in the parameter server;"
            " use another optimizer, or one device"
        )
