"""Where the ranks of an engine meet, and what they do together: for all that are there, or for none (layer L).

    meet            which ranks are there? one that is silent is left out, for all           [the engine's place]
    groups          process groups of those that are there, if they are others, or if a group broke
    collective      what Lightning reduces, or an average; where a member is lost in it, all find it unsound
    meet again      sound for all: all take the result; else no rank does, and all begin again without the lost
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.run import gloo_group
from lightning_hetero.transport.groups import leave_default_group, limit_waits, rebuild_default_group, shrink_sampler
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.run_store import reach_store
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

T = TypeVar("T")

_TRIES = 3  # of something that fails though no rank is lost


class MeetingPlace(Protocol):
    """Where the ranks of an engine meet: at its server, or in the run's store."""

    @property
    def meetings(self) -> int:
        """How often they have met."""
        ...

    @property
    def address(self) -> Any:
        """Of the store there, `host` and `port`: a dataclass of plain values, with all that a joining rank needs."""
        ...

    def alive(self) -> Collection[int]:
        """Who lives now; everybody gets the same answer."""
        ...

    def expect(self, ranks: Collection[int]) -> None:
        """These are on their way to the next meeting; said by all members."""
        ...

    def meet(self, what: str, *, sound: bool = True) -> Met:
        """Waits for all live ranks; ``sound``: what was done since the last meeting has worked here."""
        ...


class Meetings:
    """See the module.

    Args:
        trainer: the running trainer; validation is divided among the ranks that are there.
        place: where they meet; the members of a new process group find each other in the store there.
        members: who takes part; changed here.
        channel: goes on with those.
        backend, timeout: of the default process group.
        silence_s: how long a silent rank is waited for where others are on their way to a new group [s].
        collective_s: how long a collective on gloo waits for a rank that has just met [s].

    Attributes:
        trainer, place: as given.
        changed: called when other ranks take part, with those that did before.
        catch_up: called in new groups; a collective of those who have met.
    """

    def __init__(
        self, trainer: Trainer, place: MeetingPlace, members: Members, channel: SideChannel, *, backend: str,
        timeout: timedelta | None, silence_s: float, collective_s: float,
    ) -> None:  # fmt: skip
        self.trainer, self.place = trainer, place
        self.changed: list[Callable[[tuple[int, ...]], None]] = []
        self.catch_up: Callable[[Met], None] = lambda _: None
        self._members, self._channel = members, channel
        self._backend, self._timeout, self._silence_s = backend, timeout or default_pg_timeout, silence_s
        self._short = min(self._timeout, timedelta(seconds=collective_s))
        self._broken = False  # this rank's groups
        self._told = members.alive  # to `changed`

    def heard(self, met: Met) -> Met:
        """Notes what was said at a meeting."""
        for notice in met.notices:
            self._members.warn_once(notice)
        return met

    def gather(self, what: str, meet: Callable[..., Met] | None = None) -> None:
        """Returns when all ranks that live are here, with process groups of these alone.

        Args:
            what: the purpose, the same on all ranks.
            meet: instead of the place's.

        Raises:
            RuntimeError: no group can be made of them.
        """
        meet = meet or self.place.meet
        for _ in range(_TRIES + self._members.world_size):
            met = self.heard(meet(what, sound=not self._broken))
            if met.sound and met.alive == self._members.alive:
                break
            self._anew(met)
            meet = self.place.meet
        else:
            raise self._impossible()
        self._tell()

    def meet_again(self) -> None:
        """After `leave`, where a collective was made outside of `together`; others may be elsewhere, at a meeting.

        Returns when this rank has a new group, of those that live.

        Raises:
            RuntimeError: no group can be made of them.
        """
        for _ in range(_TRIES + self._members.world_size):
            self._anew(self.heard(self.place.meet("contact was lost", sound=False)))
            if not self._broken:
                self._tell()
                return
        raise self._impossible()

    def _anew(self, met: Met) -> None:
        """Makes groups of those who have met, and has who is a step behind go on."""
        if not self.regroup(met.alive, self.place.meetings):
            try:
                self.catch_up(met)
            except RuntimeError:
                self.leave()

    def _impossible(self) -> RuntimeError:
        return RuntimeError(
            f"ranks {list(self._members.alive)} live, and no process group can be made of them: look for a firewall"
            " between them"
        )

    def _tell(self) -> None:
        before, self._told = self._told, self._members.alive
        if before != self._told:
            for tell in self.changed:
                tell(before)

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
        for _ in range(_TRIES + self._members.world_size):
            self.gather(what)
            made, bring_back = list[T](), save()
            try:
                self._wait_at_most(self._short)
                if dist.get_backend() != dist.Backend.GLOO:  # others do not notice it if a member has died
                    dist.barrier(self._channel.group)
                made.append(collective())
                self._wait_at_most(self._timeout)
            except RuntimeError as failed:
                made.clear()
                self.leave()
                error = failed
            if self.heard(self.place.meet(f"{what}: made", sound=bool(made))).sound:
                return made[0]
            bring_back()
            self._broken = True
        raise error

    def _wait_at_most(self, timeout: timedelta) -> None:
        limit_waits(timeout, dist.group.WORLD, self._channel.group)

    def logged(self) -> str:
        """Names what is reduced now, for `together`: ranks that log other values would mix them up."""
        names = compat.reduced_names(self.trainer)
        return f", logged: {', '.join(names)}" if names else ""

    # ---- process groups ---------------------------------------------------------------------------------------

    def regroup(
        self, alive: tuple[int, ...], generation: int, *, meeting_s: float | None = None,
        living: Callable[[], Collection[int]] | None = None,
    ) -> str:  # fmt: skip
        """Makes groups of the ranks that are there; whether it has worked for all is found when they meet again.

        Args:
            alive: ranks, ascending; all of them call this.
            generation: not used before.
            meeting_s: how long to wait for them; None: as for a silent one [s].
            living: tells who lives meanwhile; None: the place.

        Returns:
            Why it has not worked here; empty: it has.
        """
        self._members.alive = alive
        try:
            address = self.place.address
            store = reach_store(address.host, address.port)
            self.rebuild(store, generation, meeting_s=meeting_s or self._silence_s, living=living or self.place.alive)
        except RuntimeError as error:
            self.leave()
            return str(error)
        self._broken = False
        return ""

    def rebuild(
        self, store: dist.Store, generation: int, *, meeting_s: float = 60.0,
        living: Callable[[], Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """Makes new process groups of the members, all of whom call this; validation is divided among them.

        Args:
            store: where they find each other.
            generation, meeting_s, living: see `regroup`.
        """
        members = self._members
        self._channel.leave()
        rebuild_default_group(
            store=store, generation=generation, members=members.alive, rank=members.rank, backend=self._backend,
            timeout=self._short if self._backend == dist.Backend.GLOO else self._timeout, meeting_s=meeting_s,
            living=living,
        )  # fmt: skip
        self._channel.rebind(gloo_group(self._short))
        self._wait_at_most(self._timeout)
        for loader in compat.val_loaders(self.trainer):
            if isinstance(loader, DataLoader):
                shrink_sampler(loader, members.alive, members.rank)
        compat.count_val_batches(self.trainer)

    def leave(self) -> None:
        """Inside an ``except`` block: a rank that waits for this one in a group fails now."""
        self._broken = True
        self._channel.leave()
        leave_default_group()
