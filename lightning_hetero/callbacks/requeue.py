"""SLURM's signal that the job is to be requeued: a checkpoint and the request, but between two batches (layer L).

Lightning's handler does both wherever the signal finds the program. Where ranks are in different batches, or a batch is
on its way through layers that ranks hold in parts, that waits for the end of a batch.

    `RequeueByOne`      the lowest rank saves, as the others' state is not on them, and waits for nobody
    `RequeueTogether`   rank 0's signal is told to all with a batch, and all save at the end of that one
    `RequeueInStep`     when all have their signal, rank 0 says behind which batch to come they save
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched

__all__ = ["RequeueByOne", "RequeueInStep", "RequeueTogether"]


class _BatchEnds(Callback):  # private, so that command lines do not offer it
    """Calls ``save`` when a batch has ended, also one that is None, and when training has."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._save()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save()


class _Requeue:
    """Has a callback among the user's, as the last, from the signal until it is answered: else nobody meets it there.

    Args:
        trainer: has not set its signal handlers yet.
        told: called in the signal handler with the signal's number.
    """

    def __init__(self, trainer: Trainer, told: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._due: deque[int] = deque()
        self._carry_out, self._undo = compat.defer_requeue(trainer, told)
        self._callbacks = compat.trainer_callbacks(trainer)
        self._ends = _BatchEnds(self._save)

    def _owe(self, number: int) -> None:
        """Answers the signal at the end of the batch."""
        self._due.append(number)
        self._enter()

    def _enter(self) -> None:
        if self._ends not in self._callbacks:
            self._callbacks.append(self._ends)

    def _around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _save(self) -> None:
        while self._due:
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


class RequeueInStep(_Requeue):
    """See the module. For ranks that sum gradients over all of them, so that none is far ahead of another.

    Rank 0 has said it before it takes part in the next sum, so all know when that is over, and the batch meant comes
    after it. Training that ends before needs no requeue. Nothing travels while nobody has a signal.

    Args:
        trainer: has not set its signal handlers yet.
        rank, world_size: of the run.
        store: shared by its ranks, and nobody else's.
    """

    def __init__(self, trainer: Trainer, rank: int, world_size: int, store: dist.Store) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: Any = store  # torch's stubs do not know that values may be bytes
        self._number = self._answered = 0
        self._behind: int | None = None
        super().__init__(trainer, self._told)

    def _told(self, number: int) -> None:
        self._number = number
        self._enter()

    def _save(self) -> None:
        trained = compat.batches_of_all_epochs(self._trainer)
        with suppress(RuntimeError):  # rank 0 has ended: training has
            self._agree(trained)
        # Within a window of accumulation the checkpoint would lack its gradients.
        if self._behind is not None and trained >= self._behind and not compat.accumulates_now(self._trainer):
            self._behind, self._answered = None, self._answered + 1
            self._leave()  # before the checkpoint, which holds the callbacks' state
            self._carry_out(self._number)

    def _agree(self, trained: int) -> None:
        if self._behind is not None:
            return
        asked, behind = f"{self._answered}/asked/", f"{self._answered}/behind"
        self._store.set(f"{asked}{self._rank}", "")
        if self._rank == 0 and self._store.check([f"{asked}{rank}" for rank in range(self._world_size)]):
            self._store.set(behind, str(trained + self._trainer.accumulate_grad_batches + 1))
        if self._store.check([behind]):
            self._behind = int(self._store.get(behind))

    def close(self) -> None:
        super().close()
        self._store = None
