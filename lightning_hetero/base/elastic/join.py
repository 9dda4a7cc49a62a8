"""A rank that comes late, or comes again, into a run that is under way (layer L).

    joining rank                                 members
    is a run announced where all met at first?   rank 0 announced it when the server started
    asks for an invitation, waits                epoch ends: a rank is missing; does it ask?  -> a checkpoint
    <------------------------------------------- next epoch begins: where the invitation is
    reads it: a file of this user's alone
    says "come", and beats until it trains       wait for it, unless it has stopped to beat: they say "gone", if it
                                                 has not said "come" yet, and go on without it
    all: new process group                       cannot be made: members go on without, joining ranks ask again
    resumes from the checkpoint, connects
    comes to the meeting of all ---------------> wait there until it has come, or stopped to beat; without it other
                                                 groups are made; the epoch goes on            [meetings]

The joining rank resumes as from any checkpoint of Lightning's, so its counters, schedulers and callbacks are those of
the others. The members wait for it only when it has asked; one that has died since does not answer, and is not invited.

Any process that reaches the port where the ranks met at first may read and write that store. So nothing in it is
secret, and nothing is believed: the invitation, with the server's address and tokens and the checkpoint's name, is a
file next to the checkpoint that only this user can have written and can read, and it repeats a number that the joining
rank has chosen.

Not under torchrun, which restarts all ranks instead, and not rank 0: the store in which the others are found is its
own. A rank that comes when the run has ended waits for a new one, up to the strategy's timeout.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hetero.base.elastic.coming import Coming
from lightning_hetero.lightning_compat.launchers import launched_by_us
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.run_store import BoundedStore, StoreAddress, host_store, reach_store

FIRST_GENERATION = 1 << 40
"""Process groups built with joining ranks are numbered from here, those after deaths by the meeting before."""

_RUN, _ASKS, _CALLED, _INVITED, _BEATS = (
    f"lightning_hetero/{name}" for name in ("run", "asks", "called", "invited", "beats")
)
_LOOK_S = 2.0  # for a store that may not be there: then nothing runs yet
_PAUSE_S = 0.05
_BEAT_S = 0.25
_ANSWER_S = 3.0  # for somebody who waits to answer a call: it looks every `_PAUSE_S`
_READ_S = 2.0  # for somebody who waits to read that the run ends
_SILENT_S = 30.0  # without any store: the run has ended
_SEEN_S = 5.0  # for a file to be seen on another node
_TRIES = 3  # of a joining rank, where no process group can be made with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What a joining rank needs.

    Attributes:
        checkpoint: file to resume from.
        generation, members: of the process group that is built with it.
        nodes: (rank, node) of those whose node is known.
        meetings: how many meetings the members have had.
        address: ``host`` and ``port`` of the store where the members meet now, and what else the engine's place has.
        store: of the run; None: who held it has died.
    """

    checkpoint: str
    generation: int
    members: tuple[int, ...]
    nodes: tuple[tuple[int, int], ...]
    meetings: int
    address: Mapping[str, Any] = field(repr=False)  # with tokens
    store: StoreAddress | None = field(default=None, repr=False)

    def write(self, path: str, asked: str) -> None:
        """Puts it into a new file that only this user can read.

        Args:
            path: of the file.
            asked: what the joining rank has asked with.

        Raises:
            OSError: there is such a file, or none can be made.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"asked": asked, "invitation": asdict(self)}, file)

    @classmethod
    def read(cls, path: str, asked: str) -> Invitation:
        """Returns what `write` has put into a file.

        Raises:
            PermissionError: somebody else may have written it, or it answers another question.
            OSError: it cannot be read.
        """
        opened = _open_seen(path)
        try:
            found, user = os.fstat(opened), os.getuid()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
                raise PermissionError(
                    f"the invitation {path} is not believed: it must be a file of user {user} that nobody else may"
                    f" read or write, and is of user {found.st_uid}, {stat.filemode(found.st_mode)}"
                )
            with open(opened, encoding="utf-8", closefd=False) as file:
                said = json.load(file)
        finally:
            os.close(opened)
        if said["asked"] != asked:
            raise PermissionError(f"the invitation {path} is not believed: it is not for this process")
        return cls._of(**said["invitation"])

    @classmethod
    def _of(
        cls, *, checkpoint: str, members: list[int], nodes: list[Any], store: dict[str, Any] | None, **said: Any
    ) -> Invitation:
        if not os.path.isabs(checkpoint):
            raise PermissionError(f"the invitation is not believed: {checkpoint!r} is no file on this machine")
        return cls(
            checkpoint=checkpoint, members=tuple(members), nodes=tuple((rank, node) for rank, node in nodes),
            store=None if store is None else StoreAddress(**store), **said,
        )


def _open_seen(path: str) -> int:
    """Opens a file for reading, which on a shared file system may be seen a moment later; follows no link."""
    deadline_s = awake_s() + _SEEN_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            if awake_s() > deadline_s:
                raise
            time.sleep(_PAUSE_S)


def _rendezvous(environment: ClusterEnvironment) -> BoundedStore:
    """Returns the store over which the ranks met at first; rank 0 hosts it."""
    host, port = environment.main_address, environment.main_port
    return BoundedStore(lambda: reach_store(host, port, timedelta(seconds=_LOOK_S)), _ANSWER_S)


class JoinRequests:
    """The members' side, for the lowest of the ranks that are left.

    Args:
        environment: tells where the rendezvous store is.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self._environment = environment
        self._announced: BoundedStore | None = None
        self._store: BoundedStore | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}  # the last one, and when it was seen first [s]

    def announce(self) -> None:
        """Says that a run is under way to whoever comes to where the ranks met at first: in torch's own store."""
        # Not so with e.g. a rendezvous through a file: nobody can join, nothing else is lost.
        with suppress(RuntimeError):
            self._announced = self._announced or _rendezvous(self._environment)
            self._announced.set(_RUN, "")

    def host(self) -> str:
        """Hosts a store instead of torch's, which went with the process group that a death has broken.

        If another member does so already (who was the lowest before a lower rank came again), its store serves.

        Returns:
            Why nobody can join, if so; nothing else is lost then.
        """
        if self._store is not None:
            try:
                self._store.set(_RUN, "")
                return ""
            except RuntimeError:  # it was another's, who has died
                self._store = None
        reason, deadline_s = "", awake_s() + _LOOK_S  # torch's own takes a moment to close
        while not reason or awake_s() < deadline_s:
            try:
                host, port = self._environment.main_address, self._environment.main_port
                reach = partial(host_store, host, timedelta(seconds=_LOOK_S), port)
                self._store = BoundedStore(reach, _ANSWER_S)
                self._store.set(_RUN, "")
                return ""
            except (OSError, RuntimeError) as error:
                reason = str(error)
            self._store = None
            with suppress(RuntimeError):
                store = _rendezvous(self._environment)
                if store.check([_RUN]):
                    self._store = store
                    return ""
            time.sleep(_PAUSE_S)
        return f"no rank can come again into this run, as the ranks' first meeting place is closed: {reason}"

    def any_asks(self, ranks: Sequence[int]) -> bool:
        """Returns whether one of the ranks has asked; it may have gone."""
        with suppress(RuntimeError):
            return self._store is not None and any(self._store.check([f"{_ASKS}/{rank}"]) for rank in ranks)
        return False

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
    def _unread(store: BoundedStore, kind: str, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Returns who does not take away what was put there for him."""
        deadline_s, left = awake_s() + timeout_s, list(ranks)
        while left := [rank for rank in left if store.check([f"{kind}/{rank}"])]:
            if awake_s() > deadline_s:
                break
            time.sleep(_PAUSE_S)
        return left

    def invite(self, rank: int, invitation: Invitation, path: str) -> None:
        """Lets a joining rank in.

        Args:
            rank: who has asked.
            invitation: what it needs.
            path: for the file with the invitation.

        Raises:
            OSError: the file cannot be made.
        """
        store, asks = self._store, f"{_ASKS}/{rank}"
        assert store is not None
        invitation.write(path, store.get(asks).decode() if store.check([asks]) else "")
        store.delete_key(asks)
        store.delete_key(f"{_BEATS}/{rank}")
        self._beats.pop(rank, None)
        store.set(f"{_INVITED}/{rank}", path)

    def silent(self, ranks: Collection[int], *, for_s: float = _ANSWER_S) -> list[int]:
        """Returns which of those invited have not been heard of for a time, at least since this is asked; or ask again.

        Raises:
            RuntimeError: the store has gone.
        """
        assert self._store is not None
        found = {rank for rank in ranks if self._store.check([f"{_ASKS}/{rank}"])}  # so it came to nothing before
        for rank in ranks:
            beat = self._store.get(key) if self._store.check([key := f"{_BEATS}/{rank}"]) else b""
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, awake_s()
            elif awake_s() - self._beats[rank][1] > for_s:
                found.add(rank)
        return sorted(found)

    def close(self, ranks: Sequence[int]) -> None:
        """The run ends: takes the announcement away and sends home who still waits; idempotent."""
        store = self._store or self._announced  # reached before: at the end strangers may keep it busy
        self._store = self._announced = None
        with suppress(RuntimeError):
            if store is not None:
                store.delete_key(_RUN)
                waiting = [rank for rank in ranks if store.check([f"{_ASKS}/{rank}"])]
                for rank in waiting:
                    store.set(f"{_INVITED}/{rank}", "")
                self._unread(store, _INVITED, waiting, _READ_S)  # before the store ends with this process


class JoiningRank:
    """The side of a rank that finds a run under way."""

    def __init__(self, environment: ClusterEnvironment, rank: int) -> None:
        self._environment, self._rank = environment, rank
        self._asked = secrets.token_hex(16)
        self._trains = threading.Event()

    @classmethod
    def find(cls, environment: ClusterEnvironment, rank: int) -> JoiningRank | None:
        """Returns the joining rank that this process is, or None: it belongs to a run that is just starting."""
        if rank == 0 or launched_by_us() or isinstance(environment, TorchElasticEnvironment):
            return None
        if not environment.creates_processes_externally:
            return None
        with suppress(RuntimeError):
            if _rendezvous(environment).check([_RUN]):
                return cls(environment, rank)
        return None

    def come(self, build: Callable[[Invitation, dist.Store, Coming], None]) -> Invitation:
        """Asks to join until there is a process group with this rank.

        Args:
            build: makes the group, among ranks that find each other in the store; asked again, with another
                invitation, if a `RuntimeError` says that it cannot be made.

        Raises:
            RuntimeError: see `wait`; or no group could be made, time and again.
            PermissionError, OSError: see `wait`.
        """
        threading.Thread(target=self._beat, name="joining-rank", daemon=True).start()
        tries = 0
        try:
            while True:
                invitation = self.wait()
                try:
                    store = reach_store(invitation.address["host"], invitation.address["port"])
                    coming = Coming(store, invitation.generation)
                    if coming.comes(self._rank):
                        build(invitation, store, coming)
                        return invitation
                except RuntimeError:
                    tries += 1
                    if tries == _TRIES:
                        raise
        except BaseException:
            self.trains()
            raise

    def trains(self) -> None:
        """This rank trains with the others, or never will: it need not be heard of any more."""
        self._trains.set()

    def _beat(self) -> None:
        store = None
        while not self._trains.wait(_BEAT_S):
            try:
                store = store or _rendezvous(self._environment)
                store.add(f"{_BEATS}/{self._rank}", 1)
            except RuntimeError:  # it moves when the members have noticed a death
                store = None

    def wait(self) -> Invitation:
        """Asks to join and waits for the end of an epoch.

        Raises:
            RuntimeError: the run ended before that.
            PermissionError: the invitation may be somebody else's.
            OSError: it cannot be read.
        """
        heard_s = awake_s()
        while True:
            try:
                store = _rendezvous(self._environment)
                heard_s = awake_s()
                path = self._ask(store)
                break
            except RuntimeError as error:  # the store moves when the members have noticed the death
                if awake_s() - heard_s > _SILENT_S:
                    raise RuntimeError(f"the run that rank {self._rank} wanted to join has ended: {error}") from error
                time.sleep(_PAUSE_S)
        if not path:
            raise RuntimeError(
                f"the run that rank {self._rank} wanted to join ended before it was let in; start all ranks to"
                " train on"
            )
        return Invitation.read(path, self._asked)

    def _ask(self, store: BoundedStore) -> str:
        """Asks until there is an answer: where the invitation is, "" if the run has ended.

        Raises:
            RuntimeError: the store has gone.
        """
        called, invited = f"{_CALLED}/{self._rank}", f"{_INVITED}/{self._rank}"
        store.delete_key(invited)  # of an earlier try
        store.set(f"{_ASKS}/{self._rank}", self._asked)
        deadline_s = awake_s() + _LOOK_S
        # After asking, so that one of the two sides sees the other. A new store has it soon.
        while not store.check([_RUN]):
            if awake_s() > deadline_s:
                return ""
            time.sleep(_PAUSE_S)
        while not store.check([invited]):
            if store.check([called]):
                store.delete_key(called)
            time.sleep(_PAUSE_S)
        path = store.get(invited).decode()
        store.delete_key(invited)
        return path
