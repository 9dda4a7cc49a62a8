"""Where all live ranks meet, at the server, and what follows if one is missing: new process groups (layer L).

    before Lightning or torchmetrics reduce over ranks:   meet -> who lives, the same version for all
    somebody died since the last meeting:                 process group of those left; validation is divided again
    somebody joins between two epochs [admission]:        process group with the joining rank
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.groups import Groups
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.stale.decide import report
from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.messages import MetAtServer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

T = TypeVar("T")

_SIGNS_TO_COME = 6  # of life, one per `liveness_s`: in this time a rank comes from a meeting to its collective


class _MeetingPoints(Callback):
    """The hooks at which ranks meet; private, so that command lines do not offer it among the user's callbacks."""

    def __init__(self, meetings: ServerMeetings) -> None:
        for name in [name for name in dir(ServerMeetings) if name.startswith("on_")]:
            setattr(self, name, getattr(meetings, name))


class ServerMeetings:
    """Keeps the ranks of a run together.

    Before anything of Lightning or torchmetrics reduces over ranks, all live ranks meet at the server. Then they hold
    the same version, and a rank that died meanwhile is out of the group. First among the callbacks.

    Args:
        trainer: the running trainer.
        session: where they meet.
        members: which ranks take part.
        groups: rebuilt without those that have died.
        admission: told when a rank is missing.
        liveness_s: silence from which on a rank counts as silent [s].
        take_over_changes: called before an epoch, and when training ends (True), for what the user's code has changed.
        leave_step: called when an epoch ends; a hook may have skipped the rest of it in the middle of a batch.

    Attributes:
        trainer: as given.
        counts: what the server had counted at the last one, see `Counts`; None before.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Session,
        members: Members,
        groups: Groups,
        admission: Admission,
        *,
        liveness_s: float,
        leave_step: Callable[[], None],
        take_over_changes: Callable[[bool], None],
    ) -> None:
        self.trainer = trainer
        self.counts: Counts | None = None
        self._session, self._members = session, members
        self._groups, self._admission = groups, admission
        self._come_s = _SIGNS_TO_COME * liveness_s
        self._leave_step, self._take_over_changes = leave_step, take_over_changes
        self._validating = set[int]()
        self._advised = False
        self._callbacks = compat.trainer_callbacks(trainer)
        self._points = _MeetingPoints(self)
        self._callbacks.insert(0, self._points)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = self._members.alive
        self.meet("validation starts", pull=True)
        self.agree_on_averages()
        if self._members.alive != ranks:
            compat.count_val_batches(trainer, begin=True)
        self._validating = set(self._members.alive)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meet(f"validation ends{self.logged()}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validating - set(self._members.alive):
            self._members.warn_once(
                "a rank died during this validation: the metrics leave out the samples it was to validate; the next"
                " validation covers all samples again"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_step()
        self.meet(f"epoch ends{self.logged()}", pull=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before any other hook: a joining rank goes through all hooks of its first epoch."""
        self._admission.admit()
        self._take_over_changes(False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before callbacks put their averages in place of the parameters."""
        self.meet("last batch trained", pull=True)
        self.agree_on_averages()
        self._take_over_changes(True)

    def meet(self, what: str, *, pull: bool = False, call: int | None = None) -> None:
        """Waits at the server for all live ranks; leaves the dead behind. Without a server nobody is waited for.

        Args:
            what: the purpose, the same on all ranks; a difference is an error that names both sides.
            pull: take the current parameters, which are the same for all as nobody computes meanwhile.
            call: see `Worker.meet`.
        """
        worker = self._session.worker
        if worker is None:
            return
        met = self._meet(what, call)
        self._regroup(met.alive)
        while not self._groups.all_come(self._come_s):
            met = self._meet("a rank was lost between a meeting and its collective")
            self._regroup(met.alive, anew=True)
        if pull:
            worker.pull()

    def _meet(self, what: str, call: int | None = None) -> MetAtServer:
        met = self._session.meet(what, call=call)
        self.counts = met.counts
        for notice in met.notices:
            self._members.warn_once(notice)
        if not self._advised and (advice := report.advice(met.counts)) is not None:
            self._advised = True
            self._members.warn_once(advice)
        return met

    def together(self, what: str, collective: Callable[[], T]) -> T:
        """Meets, and returns what the collective gives among those who have come."""
        self.meet(what)
        return collective()

    def logged(self) -> str:
        """Names what is reduced when an epoch ends, for `meet`: ranks that log other values would mix them up."""
        names = compat.reduced_names(self.trainer)
        return f", logged: {', '.join(names)}" if names else ""

    def agree_on_averages(self) -> None:
        """Averaged weights are rank 0's on all ranks: a rank that was passed by has not seen its version."""
        if self._session.worker is not None and len(self._members.alive) > 1:
            for tensor in compat.averaged_weights(self.trainer):
                dist.broadcast(tensor.data, 0)  # the lowest of those left

    def _regroup(self, alive: tuple[int, ...], *, anew: bool = False) -> None:
        members = self._members
        if alive == members.alive and not anew:
            return
        before = members.alive
        alive = self._groups.rebuild_among_living(alive, self._session.meetings)
        if members.is_lowest:
            self._admission.announce()
        self._admission.expect()
        if 0 in before and 0 not in alive:  # of another's death rank 0 has told, when the server told it
            members.warn_once(
                f"rank 0 died; the others go on without, on {len(alive)} devices, with the same global batch: rank"
                f" {alive[0]} writes checkpoints now, loggers of rank 0 log no more"
            )

    def close(self) -> None:
        """Takes the callback out again."""
        self._callbacks.remove(self._points)
        del self._points  # which refers to this
