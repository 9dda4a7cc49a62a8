"""Signals to some ranks that all answer behind the same batch: SIGTERM, and SLURM's for a requeue (layer L)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.requeue import RequeueTogether
from lightning_hetero.data.order import Channel

_REQUEUE = 1_000_000.0  # more than there are ranks: one number tells of both signals


class SignalsTogether:
    """Tells of them over the host, instead of Lightning's broadcast on the device before every batch.

    What is said before a batch is heard before the next, when the others have said it, too: their gradients are here.

    Args:
        trainer: the running trainer.
        channel: over all ranks.
        requeue: saves and asks SLURM; None: nothing requeues this job.
        begins: called before each batch.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, requeue: RequeueTogether | None,
        begins: Callable[[], None],
    ) -> None:  # fmt: skip
        self._begins = begins
        self._trainer, self._channel, self._requeue = trainer, channel, requeue
        self._received = False
        self._said: deque[Callable[[], float]] = deque()  # how many ranks were told, and the signal of rank 0
        self.undo = compat.replace_sigterm_broadcast(trainer, self._any_told)

    def keeps_sigterm(self) -> bool:
        """This process has received SIGTERM: whether all are to end together; else Lightning ends this one."""
        training = self._trainer.training
        self._received |= training and bool(self._said)
        return training and self._received

    def _any_told(self, told: bool) -> bool:
        self._begins()
        self._say(told or self._received)
        if len(self._said) < 2:
            return False
        signal, ranks = divmod(self._said.popleft()(), _REQUEUE)
        if self._requeue is not None:
            self._requeue.hear(signal)
        return ranks > 0

    def _say(self, told: bool) -> None:
        signal = 0.0 if self._requeue is None else self._requeue.take()
        self._said.append(self._channel.sum_async(float(told) + _REQUEUE * signal))

    def training_pauses(self) -> None:
        """Batches end for a while, or altogether: what was said is heard now."""
        self._say(self._received)
        heard = [divmod(said(), _REQUEUE) for said in self._said]
        self._said.clear()
        if self._requeue is not None:
            self._requeue.finish(max(signal for signal, _ in heard))
        if any(ranks for _, ranks in heard):
            compat.raise_sigterm(self._trainer)
