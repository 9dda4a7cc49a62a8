"""Where the ranks of an engine without a server meet: in the run's store; and the hooks at which they do (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.join import FIRST_GENERATION, JoinRequests
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.run import Binder, EngineRun
from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError
from lightning_hetero.transport.groups import group_members
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, RollCall
from lightning_hetero.transport.run_store import not_inherited

COLLECTIVE_S = 300.0  # for ranks that have just met: to send some megabytes takes less


class RunMeetings(Meetings):
    """Keeps the ranks of a fit together; see `Meetings`.

    Args:
        trainer: the running trainer.
        strategy: that of the trainer.
        run: of the fit.
        least: ranks that must be left.
        asked_by: name of the argument that says so.
        liveness_s: silence after which a rank is left out [s].
        changed: called when other ranks are there, with the reason.

    Attributes:
        open: training has begun, and is not over.
        admits: what is saved now is for a rank that comes again.
        admission: lets in ranks that come again.
        roll: where they meet.
    """

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], run: EngineRun[Any], *, least: int,
        asked_by: str, liveness_s: float, changed: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        assert strategy.cluster_environment is not None
        invitation = strategy.invitation
        members, store, self.open, self._why = strategy.members, run.store, False, ""
        self.admits = False
        patience, since = strategy.timeout or timedelta(minutes=30), dict.fromkeys(members.alive, 0)
        waits: dict[str, Any] = {
            "liveness_s": liveness_s, "patience_s": patience.total_seconds(), "check": run.failures.check
        }  # fmt: skip
        if invitation is None and members.is_lowest:
            with suppress(RuntimeError):  # ranks that have met through a file have no port
                not_inherited(strategy.cluster_environment.main_port)  # torch's store goes with the first group
            members.hosted = store.kept  # the groups that are made through it live on after the fit
            self.roll: RollCall = HostRollCall(store, members.rank, since, least=least, asked_by=asked_by, **waits)
        else:
            met = since[members.rank] = 0 if invitation is None else invitation.meetings
            self.roll = GuestRollCall(store, members.rank, since, met=met, **waits)
        super().__init__(
            trainer, self.roll, members, run.channel, backend=strategy.process_group_backend or "gloo",
            timeout=strategy.timeout, silence_s=liveness_s, collective_s=max(COLLECTIVE_S, liveness_s),
        )  # fmt: skip
        self.changed.append(lambda _: changed(self._why))
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        requests = JoinRequests(strategy.cluster_environment)
        self.admission = Admission(trainer, self, members, requests, store=store, generation=generation)

    @property
    def joining(self) -> bool:
        """Whether this rank is on its way into a run of others."""
        return self._members.joining

    def heard(self, met: Met) -> Met:
        self._why = "; ".join(met.notices) or self._why
        return super().heard(met)

    def start(self) -> None:
        """Training begins."""
        if self._members.is_lowest and not self.open:
            self.admission.announce()
        self.open = True

    def finish(self) -> None:
        """Training is over."""
        if self.open:
            self.gather("training ends")
            self.open = False
            self.roll.close(well=True)

    def close(self) -> None:
        """Ends this rank's part; idempotent."""
        self.admission.end()
        self.roll.close()
        if group_members() is None:
            self._members.hosted = None


class MeetingPoints:
    """The first among the callbacks; a run makes a private callback of it, so that command lines do not offer it.

    Args:
        trainer: the running trainer.
        gather: meets all ranks that live, before something is reduced that cannot be made again.
        present: returns the ranks that are there.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[str], None], present: Callable[[], tuple[int, ...]]) -> None:
        self._gather, self._present = gather, present
        self._validating: tuple[int, ...] = ()
        self._callbacks = compat.trainer_callbacks(trainer)
        self._callbacks.insert(0, cast("Callback", self))

    def close(self) -> None:
        """Takes the callback out again."""
        self._callbacks.remove(cast("Callback", self))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        before = self._present()
        self._gather("validation starts")
        self._validating = self._present()
        if self._validating != before:
            compat.count_val_batches(trainer, begin=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._gather("validation ends")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and set(self._validating) - set(self._present()):
            rank_zero_warn(
                "a rank was lost during this validation: the metrics leave out the samples it was to validate; the next"
                " validation covers all samples again"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gather("epoch ends")


class MeetingRun(EngineRun[Binder]):
    """A run whose ranks may be lost, and come again, if an argument of its strategy allows that.

    Attributes:
        members: the ranks that take part; set before the run is begun.
        clients: where they meet, if they may be lost; else None.
    """

    members: Members
    clients: RunMeetings | None = None

    @property
    def present(self) -> tuple[int, ...]:
        return self.members.alive

    def gather_ranks(self, what: str) -> None:
        """Meets all ranks that live, where ranks may be lost: before something is reduced that cannot be made again."""
        if self.clients is not None and self.clients.open:
            self.clients.gather(what)

    def start(self) -> None:
        if self.clients is not None:
            self.members.joining = False
            self.clients.start()

    def finish(self) -> None:
        if self.clients is not None:
            self.clients.finish()

    def ends_others(self, error: BaseException) -> bool:
        """They go on if it was left behind, or is not yet one of them; what all learned at a meeting they know."""
        return not (isinstance(error, LeftBehindError | RemoteFailureError) or self.members.joining)

    def close(self) -> None:
        if self.clients is not None:
            self.clients.close()
        super().close()
