"""SIGTERM to some ranks ends all of them, behind the same batch (layer L)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_hetero import lightning_compat as compat
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["EndTogether"]


class EndTogether:
    """Tells of it over the host, in the place of Lightning's broadcast on the device before every batch.

    What is said before a batch is heard before the next, when the others have said it, too: their gradients are here.

    Args:
        trainer: the running trainer.
        channel: over all ranks.
    """

    def __init__(self, trainer: Trainer, channel: SideChannel) -> None:
        self._trainer, self._channel = trainer, channel
        self._received = False
        self._said: deque[Callable[[], float]] = deque()  # how many ranks were told
        self.undo = compat.replace_sigterm_broadcast(trainer, self._any_told)

    def keeps(self) -> bool:
        """This process has received it: whether all are to end together; else Lightning ends this one."""
        training = self._trainer.training
        self._received |= training and bool(self._said)
        return training and self._received

    def _any_told(self, told: bool) -> bool:
        self._said.append(self._channel.sum_async(float(told or self._received)))
        return len(self._said) > 1 and self._said.popleft()() > 0

    def training_pauses(self) -> None:
        """Batches end for a while, or altogether: what was said is heard now."""
        self._said.append(self._channel.sum_async(float(self._received)))
        told = sum(said() for said in self._said)
        self._said.clear()
        if told:
            compat.raise_sigterm(self._trainer)
