"""The clients of a fit that may be lost and come again: what they do together, and with whom (layer L).

    meet            which ranks are there? a silent one is left out, for all alike  [transport.roll_call]
    groups          process groups of those that are there, if they are others, or if one broke   [base.elastic]
    collective      an average, or what Lightning reduces; where a member dies in it, all find it unsound
    meet again      sound for all: all take the result; else no rank does, and all begin again without the lost
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.admission import COME_S, Admission
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.groups import Groups
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.transport.groups import group_members, leave_default_group
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, Roll, RollCall
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.transport.store import host_store

T = TypeVar("T")

_TRIES = 3  # of something that fails though no rank is lost


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _Met:
    alive: tuple[int, ...]
    notices: tuple[str, ...] = ()


class Clients:
    """Keeps the clients of a fit together; a `MeetingPlace`.

    Args:
        trainer: the running trainer.
        strategy: that of the trainer.
        channel: small collectives of all clients.
        settings: of the fit.
        invitation: into a run of others.
        store: of the run.
        changed: called when other clients are there, with the reason.

    Attributes:
        trainer: as given.
        open: training has begun, and is not over.
        address: of the store in which all meet.
        admission: lets in clients that come again.
        backend, timeout: of the process groups.
    """

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], channel: SideChannel, settings: FederatedSettings,
        invitation: Invitation | None, *, store: RunStore, changed: Callable[[str], None],
    ) -> None:  # fmt: skip
        assert strategy.cluster_environment is not None
        self.trainer, self.open = trainer, False
        self.backend = strategy.process_group_backend or "gloo"
        self.timeout = settings.collective_timeout(strategy.timeout)
        self._members = members = strategy.members
        self._channel, self._settings, self._changed = channel, settings, changed
        self._broken = False  # this rank's groups
        self._told, self._why = members.alive, ""  # to `changed`, and is to be told
        self._roll, self.address = self._begin(strategy, invitation)
        self._groups = Groups(trainer, self, members, channel, self)
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        requests = JoinRequests(strategy.cluster_environment)
        self.admission = _Admission(
            trainer, self, members, self._groups, requests, store=store, generation=generation
        )

    def _begin(self, strategy: ElasticDDPStrategy[Any], invitation: Invitation | None) -> tuple[RollCall, _Address]:
        """Returns this rank's end of the roll call, and where it is held: by the lowest rank, or as it was invited."""
        members, patience, met = self._members, strategy.timeout or timedelta(minutes=30), 0
        since = dict.fromkeys(members.alive, 0)
        waits = {"liveness_s": self._settings.liveness_s, "patience_s": patience.total_seconds()}
        if invitation is None and members.is_lowest:
            store = host_store(strategy.host_name(), patience)
            members.hosted = store  # the groups that are made through it live on after the fit
            address = _Address(strategy.host_name(), store.port)
            self._channel.all_gather_object((address.host, address.port))
            least = self._settings.min_clients or 1
            return HostRollCall(store, members.rank, since, least=least, **waits), address
        if invitation is None:
            address = _Address(*self._channel.all_gather_object(None)[0])
        else:
            address = _Address(invitation.address["host"], invitation.address["port"])
            met = since[members.rank] = invitation.meetings
        return GuestRollCall(address.host, address.port, members.rank, since, met=met, **waits), address

    # ---- where they meet --------------------------------------------------------------------------------------

    @property
    def meetings(self) -> int:
        return self._roll.meetings

    def alive(self) -> Collection[int]:
        return self._roll.ranks

    def meet(self, what: str) -> _Met:
        return _Met(self._meet(what).present)

    def _meet(self, what: str, *, sound: bool = True) -> Roll:
        roll = self._roll.meet(what, sound=sound)
        for rank, why in roll.lost:
            self._why = f"rank {rank} is left out: {why}"
            if self._members.is_lowest:
                left = f"the others go on without it and its weight, {len(roll.present)} clients"
                warnings.warn(f"rank {rank} is left out ({why}): {left}", RuntimeWarning, stacklevel=2)
        return roll

    def gather(self, what: str) -> None:
        """Returns when all ranks that live are here, with process groups of these alone.

        Raises:
            RuntimeError: no group can be made of them.
        """
        for _ in range(_TRIES + len(self._roll.ranks)):
            roll = self._meet(what, sound=not self._broken)
            if roll.sound and roll.present == self._members.alive:
                break
            self._rebuild(roll.present, self._roll.meetings, self._settings.liveness_s)
        else:
            raise RuntimeError(
                f"ranks {list(self._members.alive)} live, and no process group can be made of them: look for a firewall"
                " between them"
            )
        before, self._told = self._told, self._members.alive
        if before != self._told:
            if self._members.is_lowest:
                self.admission.announce()
            self._changed(self._why)

    def _rebuild(
        self, present: tuple[int, ...], generation: int, meeting_s: float,
        living: Callable[[], Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """Makes groups of the ranks that are there; whether it has worked for all is found when they meet again."""
        self._channel.leave()
        try:
            self._groups.rebuild(present, generation, meeting_s=meeting_s, living=living)
            self._broken = False
        except RuntimeError:
            self._break()

    def _break(self) -> None:
        """Inside an ``except`` block: a rank that waits for this one in a group fails now."""
        self._broken = True
        self._channel.leave()
        leave_default_group()

    def logged(self) -> str:
        names = compat.reduced_names(self.trainer)
        return f", logged: {', '.join(names)}" if names else ""

    def together(
        self, what: str, collective: Callable[[], T], save: Callable[[], Callable[[], None]] = lambda: lambda: None
    ) -> T:
        """Meets all ranks that live and returns what the collective gives among them: for all of them, or for none.

        Args:
            what: the purpose, the same on all ranks.
            collective: may be made again, without those lost in it.
            save: returns what brings back what the collective has changed, half or whole.

        Raises:
            RuntimeError: it fails though no rank is lost.
        """
        error = RuntimeError(f"{what} has failed on another rank, though no rank is lost; its error is there")
        for _ in range(_TRIES + len(self._roll.ranks)):
            self.gather(what)
            made, bring_back = list[T](), save()
            try:
                made.append(collective())
            except RuntimeError as failed:
                self._break()
                error = failed
            if self._meet(f"{what}: made", sound=bool(made)).sound:
                return made[0]
            bring_back()
            self._broken = True
        raise error

    # ---- begin and end, joining ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Training begins."""
        if self._members.is_lowest and not self.open:
            self.admission.announce()
        self.open = True

    def take_in(self, alive: tuple[int, ...], asking: Collection[int], generation: int) -> str:
        """Lets joining ranks in; all members call it alike. Returns why not, if not."""
        for rank in asking:
            self._roll.expect(rank)
        self._why = f"rank {', '.join(map(str, asking))} has come again"
        self._rebuild(alive, generation, COME_S, self.admission.living(sorted(asking)))
        self.gather("somebody comes")
        missing = sorted(set(asking) - set(self._members.alive))
        return f"rank {', '.join(map(str, missing))} is lost again" if missing else ""

    def finish(self) -> None:
        """Training is over."""
        if self.open:
            self.gather("training ends")
            self.open = False

    def fail(self, text: str) -> None:
        """This rank has failed: tells the others why, unless none waits for it yet."""
        if self.open:
            self._roll.fail(text)

    def close(self) -> None:
        self.admission.end()
        self._roll.close()
        if group_members() is None:
            self._members.hosted = None


class _Admission(Admission):
    """Between two rounds, not epochs."""

    def __init__(self, trainer: Trainer, clients: Clients, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, clients, *args, **kwargs)
        self._clients = clients

    def _come_together(self, alive: tuple[int, ...], before: tuple[int, ...]) -> str:
        return self._clients.take_in(alive, sorted(set(alive) - set(before)), self._generation)
