"""Which parameters DDP keeps equal, and whether others are trained by now (layer L)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
