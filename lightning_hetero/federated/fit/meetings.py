"""Where all ranks meet: behind a round's last batch, before a validation, when an epoch or the fit ends (layer L)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero import lightning_compat as compat

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["meeting_points"]


class _Run(Protocol):
    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are there."""
        ...

    def gather(self, what: str) -> None:
        """Meets all who live, where ranks may be lost: before something is reduced that cannot be made again."""
        ...

    def end_slot(self) -> None:
        """The batch is over; meets, if the round is."""
        ...

    def meet(self, logged: tuple[str, ...] | None = None) -> None:
        """Averages, unless nothing was trained since the last time."""
        ...


def meeting_points(run: _Run) -> Callback:
    """Returns what must be the first among the callbacks, so that all others see the average."""
    return _MeetingPoints(run)


class _MeetingPoints(Callback):  # private, so that command lines do not offer it
    """Called on ranks that rest, too."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._validating: tuple[int, ...] = ()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.end_slot()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        before = self._run.present
        self._run.meet()
        self._run.gather("validation starts")
        self._validating = self._run.present
        if self._validating != before:
            compat.count_val_batches(trainer, begin=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._run.gather("validation ends")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and set(self._validating) - set(self._run.present):
            rank_zero_warn(
                "a rank was lost during this validation: the metrics leave out the samples it was to validate; the next"
                " validation covers all samples again"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet(tuple(compat.reduced_names(trainer)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet()
