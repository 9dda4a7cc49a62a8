"""How a train loader's batches are cut into micro-batches, learned on one rank before they are read (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.data.layouts import Layout, first_samples, learn_layout
from lightning_hetero.pipeline.fit.plan.rehearsal import nobody_notices

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hetero.transport.side_channel import SideChannel

__all__ = ["agree_layout"]

_SAMPLES = 4


def agree_layout(
    loader: DataLoader,
    module: LightningModule,
    *,
    channel: SideChannel,
    leader: int,
    device: torch.device,
    to_device: Callable[[Any], Any],
    needed: bool,
) -> Layout | None:
    """Returns how the batches of a loader are cut, the same on all ranks; None: it is not known. Collective.

    Args:
        loader: the user's.
        module: whose hooks see a batch on its way to the device.
        channel: over all ranks.
        leader: the rank that reads a few samples; it holds what is outside of the layers.
        device: of this rank.
        to_device: moves a batch, with all hooks of the user.
        needed: a plan cuts them, or another one may.

    Raises:
        TypeError: they cannot be cut, but must be; on all ranks, with the way out.
    """
    told: list[Any] = [None]
    cause: Exception | None = None
    if channel.rank == leader:
        try:
            with nobody_notices(module, loader, device, leave=(Tensor,)):
                samples = first_samples(loader, _SAMPLES)
                told = [learn_layout(lambda part: to_device(loader.collate_fn(part)), samples)]
        except Exception as error:
            cause, told = error, [f"{'' if isinstance(error, TypeError) else type(error).__name__ + ': '}{error}"]
    dist.broadcast_object_list(told, src=leader, group=channel.group)
    if isinstance(told[0], str) and not needed:
        return None
    if isinstance(told[0], str):
        raise TypeError(
            f"the batches of the train loader cannot be cut into micro-batches: {told[0]}. Or use"
            " strategy='hetero_balanced', which gives training_step the batch of a rank as it is"
        ) from cause
    return told[0]
