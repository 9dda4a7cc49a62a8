"""How a batch is cut into pieces, learned on the rank that needs to know (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy
from torch.utils._pytree import tree_map

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["layout_of"]


def layout_of(trainer: Trainer, save: Callable[[], Callable[[], None]]) -> Layout | None:
    """Returns how the train batches are cut; None where the module does it.

    Args:
        trainer: in the middle of a step.
        save: returns what puts back what the user's hooks change.

    Raises:
        TypeError: it is not known what belongs to which sample.
    """
    if callable(getattr(trainer.lightning_module, "split_batch", None)):
        return None
    move = partial(compat.batch_to_device, trainer, move=partial(Strategy.batch_to_device, trainer.strategy))
    put_back = save()
    try:
        with compat.unlogged(trainer.lightning_module):
            drawn = {id(copy): first_samples(users_own(copy), 4, in_use=True) for copy in compat.train_loaders(trainer)}

            def collate(numbers: list[int]) -> Any:
                def batch(copy: Any) -> Any:
                    samples = drawn[id(copy)]
                    return users_own(copy).collate_fn([samples[i % len(samples)] for i in numbers])

                return move(tree_map(batch, trainer.train_dataloader))

            return learn_layout(collate, range(4))
    finally:
        put_back()
