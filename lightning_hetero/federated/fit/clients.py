"""The clients of a fit that may be lost and come again: with whom the others go on (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer

from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.run import EngineRun
from lightning_hetero.federated.fit.settings import COLLECTIVE_S, FederatedSettings
from lightning_hetero.transport.groups import group_members
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, RollCall


class Clients(Meetings):
    """Keeps the clients of a fit together.

    Args:
        trainer: the running trainer.
        strategy: that of the trainer.
        run: of the fit.
        settings: of the fit.
        invitation: into a run of others.
        divide: called when other clients are there, with the reason.

    Attributes:
        open: training has begun, and is not over.
        admission: lets in clients that come again.
    """

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], run: EngineRun[Any], settings: FederatedSettings,
        invitation: Invitation | None, *, divide: Callable[[str], None],
    ) -> None:  # fmt: skip
        assert strategy.cluster_environment is not None
        members, store, self.open, self._why = strategy.members, run.store, False, ""
        patience, since = strategy.timeout or timedelta(minutes=30), dict.fromkeys(members.alive, 0)
        waits: dict[str, Any] = {
            "liveness_s": settings.liveness_s, "patience_s": patience.total_seconds(), "check": run.failures.check
        }  # fmt: skip
        if invitation is None and members.is_lowest:
            members.hosted = store.kept  # the groups that are made through it live on after the fit
            least = settings.min_clients or 1
            self._roll: RollCall = HostRollCall(store, members.rank, since, least=least, **waits)
        else:
            met = since[members.rank] = 0 if invitation is None else invitation.meetings
            self._roll = GuestRollCall(store, members.rank, since, met=met, **waits)
        super().__init__(
            trainer, self._roll, members, run.channel, backend=strategy.process_group_backend or "gloo",
            timeout=strategy.timeout, silence_s=settings.liveness_s,
            collective_s=max(COLLECTIVE_S, settings.liveness_s),
        )  # fmt: skip
        self.changed.append(lambda _: divide(self._why))
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        requests = JoinRequests(strategy.cluster_environment)
        self.admission = Admission(trainer, self, members, requests, store=store, generation=generation)

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
            self._roll.close(well=True)

    def close(self) -> None:
        """Ends this rank's part; idempotent."""
        self.admission.end()
        self._roll.close()
        if group_members() is None:
            self._members.hosted = None
