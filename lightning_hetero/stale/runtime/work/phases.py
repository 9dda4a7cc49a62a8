"""What the user's code is doing on a rank, and the refusal of what it must not change then (layer T)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NoReturn

__all__ = ["Phase", "refuse"]


class Phase(Enum):
    """What the user's code is doing; the values say where a change was made."""

    BATCH = "in training_step or in a hook between the batch's start and the optimizer's step"
    BETWEEN = "behind an optimizer's step, e.g. in on_train_batch_end or in optimizer_step"
    MET = "where ranks met within an epoch, e.g. in a hook of a validation"  # and nobody trains

    @property
    def bit(self) -> int:
        """By which devices note what they find in it, see `Watch.note`."""
        return 1 << list(Phase).index(self)


def refuse(names: Sequence[str], rank: int, phase: Phase) -> NoReturn:
    """Raises RuntimeError: parameters or buffers were changed on a rank."""
    listed = f"{names[0]} was" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more were"
    raise RuntimeError(
        f"{listed} changed on rank {rank} other than by an optimizer, {phase.value}. Under hetero_stale the parameter"
        " server has the parameters and buffers, and what it sends next would undo the change. Change them in"
        " on_train_epoch_start or on_train_epoch_end, on all ranks alike, or use strategy='hetero_balanced'"
    )
