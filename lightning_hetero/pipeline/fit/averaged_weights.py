"""Averaged weights: the copies of the module that Lightning's callbacks keep, divided as the module is (layer L).

    WeightAveraging, EMAWeightAveraging    _average_model.module ──► "state_dict" of a checkpoint
    StochasticWeightAveraging              _average_model        ──► "callbacks" / its key / "average_model_state"

The callbacks make their copy before training, when the module is whole, and from then on go through both parameter by
parameter. So a copy that is pruned like the module averages, is swapped and is copied back on each rank for the layers
which that holds. What a checkpoint gets of it has to be collected, as of any other copy that a callback keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_hetero.lightning_compat import averaging_callbacks
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState
from lightning_hetero.pipeline.runtime.ownership.owner_groups import raise_together, share_initial
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.pipeline.runtime.ownership.pruning import movable, prune, restore
from lightning_hetero.pipeline.runtime.ownership.stand_ins import Here


class Averages:
    """The averaging callbacks' copies of a module, from the division of its layers until it is whole again.

    Args:
        trainer: with its callbacks, which have made their copies.
        ownership: which rank holds what, in the module and so in its copies.
        group: over all ranks, one that takes CPU tensors (gloo).
        here: what runs on this rank.

    Attributes:
        ownership: in force; whoever changes it moves the copies' tensors.
        copies: that are divided at present.
    """

    def __init__(self, trainer: Trainer, ownership: Ownership, group: dist.ProcessGroup, here: Here) -> None:
        self._trainer, self.ownership, self._group, self._here = trainer, ownership, group, here
        self.copies: list[LightningModule] = []
        self._movable = ExitStack()

    def divide(self) -> None:
        """Leaves of each copy on this rank what it holds of the module; collective."""
        for _, copy in averaging_callbacks(self._trainer):
            share_initial(copy, self.ownership, self._group)
            prune(copy, (), self.ownership, self._here)
            self._movable.enter_context(movable(copy))  # a callback moves its copy when averaging begins
            self.copies.append(copy)

    def restore(self) -> None:
        """Makes the copies whole again, on the CPU; collective."""
        self.release()
        for copy in self.copies:
            restore(copy, (), self.ownership, self._group)
        self.copies.clear()

    def release(self) -> None:
        """Takes back what was changed about the copies, but for what they hold."""
        self._movable.close()


def complete(checkpoint: dict[str, Any], whole: WholeState) -> None:
    """Puts tensors in a checkpoint on rank 0 where callbacks and hooks have left stand-ins; collective.

    They come from the rank that has values in the same place of its own checkpoint.

    Raises:
        RuntimeError: no rank has; or the place cannot be written to.
    """
    slots = {path: slot for path, *slot in _slots(checkpoint, "")}
    found = whole.collect_apart({path: box[key] for path, (box, key) in slots.items()})
    fixed = [path for path in found if isinstance(slots[path][0], tuple)]
    problem = ValueError(f"the checkpoint's {fixed[0]} is in a tuple: use a list") if fixed else None
    raise_together(problem, whole.group)
    for path, tensor in found.items():
        box, key = slots[path]
        box[key] = tensor


def _slots(box: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields where tensors are: a path, the container, and the key in it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(box, dict):
        items = box.items()
    elif isinstance(box, list | tuple):
        items = enumerate(box)
    for key, item in items:
        if isinstance(item, Tensor):
            yield f"{path}[{key!r}]", box, key
        else:
            yield from _slots(item, f"{path}[{key!r}]")
