"""The members' side of a rank that comes late: looked for when an epoch ends, let in before the next (layer L).

    joining rank                    members
    loads, comes to the meeting     wait there; the lowest comes when the joining ranks are connected, or not heard of
    all: begin, or make other groups without those that have not come, as after any meeting
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Checkpoint

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.coming import Coming
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.run_store import RunStore, reach_store
from lightning_hetero.transport.whole_files import name_of_process, remove_left

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

COME_S = 20.0
"""For somebody who has just answered, and is heard of, to come to the new group [s]."""
_LOAD_S = 10.0  # for the silence of a joining rank while it loads what it resumes from
_LOOK_S = 0.1
_NEXT_LOOK_S = 0.25
_COMES = "somebody comes"


class _LastPoint(Checkpoint):
    """Saves what a joining rank resumes from, after all hooks of an epoch's end: Lightning puts checkpoints last."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._admission.look()


class Admission:
    """Lets joining ranks into a run between two epochs; called by all members.

    Args:
        trainer: the running trainer.
        meetings: of the members.
        members: who takes part.
        requests: where joining ranks ask.
        store: of the run.
        generation: of the process group built with a joining rank last.
    """

    def __init__(
        self, trainer: Trainer, meetings: Meetings, members: Members, requests: JoinRequests, *, store: RunStore,
        generation: int = FIRST_GENERATION,
    ) -> None:  # fmt: skip
        self._trainer, self._meetings, self._members, self._requests = trainer, meetings, members, requests
        self._store, self._generation = store, generation
        self._asking: list[int] = []
        self._look_s = 0.0
        self._checkpoint, self._wrote = "", False
        self._invitations: list[str] = []
        self._callbacks = compat.trainer_callbacks(trainer)
        self._point: _LastPoint | None = None
        meetings.changed.append(lambda _: self.announce() if members.is_lowest else None)

    def announce(self) -> None:
        """Tells a rank that comes late, or again, that there is a run to join; for the lowest of the ranks."""
        if not self._members.missing:
            self._requests.announce()
        elif reason := self._requests.host():
            self._members.warn_once(reason)

    def asked(self) -> bool:
        """Whether a rank that is missing may want to join; on the lowest rank, looked for not in every batch."""
        now_s = awake_s()
        if not (self._members.missing and self._members.is_lowest) or now_s < self._look_s:
            return False
        self._look_s = now_s + _NEXT_LOOK_S
        return self._requests.any_asks(self._members.missing)

    def expect(self) -> None:
        """Looks for joining ranks after every epoch once somebody is missing."""
        if self._point is None and self._members.missing:
            self._point = _LastPoint(self)
            self._callbacks.append(self._point)

    def look(self) -> None:
        """When an epoch has ended: if somebody is missing and asks, saves what he will resume from."""
        trainer, members = self._trainer, self._members
        if not members.missing or self._meetings.place.address is None:
            return
        root = str(trainer.default_root_dir)
        # What a joining rank loads is a file on disk, never a URL that somebody names to it.
        folder = os.getcwd() if "://" in root else os.path.abspath(root)
        path = os.path.join(folder, f".joining-{name_of_process()}-{members.rank}-{self._generation}.ckpt")
        self._asking, path = trainer.strategy.broadcast((self._asking_of(members.missing), path))
        if self._asking:
            if members.is_lowest and os.path.isdir(folder):
                remove_left(folder, ".joining-")
            self._checkpoint = path
            self._save()

    def _save(self) -> None:
        """Saves what the joining ranks resume from; if that fails, they wait for the end of another epoch."""
        trainer, members, failed = self._trainer, self._members, ""
        writer, self._wrote = members.lowest, members.is_lowest
        try:
            compat.write_checkpoint(trainer, self._checkpoint)
        except Exception as error:
            if not members.is_lowest:  # the others write nothing: it is an error of a hook
                raise
            failed = f"{type(error).__name__}: {error}"
        failed = trainer.strategy.broadcast(failed)
        if not failed and writer not in members.alive:
            failed = f"rank {writer}, which was to write it, has died"
        if failed:
            numbers, self._asking = _listed(self._asking), []
            self._remove_checkpoint()
            members.warn_once(
                f"rank {numbers} wants to join, and the checkpoint that it would resume from cannot be saved: {failed};"
                " this is tried again when ranks are next let in"
            )

    def _asking_of(self, ranks: Sequence[int]) -> list[int]:
        return self._requests.asking(ranks) if self._members.is_lowest else []

    def admit(self) -> None:
        """Before an epoch: builds the process group with the joining ranks and waits until they are connected."""
        asking, self._asking = self._asking, []
        if not asking:
            return
        # Once more: the checkpoint took its time, perhaps he has died.
        said = (self._asking_of(asking), self._generation + 1)
        asking, self._generation = self._trainer.strategy.broadcast(said)
        try:
            if asking:
                self._let_in(asking)
        finally:
            self._remove_checkpoint()

    def _let_in(self, asking: list[int]) -> None:
        members = self._members
        alive = tuple(sorted({*members.alive, *asking}))
        speaks = members.is_lowest  # now: a joining rank may be lower, and knows nothing of this
        if speaks:
            invitation = Invitation(
                checkpoint=self._checkpoint, generation=self._generation, members=alive,
                nodes=tuple(members.nodes.items()), meetings=self._meetings.place.meetings,
                address=asdict(self._meetings.place.address), store=self._store.reached(),
            )  # fmt: skip
            for rank in asking:
                self._invitations.append(f"{self._checkpoint}.{rank}")
                try:
                    self._requests.invite(rank, invitation, self._invitations[-1])
                except OSError as error:  # e.g. a full disk, which is no reason for the members to end
                    members.warn_once(f"rank {rank} wanted to join and could not be invited: {error}")
        why = self._come_together(asking, alive) or "it died or fell silent"
        if missed := _listed(rank for rank in asking if rank not in members.alive):
            members.warn_once(f"rank {missed} wanted to join and did not come: {why}", speaks=speaks)
        if come := _listed(rank for rank in asking if rank in members.alive):
            members.warn_once(f"rank {come} has joined in epoch {self._trainer.current_epoch}", speaks=speaks)

    def _come_together(self, asking: list[int], alive: tuple[int, ...]) -> str:
        """Builds the process groups with the joining ranks, and waits until they have come to where all meet.

        Returns:
            Why not all have come, if that is known.
        """
        meetings, place, watches = self._meetings, self._meetings.place, self._members.is_lowest  # the lowest, as yet
        place.expect(asking)
        coming = self._coming()

        def living() -> Collection[int]:
            if watches:
                for rank in self._requests.silent(asking):
                    coming.goes(rank)
            return {*place.alive(), *coming.living(asking)}

        if why := meetings.regroup(alive, self._generation, meeting_s=COME_S, living=living):
            coming.call_off(why)
        while watches and not why and {*asking} - {*place.alive()} - {*self._requests.silent(asking, for_s=_LOAD_S)}:
            time.sleep(_LOOK_S)
        meetings.gather(_COMES)
        return why

    def come_in(self) -> None:
        """For a joining rank that is ready: returns when all begin together.

        Raises:
            RuntimeError, ServerLostError: the others have begun without it.
        """
        self._meetings.gather(_COMES)
        if self._members.is_lowest:  # now
            self.announce()

    def _coming(self) -> Coming:
        address = self._meetings.place.address
        return Coming(reach_store(address.host, address.port), self._generation)

    def _remove_checkpoint(self) -> None:
        for invitation in self._invitations:
            with suppress(OSError):
                os.unlink(invitation)
        self._invitations.clear()
        path, self._checkpoint = self._checkpoint, ""
        wrote, self._wrote = self._wrote, False
        if path and (wrote or self._members.is_lowest):  # or who did has died; or a joining rank is lower
            with suppress(OSError):
                self._trainer.strategy.checkpoint_io.remove_checkpoint(path)

    def end(self) -> None:
        """The run ends: nobody can join any more; idempotent."""
        self._remove_checkpoint()  # the epoch it was for has not begun
        if self._members.is_lowest:
            self._requests.close(range(self._members.world_size))

    def close(self) -> None:
        """Takes the callback out again."""
        if self._point is not None:
            self._callbacks.remove(self._point)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
