"""Calling a user's step as the loop would, outside of it (layer L)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_hetero.lightning_compat.patches import patched

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["call_training_step", "train_source", "unlogged", "zeroes_now"]


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Calls ``training_step`` with the arguments that its signature asks for, which only the loop knows to choose."""
    kwargs = module.trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)
    return module.training_step(*kwargs.values())


@contextmanager
def unlogged(module: LightningModule) -> Iterator[None]:
    """Inside, ``self.log`` does nothing: outside of a loop it would raise. ``log_dict`` ends up there, too."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    with patched(module, "log", nothing):
        yield


def train_source(trainer: Trainer) -> Any:
    """The user's train loader as given, or as ``train_dataloader()`` makes it, before the Trainer has set it up.

    ``trainer.train_dataloader`` is the loader in use, which there is none of before training starts.
    """
    return trainer.fit_loop._data_source.dataloader()


def zeroes_now(trainer: Trainer) -> bool:
    """Whether the loop is about to zero the gradients in the running batch: the first one of an accumulation window.

    It decides by the batch's index inside the epoch, which only its private progress tells here.
    """
    batch_idx = trainer.fit_loop.epoch_loop.batch_idx
    return batch_idx % trainer.accumulate_grad_batches == 0
