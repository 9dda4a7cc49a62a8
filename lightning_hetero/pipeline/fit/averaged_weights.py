"""Averaged weights: the copies of the module that Lightning's callbacks keep, divided as the module is (layer L).

    WeightAveraging, EMAWeightAveraging    _average_model.module ──► "state_dict" of a checkpoint
    StochasticWeightAveraging              _average_model        ──► "callbacks" / its key / "average_model_state"

The callbacks make their copy before training, when the module is whole, and from then on go through both parameter by
parameter. So a copy that is pruned like the module averages, is swapped and is copied back on each rank for the layers
which that holds. What a checkpoint gets of it has to be collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lightning_hetero.lightning_compat import averaging_callbacks
from lightning_hetero.pipeline.runtime.own.full_state import WholeState
from lightning_hetero.pipeline.runtime.own.owner_groups import raise_together, share_initial
from lightning_hetero.pipeline.runtime.own.ownership import Ownership
from lightning_hetero.pipeline.runtime.own.pruning import movable, prune, restore
from lightning_hetero.pipeline.runtime.own.stand_ins import Here

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Averages", "refuse_parts"]


class Averages:
    """The averaging callbacks' copies of a module, from the division of its layers until it is whole again.

    Args:
        trainer: with its callbacks, which have made their copies.
        ownership: who holds what, in the module and so in its copies.
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

    def complete(self, checkpoint: dict[str, Any], whole: WholeState) -> None:
        """Puts whole state dicts in a checkpoint on rank 0, where callbacks have left this rank's part; collective."""
        if "averaging_state" in checkpoint:
            checkpoint["state_dict"] = whole.collect(lambda: checkpoint["state_dict"])
        states = checkpoint.get("callbacks", {})
        for callback, _ in averaging_callbacks(self._trainer):
            state = states.get(callback.state_key, {})
            if state.get("average_model_state") is not None:
                part = state["average_model_state"]
                state["average_model_state"] = whole.collect(lambda part=part: part)

    def restore(self) -> None:
        """Makes the copies whole again, on the CPU; collective."""
        self.release()
        for copy in self.copies:
            restore(copy, self.ownership, self._group)
        self.copies.clear()

    def release(self) -> None:
        """Takes back what was changed about the copies, but for what they hold."""
        self._movable.close()


def refuse_parts(checkpoint: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Checks that rank 0 has values for every tensor that it is about to write; collective.

    Raises:
        RuntimeError: it does not: somebody put a state dict of the divided module into it.
    """
    lost = [path for path, tensor in _tensors(checkpoint, "") if tensor.is_meta] if dist.get_rank(group) == 0 else []
    problem = None
    if lost:
        problem = ValueError(
            f"the checkpoint's {', '.join(lost[:3])} are of layers that other ranks hold: a callback or hook has put"
            " weights of the module, or of a copy of it, into the checkpoint, but each rank has those of its own layers"
            " only. Leave them out ('state_dict' has them all), or average with Lightning's WeightAveraging"
        )
    raise_together(problem, group)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from _tensors(item, f"{path}[{key!r}]")
