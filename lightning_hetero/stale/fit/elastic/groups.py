"""The process groups of the ranks that take part, made anew when they become others (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.glue.run import gloo_group
from lightning_hetero.stale.fit.members import Members
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.fit.settings import StaleSettings
from lightning_hetero.stale.runtime.processes.groups import (
    MemberMissingError,
    leave_default_group,
    rebuild_default_group,
    shrink_sampler,
)
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["Groups"]

_SIGNS_TO_COME = 6  # of life, one per `liveness_s`: in this time a rank comes from a meeting to its collective


class Groups:
    """The default group and the side channel's.

    Args:
        trainer: validation is divided among the members of the group.
        session: its server has the store in which they find each other.
        members: who takes part; changed by `rebuild`.
        channel: goes on with the new members.
        settings: of the fit.
    """

    def __init__(
        self, trainer: Trainer, session: Session, members: Members, channel: SideChannel, settings: StaleSettings
    ) -> None:
        self._trainer, self._session, self._members = trainer, session, members
        self._channel, self._settings = channel, settings

    def all_come(self) -> bool:
        """Whether all members come here from a meeting; if not, the group is left, and all have to meet once more.

        So nobody waits in a collective for a rank that has died, or fallen silent, since the meeting before it.
        """
        if len(self._members.alive) < 2:
            return True
        group = None if dist.get_backend() == dist.Backend.GLOO else self._channel.group
        wait_s = _SIGNS_TO_COME * self._settings.server.liveness_s
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
        session = self._session
        while True:
            assert session.worker is not None
            try:
                self.rebuild(alive, generation, living=session.worker.alive)
                return alive
            except MemberMissingError:
                met = session.meet("a rank did not come to the new process group")
                alive, generation = met.alive, session.meetings
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
            store: where they meet; default the server's.
            living: tells who lives meanwhile.
        """
        members, settings = self._members, self._settings
        members.alive = alive
        if store is None:
            address = self._session.address
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
