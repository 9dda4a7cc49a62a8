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
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.fabric.plugins import ClusterEnvironment

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.admission import COME_S, Admission
from lightning_hetero.base.elastic.groups import Groups
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.groups import group_members, leave_default_group
from lightning_hetero.transport.roll_call import GuestRollCall, HostRollCall, Roll, RollCall
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.transport.store import host_store

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

T = TypeVar("T")

_COLLECTIVE_S = 300.0  # for ranks that have just met: to send some megabytes takes less
_TRIES = 3  # of something that fails though no rank is lost


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    """How a fit goes on without clients that are lost.

    Attributes:
        least: clients that must be left.
        liveness_s: silence after which a client is left out [s].
        patience: how long a client that lives may let the others wait.
        backend: of the default process group.
        host: name under which other nodes reach this one.
        environment: tells where the ranks met at first.
    """

    least: int
    liveness_s: float
    patience: timedelta
    backend: str
    host: str
    environment: ClusterEnvironment

    @property
    def timeout(self) -> timedelta:
        """Timeout of a collective among clients that have just met."""
        return min(self.patience, timedelta(seconds=max(_COLLECTIVE_S, self.liveness_s)))


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _Met:
    alive: tuple[int, ...]
    notices: tuple[str, ...] = ()


class Clients:
    """Keeps the clients of a fit together; a `Place` where they meet.

    Args:
        trainer: the running trainer.
        members: the ranks that take part.
        channel: small collectives of all clients.
        settings: of the fit.
        invitation: into a run of others.
        changed: called when other clients are there: with those before, and those now.
        lost: called for each that is left out: its rank, and why.

    Attributes:
        trainer: as given.
        open: training has begun, and is not over.
    """

    def __init__(
        self,
        trainer: Trainer,
        members: Members,
        channel: SideChannel,
        settings: ClientSettings,
        invitation: Invitation | None,
        *,
        changed: Callable[[tuple[int, ...], tuple[int, ...]], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self.trainer, self.open = trainer, False
        self._members, self._channel, self._settings = members, channel, settings
        self._changed, self._lost = changed, lost
        self._broken = False  # this rank's groups
        self._told = members.alive  # `changed`
        self._roll, self._address = self._begin(invitation)
        self._groups = Groups(trainer, self, members, channel, settings)
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        requests = JoinRequests(settings.environment)
        self.admission = _Admission(trainer, self, members, self._groups, requests, generation=generation)

    def _begin(self, invitation: Invitation | None) -> tuple[RollCall, _Address]:
        settings, members = self._settings, self._members
        if invitation is not None:
            address = _Address(invitation.address["host"], invitation.address["port"])
            ranks = {**dict.fromkeys(members.alive, 0), members.rank: invitation.meetings}
            return self._guest(address, ranks, invitation.meetings), address
        ranks = dict.fromkeys(members.alive, 0)
        if not members.is_lowest:
            (host, port), *_ = self._channel.all_gather_object(None)
            return self._guest(_Address(host, port), ranks, 0), _Address(host, port)
        store = host_store(settings.host, settings.patience)
        members.hosted = store  # the groups that are made through it live on after the fit
        self._channel.all_gather_object((settings.host, store.port))
        roll = HostRollCall(
            store, members.rank, ranks, liveness_s=settings.liveness_s, least=settings.least,
            patience_s=settings.patience.total_seconds(),
        )  # fmt: skip
        return roll, _Address(settings.host, store.port)

    def _guest(self, address: _Address, ranks: dict[int, int], met: int) -> RollCall:
        settings = self._settings
        return GuestRollCall(
            address.host, address.port, self._members.rank, ranks, liveness_s=settings.liveness_s,
            patience_s=settings.patience.total_seconds(), met=met,
        )  # fmt: skip

    # ---- where they meet --------------------------------------------------------------------------------------

    @property
    def meetings(self) -> int:
        return self._roll.meetings

    @property
    def address(self) -> _Address:
        return self._address

    def alive(self) -> Collection[int]:
        return self._roll.ranks

    def meet(self, what: str) -> _Met:
        return _Met(self._meet(what).present)

    def _meet(self, what: str, *, sound: bool = True) -> Roll:
        roll = self._roll.meet(what, sound=sound)
        for rank, why in roll.lost:
            if self._members.is_lowest:
                warnings.warn(
                    f"rank {rank} is left out ({why}): the others go on without it and its weight,"
                    f" {len(roll.present)} clients",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._lost(rank, why)
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
            self._changed(before, self._told)

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

    def together(self, what: str, collective: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Meets all ranks that live and returns what the collective gives among them: for all of them, or for none.

        Args:
            what: the purpose, the same on all ranks.
            collective: may be made again, without those lost in it.
            undo: brings back what the collective has changed, half or whole.

        Raises:
            RuntimeError: it fails though no rank is lost.
        """
        error: RuntimeError | None = None
        for _ in range(_TRIES + len(self._roll.ranks)):
            self.gather(what)
            made, error = list[T](), None
            try:
                made.append(collective())
            except RuntimeError as failed:
                self._break()
                error = failed
            if self._meet(f"{what}: made", sound=bool(made)).sound:
                return made[0]
            undo()
            self._broken = True
        if error is not None:
            raise error
        raise RuntimeError(f"{what} has failed on another rank, though no rank is lost; its error is there")

    # ---- begin and end, joining ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Training begins."""
        if self.open:
            return
        self.open = True
        if self._members.is_lowest:
            self.admission.announce()

    def take_in(self, alive: tuple[int, ...], asking: Collection[int], generation: int) -> str:
        """Lets newcomers in; all members call it alike. Returns why not, if not."""
        for rank in asking:
            self._roll.expect(rank)
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
