"""Manual optimization by ``loss.backward()`` where it should be ``self.manual_backward(loss)`` (layer L).

Under stock DDP the former synchronises nothing: each rank trains for itself, without a word. A sharded model
synchronises either, but only the latter weights the loss.

Which parameters DDP keeps equal, and whether others are trained by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.balanced.runtime.pieces import leaves
from lightning_hetero.balanced.runtime.shard import fully_sharded


class Trained:
    """The parameters that required gradients when DDP wrapped the module."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._epoch = -1
        self._parameters: list[nn.Parameter] = []
        self._flags: list[bool] = []  # which of them required gradients in the last step
        self._wrapped: set[int] = set()  # ids of those that DDP keeps equal

    def wrapped(self) -> None:
        """The module was wrapped."""
        self._parameters = list(self._trainer.lightning_module.parameters())
        self._flags = [p.requires_grad for p in self._parameters]
        self._wrapped = self._ids()

    def _ids(self) -> set[int]:
        return {id(p) for p in self._parameters if p.requires_grad}

    def want_wrapping(self, model: Any) -> bool:
        """Whether DDP has to wrap the module again, since other parameters are trained than when it did.

        What is thawed later each rank would train for itself, and for what is frozen later DDP would wait. All ranks
        come to the same answer, as they run the same program.

        Args:
            model: as it is trained, wrapped or not.
        """
        if self._epoch != self._trainer.current_epoch:  # a module may have got others
            self._epoch = self._trainer.current_epoch
            self._parameters = list(self._trainer.lightning_module.parameters())
        flags = [p.requires_grad for p in self._parameters]
        if flags == self._flags:
            return False
        self._flags, trained = flags, self._ids()
        if not (isinstance(model, DistributedDataParallel) and trained):
            return False
        return not (trained <= self._wrapped if model.find_unused_parameters else trained == self._wrapped)


class PlainBackward:
    """Makes ``loss.backward()`` in a training step what ``self.manual_backward(loss)`` is.

    Attributes:
        manual: whether a backward pass of Lightning's runs, which needs no help.
    """

    def __init__(self) -> None:
        self.manual = False

    @contextmanager
    def taken(self, module: LightningModule, model: Any) -> Iterator[None]:
        """Around a training step.

        Args:
            module: the user's.
            model: as it is trained, wrapped or not.
        """
        original = torch.Tensor.backward

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.manual or "inputs" in kwargs or len(args) > 3 or not _synchronised(loss, model):
                return original(loss, *args, **kwargs)
            return module.manual_backward(loss, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.Tensor.backward = original  # type: ignore[method-assign]


def _synchronised(loss: Tensor, model: Any) -> bool:
    """Whether a backward pass reaches parameters that are sharded, or that DDP keeps equal.

    Raises:
        RuntimeError: it reaches some of them only, and DDP was not told that this may be.
    """
    if not isinstance(model, DistributedDataParallel):
        return fully_sharded(model) and any(isinstance(leaf, nn.Parameter) for leaf in leaves(loss))
    ours = {id(p) for p in model.parameters() if p.requires_grad}
    reached = {id(leaf) for leaf in leaves(loss)} & ours
    if reached and reached != ours and not model.find_unused_parameters:
        raise RuntimeError(
            f"loss.backward() in training_step reaches {len(reached)} of {len(ours)} trained parameters. Alone it would"
            " synchronise nothing between the ranks, as under strategy='ddp', and self.manual_backward(loss) waits for"
            " all of them: use strategy='hetero_balanced_find_unused_parameters_true'"
        )
    return bool(reached)
