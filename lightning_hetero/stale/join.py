"""A rank that comes late, or comes again, into a run that is under way (layer L).

    newcomer                                     members
    is a run announced where all met at first?   rank 0 announced it when the server started
    asks for an invitation, waits                epoch ends: somebody is missing; does he ask?  -> a checkpoint
    <------------------------------------------- next epoch begins: invitation
    all: new process group with the newcomer
    resumes from the checkpoint, connects -----> barrier; the epoch goes on, with him

The newcomer resumes as from any checkpoint of Lightning's, so its counters, schedulers and callbacks are those of the
others. The members wait for it at that barrier, which is the only wait, and only when somebody has asked; whoever has
died since does not answer when he is called, and is not invited.

Ranks started by somebody else than torchrun (which restarts all ranks instead) can join; rank 0 cannot: the store in
which the others are found is at its address, and it is the one that waits for them there. A rank that comes when the
run has ended waits for a new one, up to the strategy's timeout, as any rank does that is started alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hetero.stale.launcher import launched_by_us
from lightning_hetero.stale.start import Address

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from lightning_hetero.stale.run import StaleRun

__all__ = ["FIRST_GENERATION", "Admission", "Door", "Invitation", "Newcomer"]

FIRST_GENERATION = 1 << 20
"""Process groups built with newcomers are numbered from here, those after deaths from 1."""

_RUN, _ASKS, _CALLED, _INVITED = (f"lightning_hetero/{name}" for name in ("run", "asks", "called", "invited"))
_LOOK_S = 2.0  # for a store that may not be there: then nothing runs yet
_PAUSE_S = 0.05
_ANSWER_S = 3.0  # for somebody who waits to answer a call: it looks every `_PAUSE_S`
_COME_S = 20.0  # for somebody who has just answered to come to the new group
_READ_S = 2.0  # for somebody who waits to read that the run ends
_SILENT_S = 30.0  # without any store: the run has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What a newcomer needs.

    Attributes:
        checkpoint: file to resume from.
        generation, members: of the process group that is built with it.
        meetings: how many meetings the members have had.
        address: of the server, which may be another one than when the newcomer came.
    """

    checkpoint: str
    generation: int
    members: tuple[int, ...]
    meetings: int
    address: Address

    def pack(self) -> str:
        """Returns it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Invitation:
        """Returns what `pack` has made a text of."""
        said = json.loads(text)
        members, address = tuple(said.pop("members")), _address(said.pop("address"))
        return cls(members=members, address=address, **said)


def _address(said: dict[str, Any]) -> Address:
    return Address(**{**said, "near": tuple(said["near"])})


def _rendezvous(environment: ClusterEnvironment, timeout_s: float) -> dist.TCPStore:
    """Returns the store over which the ranks met at first; rank 0 hosts it."""
    host, port = environment.main_address, environment.main_port
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Door:
    """The members' side, at the lowest of the ranks that are left.

    Args:
        environment: tells where the rendezvous store is.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self._environment = environment
        self._announced = False
        self._store: dist.TCPStore | None = None

    def announce(self, address: Address) -> None:
        """Says where the server is, to whoever comes to where the ranks met at first: in torch's own store there."""
        # Not so with e.g. a rendezvous through a file: nobody can join, nothing else is lost.
        with suppress(RuntimeError):
            _rendezvous(self._environment, _LOOK_S).set(_RUN, json.dumps(asdict(address)))
            self._announced = True

    def open(self, address: Address) -> str:
        """Hosts a store in the place of torch's, which went with the process group that a death has broken.

        Returns:
            Why nobody can join, if so; nothing else is lost then.
        """
        if self._store is None:
            try:
                host, port = self._environment.main_address, self._environment.main_port
                self._store = dist.TCPStore(
                    host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_LOOK_S)
                )
                self._store.set(_RUN, json.dumps(asdict(address)))
            except RuntimeError as error:
                return f"no rank can come again into this run, as the ranks' first meeting place is closed: {error}"
        return ""

    def asking(self, ranks: Sequence[int]) -> list[int]:
        """Returns which of the ranks wait for an invitation, and answer when they are called."""
        store = self._store
        if store is None:
            return []
        try:
            asking = [rank for rank in ranks if store.check([f"{_ASKS}/{rank}"])]
            for rank in asking:
                store.set(f"{_CALLED}/{rank}", "")
            silent = self._unread(store, _CALLED, asking, _ANSWER_S)
            for rank in silent:
                store.delete_key(f"{_ASKS}/{rank}")
        except RuntimeError:
            return []
        return [rank for rank in asking if rank not in silent]

    @staticmethod
    def _unread(store: dist.Store, kind: str, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Returns who does not take away what was put there for him."""
        deadline_s, left = time.monotonic() + timeout_s, list(ranks)
        while left := [rank for rank in left if store.check([f"{kind}/{rank}"])]:
            if time.monotonic() > deadline_s:
                break
            time.sleep(_PAUSE_S)
        return left

    def invite(self, rank: int, invitation: Invitation) -> None:
        """Lets a newcomer in."""
        assert self._store is not None
        self._store.delete_key(f"{_ASKS}/{rank}")
        self._store.set(f"{_INVITED}/{rank}", invitation.pack())

    def shut(self, ranks: Sequence[int]) -> None:
        """The run ends: takes the announcement away and sends home who still waits; idempotent."""
        store, self._store = self._store, None
        with suppress(RuntimeError):
            if store is None and self._announced:
                store = _rendezvous(self._environment, _LOOK_S)
            self._announced = False
            if store is not None:
                store.delete_key(_RUN)
                waiting = [rank for rank in ranks if store.check([f"{_ASKS}/{rank}"])]
                for rank in waiting:
                    store.set(f"{_INVITED}/{rank}", "")
                self._unread(store, _INVITED, waiting, _READ_S)  # before the store ends with this process


class Newcomer:
    """The side of a rank that finds a run under way.

    Attributes:
        invitation: once `wait` has returned.
    """

    def __init__(self, environment: ClusterEnvironment, rank: int) -> None:
        self._environment, self._rank = environment, rank
        self.invitation: Invitation | None = None

    @classmethod
    def find(cls, environment: ClusterEnvironment, rank: int) -> Newcomer | None:
        """Returns the newcomer that this process is, or None: it belongs to a run that is just starting."""
        if rank == 0 or launched_by_us() or isinstance(environment, TorchElasticEnvironment):
            return None
        if not environment.creates_processes_externally:
            return None
        with suppress(RuntimeError):
            if _rendezvous(environment, _LOOK_S).check([_RUN]):
                return cls(environment, rank)
        return None

    def wait(self) -> Invitation:
        """Asks to join and waits for the end of an epoch.

        Raises:
            RuntimeError: the run ended before that.
        """
        heard_s = time.monotonic()
        while True:
            try:
                store = _rendezvous(self._environment, _LOOK_S)
                heard_s = time.monotonic()
                text = self._ask(store)
                break
            except RuntimeError as error:  # the store moves when the members have noticed the death
                if time.monotonic() - heard_s > _SILENT_S:
                    raise RuntimeError(f"the run that rank {self._rank} wanted to join has ended: {error}") from error
                time.sleep(_PAUSE_S)
        if not text:
            raise RuntimeError(
                f"the run that rank {self._rank} wanted to join ended before another epoch began; start all ranks to"
                " train on"
            )
        self.invitation = Invitation.unpack(text)
        return self.invitation

    def _ask(self, store: dist.TCPStore) -> str:
        """Asks until there is an answer, "" if the run has ended; raises RuntimeError when the store has gone."""
        called, invited = f"{_CALLED}/{self._rank}", f"{_INVITED}/{self._rank}"
        store.delete_key(invited)  # of an earlier try
        store.set(f"{_ASKS}/{self._rank}", str(os.getpid()))
        deadline_s = time.monotonic() + _LOOK_S
        # After asking, so that one of the two sides sees the other. A new store has it soon.
        while not store.check([_RUN]):
            if time.monotonic() > deadline_s:
                return ""
            time.sleep(_PAUSE_S)
        while not store.check([invited]):
            if store.check([called]):
                store.delete_key(called)
            time.sleep(_PAUSE_S)
        text = store.get(invited).decode()
        store.delete_key(invited)
        return text


class Admission:
    """Lets newcomers into a run between two epochs; called by all members alike.

    Args:
        run: the members' run, which rebuilds its groups.
        door: where newcomers ask.
        generation: of the process group built with a newcomer last.
    """

    def __init__(self, run: StaleRun, door: Door, generation: int = FIRST_GENERATION) -> None:
        self._run, self.door = run, door
        self._generation = generation
        self._asking: list[int] = []
        self._checkpoint = ""

    @property
    def _in_charge(self) -> bool:
        return self._run.strategy.global_rank == self._run.alive[0]

    def look(self) -> None:
        """When an epoch has ended: if somebody is missing and asks, saves what he will resume from."""
        run = self._run
        strategy, trainer = run.strategy, run.trainer
        missing = [rank for rank in range(strategy.world_size) if rank not in run.alive]
        if not missing:
            return
        root = str(trainer.default_root_dir)
        folder = root if "://" in root else os.path.abspath(root)
        path = os.path.join(folder, f".newcomer-{os.getpid()}-{self._generation}.ckpt")
        self._asking, path = strategy.broadcast((self.door.asking(missing) if self._in_charge else [], path))
        if self._asking:
            self._checkpoint = path
            trainer.save_checkpoint(path)

    def admit(self) -> None:
        """Before an epoch: builds the process group with the newcomers and waits until they are connected."""
        asking, self._asking = self._asking, []
        if not asking:
            return
        run = self._run
        # Once more: the checkpoint took its time, perhaps he has died.
        said = (self.door.asking(asking) if self._in_charge else [], self._generation + 2)
        asking, self._generation = run.strategy.broadcast(said)
        try:
            if asking:
                self._let_in(asking)
        finally:
            self._remove_checkpoint()

    def _let_in(self, asking: list[int]) -> None:
        run, before = self._run, self._run.alive
        members = tuple(sorted({*before, *asking}))
        if self._in_charge:
            invitation = Invitation(
                checkpoint=self._checkpoint,
                generation=self._generation,
                members=members,
                meetings=run.meetings.count,
                address=run.address,
            )
            for rank in asking:
                self.door.invite(rank, invitation)
        numbers = ", ".join(map(str, asking))
        try:
            run.meetings.rebuild(members, self._generation, meeting_s=_COME_S)
            dist.barrier()
        except RuntimeError as error:  # also MemberMissingError: he did not come after all
            # The new group is left inside the except block: whoever still waits in it fails now.
            run.meetings.rebuild(before, self._generation + 1)
            run.strategy.warn_once(f"rank {numbers} wanted to join and did not come: {error}")
        else:
            run.strategy.warn_once(f"rank {numbers} has joined in epoch {run.trainer.current_epoch}")

    def _remove_checkpoint(self) -> None:
        path, self._checkpoint = self._checkpoint, ""
        if path and self._in_charge:
            with suppress(OSError):
                self._run.strategy.checkpoint_io.remove_checkpoint(path)

    def end(self) -> None:
        """The run ends: nobody can join any more; idempotent."""
        self._remove_checkpoint()  # the epoch it was for has not begun
        if self._in_charge:
            self.door.shut(range(self._run.strategy.world_size))
