"""The process groups of the ranks that take part, made anew when they become others (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.run import gloo_group
from lightning_hetero.transport.groups import (
    MemberMissingError,
    leave_default_group,
    rebuild_default_group,
    shrink_sampler,
)
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class _Met(Protocol):
    """All live ranks have met."""

    @property
    def alive(self) -> tuple[int, ...]:
        """Who, ascending."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """What is to be told to people."""
        ...


class _Address(Protocol):
    """Of the store in which new groups find together; a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class MeetingPlace(Protocol):
    """Where the ranks of an engine meet: at its server, or in a store."""

    @property
    def meetings(self) -> int:
        """How often they have met."""
        ...

    @property
    def address(self) -> _Address:
        """Of the store there; a dataclass of plain values, with what else a joining rank must know of the engine."""
        ...

    def alive(self) -> Collection[int]:
        """Who lives now, as everybody is told."""
        ...

    def meet(self, what: str) -> _Met:
        """Waits for all live ranks."""
        ...


class GroupSettings(Protocol):
    """Backend and timeout of the default group."""

    @property
    def backend(self) -> str: ...

    @property
    def timeout(self) -> timedelta | None: ...


class Groups:
    """The default group and the side channel's.

    Args:
        trainer: validation is divided among the members of the group.
        place: has the store in which they find each other.
        members: who takes part; changed by `rebuild`.
        channel: goes on with the new members.
        settings: of the fit.
    """

    def __init__(
        self, trainer: Trainer, place: MeetingPlace, members: Members, channel: SideChannel, settings: GroupSettings
    ) -> None:
        self._trainer, self._place, self._members = trainer, place, members
        self._channel, self._settings = channel, settings

    def all_come(self, wait_s: float) -> bool:
        """Whether all members come here from a meeting; if not, the group is left, and all have to meet once more.

        So nobody waits in a collective for a rank that has died, or fallen silent, since the meeting before it.

        Args:
            wait_s: for a member that lives and does not come [s]; half of the time until everybody has given up.
        """
        if len(self._members.alive) < 2:
            return True
        group = None if dist.get_backend() == dist.Backend.GLOO else self._channel.group
        try:
            # All report to the lowest, which gives up first: so that either all pass, or nobody does.
            dist.monitored_barrier(group, timedelta(seconds=wait_s * (1 if self._members.is_lowest else 2)))
        except RuntimeError:
            leave_default_group()  # here: whoever waits for this rank fails now
            return False
        return True

    def rebuild_among_living(self, alive: tuple[int, ...], generation: int) -> tuple[int, ...]:
        """As `rebuild`; but without a rank that dies on its way there, or stays away: then all meet once more.

        Returns:
            Who is in the group.
        """
        place = self._place
        while True:
            try:
                self.rebuild(alive, generation, living=place.alive)
                return alive
            except MemberMissingError:
                met = place.meet("a rank did not come to the new process group")
                alive, generation = met.alive, place.meetings
                for notice in met.notices:
                    self._members.warn_once(notice)

    def rebuild(
        self,
        alive: tuple[int, ...],
        generation: int,
        *,
        meeting_s: float = 60.0,
        store: dist.Store | None = None,
        living: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """Makes new process groups of the ranks ``alive``, all of whom call this; validation is divided among them.

        Args:
            alive: ranks, ascending.
            generation: not used before with this store.
            meeting_s: how long to wait for them [s].
            store: where they find each other; default the place's.
            living: tells who lives meanwhile.
        """
        members, settings = self._members, self._settings
        members.alive = alive
        if store is None:
            address = self._place.address
            store = dist.TCPStore(address.host, address.port, is_master=False)
        rebuild_default_group(
            store=store,
            generation=generation,
            members=alive,
            rank=members.rank,
            backend=settings.backend,
            timeout=settings.timeout,
            meeting_s=meeting_s,
            living=living,
        )
        self._channel.rebind(gloo_group(settings.timeout))
        for loader in compat.val_loaders(self._trainer):
            if isinstance(loader, DataLoader):
                shrink_sampler(loader, alive, members.rank)
        compat.count_val_batches(self._trainer)
