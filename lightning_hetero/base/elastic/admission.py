"""The members' side of a rank that comes late: looked for when an epoch ends, let in before the next (layer L).

    joining rank                    members
    says "ready", waits             wait, and say so again and again; the lowest hears the joining rank's signs of life
    <------------------------------ decides: with all; or, once everybody is ready or lost, with those that are ready
    all: begin, or make another group without those that are lost

A collective would be simpler; but where a rank is silent, nobody can leave one before the timeout of the process group.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.coming import Beats, Coming
from lightning_hetero.base.elastic.groups import Groups, MeetingPlace
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.groups import leave_default_group
from lightning_hetero.transport.run_store import RunStore

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

COME_S = 20.0
"""For somebody who has just answered, and is heard of, to come to the new group [s]."""
_LOAD_S = 10.0  # for the silence of a joining rank while it loads what it resumes from
_MEMBER_S = 20.0  # for that of a member
_LOOK_S = 0.02
_ASK_S = 0.5


class _LastPoint(Checkpoint):
    """Saves what a joining rank resumes from, after all hooks of an epoch's end: Lightning puts checkpoints last."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._admission.look()


class Admission:
    """Lets joining ranks into a run between two epochs; called by all members alike.

    Args:
        trainer: the running trainer.
        place: where the members meet, and how often they have.
        members: who takes part.
        groups: rebuilt with whoever joins.
        requests: where joining ranks ask.
        store: of the run.
        generation: of the process group built with a joining rank last.
    """

    def __init__(
        self,
        trainer: Trainer,
        place: MeetingPlace,
        members: Members,
        groups: Groups,
        requests: JoinRequests,
        *,
        store: RunStore,
        generation: int = FIRST_GENERATION,
    ) -> None:
        self._trainer, self._place, self._members = trainer, place, members
        self._groups, self._requests = groups, requests
        self._store, self._generation = store, generation
        self._asking: list[int] = []
        self._checkpoint, self._wrote = "", False
        self._invitations: list[str] = []
        self._callbacks = compat.trainer_callbacks(trainer)
        self._point: _LastPoint | None = None

    def announce(self) -> None:
        """Tells a rank that comes late, or again, that there is a run to join; for the lowest of the ranks."""
        if not self._members.missing:
            self._requests.announce()
        elif reason := self._requests.host():
            self._members.warn_once(reason)

    def expect(self) -> None:
        """Looks for joining ranks after every epoch once somebody is missing."""
        if self._point is None and self._members.missing:
            self._point = _LastPoint(self)
            self._callbacks.append(self._point)

    def look(self) -> None:
        """When an epoch has ended: if somebody is missing and asks, saves what he will resume from."""
        trainer, members = self._trainer, self._members
        if not members.missing:
            return
        root = str(trainer.default_root_dir)
        # What a joining rank loads is a file on disk, never a URL that somebody names to it.
        folder = os.getcwd() if "://" in root else os.path.abspath(root)
        path = os.path.join(folder, f".joining-{os.getpid()}-{self._generation}.ckpt")
        self._asking, path = trainer.strategy.broadcast((self._asking_of(members.missing), path))
        if self._asking:
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
        members, before = self._members, self._members.alive
        alive = tuple(sorted({*before, *asking}))
        speaks = members.is_lowest  # now: a joining rank may be lower, and knows nothing of this
        if speaks:
            store = self._store.reached()
            invitation = Invitation(
                checkpoint=self._checkpoint,
                generation=self._generation,
                members=alive,
                nodes=tuple(members.nodes.items()),
                meetings=self._place.meetings,
                address=asdict(self._place.address),
                store=None if store is None else asdict(store),
            )
            for rank in asking:
                self._invitations.append(f"{self._checkpoint}.{rank}")
                try:
                    self._requests.invite(rank, invitation, self._invitations[-1])
                except OSError as error:  # e.g. a full disk, which is no reason for the members to end
                    members.warn_once(f"rank {rank} wanted to join and could not be invited: {error}")
        why = self._come_together(alive, before)
        if missed := _listed(rank for rank in asking if rank not in members.alive):
            members.warn_once(f"rank {missed} wanted to join and did not come: {why}", speaks=speaks)
        if come := _listed(rank for rank in asking if rank in members.alive):
            members.warn_once(f"rank {come} has joined in epoch {self._trainer.current_epoch}", speaks=speaks)

    def _come_together(self, alive: tuple[int, ...], before: tuple[int, ...]) -> str:
        """Builds the process group with the joining ranks, and waits until they are ready.

        Returns:
            Why the members go on without some of them; empty: they do not.
        """
        asking = sorted(set(alive) - set(before))
        coming = self._coming()
        try:
            self._groups.rebuild(alive, self._generation, meeting_s=COME_S, living=self._living(coming, asking))
            wait_as_member(
                self._members.rank, asking, before, coming=coming, place=self._place, requests=self._requests
            )
        except RuntimeError as error:
            return self._begin_without(asking, coming, error)
        return ""

    def come_in(self) -> None:
        """For a joining rank that is connected: returns when all begin together.

        Raises:
            RuntimeError: the others have begun without it.
        """
        members, coming = self._members, self._coming()
        try:
            wait_as_joining_rank(members.rank, members.alive, coming=coming, place=self._place)
        except RuntimeError as error:
            come, why = coming.decided() or ([], str(error))
            if members.rank not in come:
                raise RuntimeError(
                    f"the others train without rank {members.rank}, which wanted to join: {why}; start it again"
                ) from error
            self._begin_without((), coming, error)
        else:
            if members.is_lowest:  # now
                self.announce()

    def living(self, asking: Sequence[int]) -> Callable[[], Collection[int]]:
        """Returns what tells who of the members, and of those invited, lives; the same on all members.

        Raises:
            RuntimeError: the place is gone.
        """
        return self._living(self._coming(), asking)

    def _living(self, coming: Coming, asking: Sequence[int]) -> Callable[[], Collection[int]]:
        watches = self._members.is_lowest  # now: a joining rank may be lower

        def alive() -> Collection[int]:
            if watches:
                for rank in self._requests.silent(asking):
                    coming.goes(rank)
            return {*self._place.alive(), *coming.living(asking)}

        return alive

    def _coming(self) -> Coming:
        address = self._place.address
        return Coming(dist.TCPStore(address.host, address.port, is_master=False), self._generation)

    def _begin_without(self, asking: Sequence[int], coming: Coming, error: RuntimeError) -> str:
        """Inside an ``except`` block: all go on with those joining ranks that have been ready in time.

        Returns:
            Why not with all.
        """
        leave_default_group()  # here: whoever waits for this rank there fails now
        if asking:
            coming.decide(asking, str(error))
        _, why = coming.decided() or ([], str(error))
        met = self._place.meet("not all joining ranks have come")
        for notice in met.notices:
            self._members.warn_once(notice)
        self._groups.rebuild_among_living(met.alive, self._place.meetings)
        if self._members.is_lowest:
            self.announce()
        self.expect()
        return why

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


def wait_as_member(
    rank: int,
    asking: Sequence[int],
    before: Sequence[int],
    *,
    coming: Coming,
    place: MeetingPlace,
    requests: JoinRequests,
) -> None:
    """Returns when all joining ranks are ready to train.

    Args:
        rank: this one.
        asking: the joining ranks.
        before: the members, ascending.
        coming: where all find out what is decided.
        place: tells who is connected.
        requests: of the lowest member, which has the joining ranks' signs of life.

    Raises:
        RuntimeError: somebody has died, or is silent; who begins nevertheless is decided.
    """
    beats, asked_s, watches = Beats(coming.waited), -math.inf, rank == before[0]
    others = [member for member in before if member != rank]
    while coming.decided() is None:
        if watches and all(map(coming.waited, before)):
            coming.decide(asking)  # if all are ready
        now_s = time.monotonic()
        if now_s - asked_s > _ASK_S:
            asked_s = now_s
            coming.waits(rank)
            ready = {*coming.come(asking)}
            lost = {*others, *ready} - {*place.alive()} | {*beats.silent(others, now_s, for_s=_MEMBER_S)}
            if watches:
                lost |= {*requests.silent(asking, for_s=_LOAD_S)}
            still = {*asking} - ready | {member for member in others if not coming.waited(member)}
            # Those that still load are waited for, whoever else is lost; unless nobody knows whether they live. If all
            # have come meanwhile, the next look says so.
            if lost and (bool(still) and still <= lost if watches else before[0] in lost):
                coming.decide(asking, _why(lost))
        time.sleep(_LOOK_S)
    _check(coming)


def wait_as_joining_rank(rank: int, members: Sequence[int], *, coming: Coming, place: MeetingPlace) -> None:
    """As `wait_as_member`, for a rank that comes in and is connected.

    Args:
        rank: this one.
        members: all ranks of the new process group; which of them are joining ranks, too, need not be known.
        coming, place: see there.
    """
    beats, asked_s = Beats(coming.waited), -math.inf
    coming.ready(rank)
    while coming.decided() is None:
        now_s = time.monotonic()
        if now_s - asked_s > _ASK_S:
            asked_s = now_s
            others = {*members} - {*coming.come(members)}  # the members, and joining ranks that still load
            if not others & {*place.alive()} - {*beats.silent(others, now_s, for_s=_MEMBER_S)}:
                coming.decide(members, _why(others))
        time.sleep(_LOOK_S)
    _check(coming)


def _why(lost: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(lost)))} died or fell silent"


def _check(coming: Coming) -> None:
    decided = coming.decided()
    if decided is not None and decided[1]:
        raise RuntimeError(f"not all joining ranks have come: {decided[1]}")
