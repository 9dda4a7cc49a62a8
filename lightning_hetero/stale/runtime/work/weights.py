"""The server's weights on a rank: what of them is here, and what the user's code has changed of it (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor

from lightning_hetero.stale.runtime.work.replica import Replica
from lightning_hetero.transport.base import WorkerLink


class Phase(Enum):
    """What the user's code is doing; the values say where a change was made."""

    BATCH = "in training_step or in a hook between the batch's start and the optimizer's step"
    BETWEEN = "behind an optimizer's step, e.g. in on_train_batch_end or in optimizer_step"
    MET = "where ranks met within an epoch, e.g. in a hook of a validation"  # and nobody trains

    @property
    def bit(self) -> int:
        """By which devices note what they find in it, see `Watch.note`."""
        return 1 << list(Phase).index(self)


class PulledWeights:
    """See the module.

    Args:
        link: where published parameters are read.
        replica: where they lie.

    Attributes:
        version: of the parameters pulled last; -1 before.
        kept: the user's code has changed some where ranks met, and they stay.
    """

    def __init__(self, link: WorkerLink, replica: Replica) -> None:
        self._link, self._replica, self._layout = link, replica, replica.layout
        self.version = -1
        self.kept = False
        self._substeps_used = False
        self._buffers_pushed = False  # since the last pull
        self._phase = Phase.MET

    @property
    def whole(self) -> bool:
        """Whether parameters and buffers are for certain those of `version`.

        Sub-steps change parameters under the same version; after a push that was not applied, buffers are the rank's.
        """
        return self.version >= 0 and not self._substeps_used and not self._buffers_pushed

    @property
    def is_newest(self) -> bool:
        """Whether the newest parameters and buffers are here for certain."""
        return self.whole and self._link.newest_version() <= self.version

    def pull(self) -> int:
        """See `Worker.pull`."""
        if self.kept:
            return self.version
        self._replica.adopt()
        if self.is_newest:
            self._replica.restore_buffers()
        else:
            self.read(self._link.read_parameters)
        self._replica.watch.settle_buffers()
        return self.version

    def read(self, read_parameters: Callable[[Tensor], int]) -> None:
        """Takes over other parameters and buffers, see `Replica.read`."""
        self.version = self._replica.read(read_parameters)
        self._buffers_pushed = False

    def pushed(self, *, substep: bool) -> None:
        """Gradients and buffers were pushed; a sub-step changes parameters under the same version."""
        self._buffers_pushed = bool(self._layout.buffers)
        self._substeps_used = self._substeps_used or substep

    def go_on(self, phase: Phase) -> None:
        """The server has answered: it overwrites what was kept."""
        self._phase, self.kept = phase, False

    # ---- what else changes them -------------------------------------------------------------------------------

    def changes(self) -> tuple[list[str], list[str]]:
        """Returns the names of parameters and buffers that the user's code has changed where the ranks met.

        They stay as they are until `discard`, or for good if the worker leaves.
        """
        replica = self._replica
        replica.adopt()
        parameters = replica.watch.changed(self._published)
        buffers = replica.changed_buffers()
        self.kept = bool(parameters or buffers)
        return ([self._layout.parameters[i].name for i in parameters], [self._layout.buffers[i].name for i in buffers])

    def discard(self) -> None:
        """Has the next pull bring everything."""
        self.kept, self.version = False, -1

    def _published(self) -> Tensor | None:
        """Returns the area of `version`, or None if that is not to be had any more."""
        if self._phase is not Phase.MET and not self.is_newest:
            return None
        area = torch.empty(self._layout.bytes, dtype=torch.uint8)
        return area if self._link.read_parameters(area) == self.version else None

    def look(self, *, wait: bool = False) -> list[Tensor]:
        """Refuses what the user's code has changed and the next pull would overwrite.

        Args:
            wait: for devices; else what tells whether they have noted anything (uint8) is returned, for the next push.
        """
        replica, phase = self._replica, self._phase
        if replica.attached:
            replica.adopt()
        if not replica.attached or self.version < 0:
            return []
        noted = [] if wait else replica.watch.note(phase.bit)
        names = [self._layout.parameters[i].name for i in replica.watch.changed(self._published, wait=wait)]
        if phase is not Phase.BATCH:
            entries = [self._layout.buffers[i] for i in replica.changed_buffers()]
            names += [entry.name for entry in entries if phase is Phase.MET or not entry.statistic]
        if wait:
            self.refuse_noted()
        self._refuse(names, phase)
        return noted

    def refuse_noted(self) -> None:
        """Refuses what devices have found."""
        found = self._replica.watch.noted()
        for phase in (Phase.BETWEEN, Phase.MET, Phase.BATCH):  # where it was seen first
            self._refuse([self._layout.parameters[i].name for i in sorted(found.get(phase.bit, ()))], phase)

    def _refuse(self, names: Sequence[str], phase: Phase) -> None:
        if names:
            self.stop()
            _refuse(names, self._link.rank, phase)

    def look_where_all_meet(self) -> None:
        """Keeps what was changed since they met; what was changed before is refused."""
        if self._phase is not Phase.MET:
            self.look(wait=True)
        elif self._replica.attached and self.version >= 0:
            self._replica.adopt()
            self.kept = self.kept or self._replica.watch.touched

    def stop(self) -> None:
        """The batch is left by an error: what is changed from here on stays, e.g. weights that a finder restores."""
        self._phase = Phase.MET


def _refuse(names: Sequence[str], rank: int, phase: Phase) -> NoReturn:
    """Raises RuntimeError: parameters or buffers were changed on a rank."""
    listed = f"{names[0]} was" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more were"
    raise RuntimeError(
        f"{listed} changed on rank {rank} other than by an optimizer, {phase.value}. Under hetero_stale the parameter"
        " server has the parameters and buffers, and what it sends next would undo the change. Change them in"
        " on_train_epoch_start or on_train_epoch_end, on all ranks alike, or use strategy='hetero_balanced'"
    )
