"""Where all live ranks meet, at the server (layer L).

    before Lightning or torchmetrics reduce over ranks:   meet -> who lives, the same version for all
    somebody died since the last meeting:                 process group of those left; validation is divided again
    somebody joins between two epochs [admission]:        process group with the joining rank
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.stale.decide import report
from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.messages import MetAtServer
from lightning_hetero.stale.runtime.start import SILENT_SIGNS
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_COLLECTIVE_S = 60.0  # for a slow network, however short the signs of life


class _MeetingPoints(Callback):
    """The hooks at which ranks meet; private, so that command lines do not offer it among the user's callbacks."""

    def __init__(self, meetings: ServerMeetings) -> None:
        for name in [name for name in dir(ServerMeetings) if name.startswith("on_")]:
            setattr(self, name, getattr(meetings, name))


class ServerMeetings(Meetings):
    """Keeps the ranks of a run together.

    Before anything of Lightning or torchmetrics reduces over ranks, all live ranks meet at the server. Then they hold
    the same version, and a rank that died meanwhile is out of the group. First among the callbacks.

    Args:
        trainer: the running trainer.
        session: where they meet.
        members: which ranks take part.
        channel: small collectives of all of them.
        backend, timeout: of the default process group.
        liveness_s: from one sign of life to the next [s].
        before_epoch: called when an epoch begins, before all hooks.
        take_over_changes: called before an epoch, and when training ends (True), for what the user's code has changed.
        leave_step: called when an epoch ends; a hook may have skipped the rest of it in the middle of a batch.

    Attributes:
        counts: what the server had counted at the last one, see `Counts`; None before.
    """

    def __init__(
        self, trainer: Trainer, session: Session, members: Members, channel: SideChannel, *, backend: str,
        timeout: timedelta | None, liveness_s: float, before_epoch: Callable[[], None],
        leave_step: Callable[[], None], take_over_changes: Callable[[bool], None],
    ) -> None:  # fmt: skip
        silence_s = SILENT_SIGNS * liveness_s
        super().__init__(
            trainer, session, members, channel, backend=backend, timeout=timeout, silence_s=silence_s,
            collective_s=max(_COLLECTIVE_S, silence_s),
        )  # fmt: skip
        self.counts: Counts | None = None
        self._session = session
        self._before_epoch, self._leave_step, self._take_over_changes = before_epoch, leave_step, take_over_changes
        self._validating, self._advised = set[int](), False
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
        self._before_epoch()
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
        if (worker := self._session.worker) is not None:
            self.gather(what, partial(self._session.meet, call=call))
            if pull:
                worker.pull()

    def heard(self, met: Met) -> Met:
        assert isinstance(met, MetAtServer)
        self.counts = met.counts
        if not self._advised and (advice := report.advice(met.counts)) is not None:
            self._advised = True
            self._members.warn_once(advice)
        return super().heard(met)

    def agree_on_averages(self) -> None:
        """Averaged weights are rank 0's on all ranks: a rank that was passed by has not seen its version."""
        averaged = compat.averaged_weights(self.trainer)
        if averaged and self._session.worker is not None and len(self._members.alive) > 1:
            self.together("averaged weights", lambda: [dist.broadcast(t.data, 0) for t in averaged])  # the lowest's

    def close(self) -> None:
        """Takes the callback out again."""
        self._callbacks.remove(self._points)
        del self._points  # which refers to this
