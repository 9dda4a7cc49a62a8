"""How a batch is cut into pieces, learned on the rank that needs to know (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lightning.pytorch.strategies import Strategy
from torch.utils.data import IterableDataset

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["layout_of"]


def layout_of(trainer: Trainer, save: Callable[[], Callable[[], None]]) -> Layout | None:
    """Returns how the train batches are cut; None of a stream, which is not read twice, of several loaders, or
    where the module cuts them.

    Args:
        trainer: in the middle of a step.
        save: returns what puts back what the user's hooks change.

    Raises:
        TypeError: it is not known what belongs to which sample.
    """
    if callable(getattr(trainer.lightning_module, "split_batch", None)):
        return None
    loaders = [users_own(loader) for loader in compat.train_loaders(trainer)]
    if len(loaders) > 1 or isinstance(loaders[0].dataset, IterableDataset):
        return None
    move, collate = partial(Strategy.batch_to_device, trainer.strategy), loaders[0].collate_fn
    put_back = save()
    try:
        with compat.unlogged(trainer.lightning_module):
            samples = first_samples(loaders[0], 4)
            return learn_layout(lambda part: compat.batch_to_device(trainer, collate(part), move), samples)
    finally:
        put_back()
