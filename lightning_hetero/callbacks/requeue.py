"""SLURM's signal that the job is to be requeued: a checkpoint and the request, but between two batches (layer L).

Lightning's handler does both wherever the signal finds the program. Where ranks are in different batches, or a batch is
on its way through layers that ranks hold in parts, that waits for the end of a batch.

    `RequeueByOne`      the lowest rank saves, as the others' state is not on them, and waits for no other rank
    `RequeueTogether`   rank 0's signal reaches all with a batch, and all save at the end of that one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched


class _Requeue:
    """Has a callback among the user's, as the last, from the signal until it is answered.

    Args:
        trainer: has not set its signal handlers yet.
        told: called in the signal handler with the signal's number.
    """

    def __init__(self, trainer: Trainer, told: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._due: deque[int] = deque()
        self._carry_out, self._undo = compat.defer_requeue(trainer, told)
        self._callbacks = compat.trainer_callbacks(trainer)
        hooks = ("on_train_batch_end", "on_validation_batch_end", "on_train_end")  # also of a batch that is None
        self._ends = LambdaCallback(**dict.fromkeys(hooks, lambda *_, **__: self._save()))

    def _owe(self, number: int) -> None:
        """Answers the signal at the end of the batch."""
        self._due.append(number)
        if self._ends not in self._callbacks:
            self._callbacks.append(self._ends)

    def _around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _save(self) -> None:
        # Within a window of accumulation the checkpoint would lack its gradients.
        while self._due and not compat.accumulates_now(self._trainer):
            number = self._due.popleft()
            if not self._due:
                self._leave()  # before the checkpoint, which holds the callbacks' state
            with self._around():
                self._carry_out(number)

    def _leave(self) -> None:
        if self._ends in self._callbacks:
            self._callbacks.remove(self._ends)

    def close(self) -> None:
        """From here on the handler is Lightning's own."""
        self._undo()
        self._leave()


class RequeueByOne(_Requeue):
    """See the module.

    Args:
        trainer: has not set its signal handlers yet.
        mine: whether this rank saves; None: it is not training with others now, so the handler runs at once.
    """

    def __init__(self, trainer: Trainer, mine: Callable[[], bool | None]) -> None:
        self._mine = mine
        super().__init__(trainer, self._told)

    def _told(self, number: int) -> None:
        if (mine := self._mine()) is None:
            self._carry_out(number)
        elif mine:
            self._owe(number)

    def _around(self) -> AbstractContextManager[None]:
        return patched(self._trainer.strategy, "barrier", lambda *_, **__: None)


class RequeueTogether(_Requeue):
    """See the module.

    Args:
        trainer: has not set its signal handlers yet.
        rank: this one.
    """

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self._rank, self._asked = rank, 0
        super().__init__(trainer, self._told)

    def _told(self, number: int) -> None:
        self._asked = number

    def take(self) -> float:
        """Returns what this rank adds to a sum over all: the number of rank 0's signal, or 0."""
        asked = self._asked
        if asked:  # else a signal that comes just now would be forgotten
            self._asked = 0
        return float(asked if self._rank == 0 else 0)

    def hear(self, total: float) -> None:
        """Takes in that sum, in the same batch on all ranks."""
        if total:
            self._owe(int(total))

    def finish(self, total: float) -> None:
        """As `hear`, behind the last batch: answered at once."""
        self.hear(total)
        self._save()
