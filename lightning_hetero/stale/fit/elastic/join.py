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
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_hetero.lightning_compat.launchers import launched_by_us
from lightning_hetero.stale.runtime.processes.start import Address

__all__ = ["FIRST_GENERATION", "Invitation", "JoinRequests", "Newcomer"]

FIRST_GENERATION = 1 << 20
"""Process groups built with newcomers are numbered from here, those after deaths from 1."""

_RUN, _ASKS, _CALLED, _INVITED = (f"lightning_hetero/{name}" for name in ("run", "asks", "called", "invited"))
_LOOK_S = 2.0  # for a store that may not be there: then nothing runs yet
_PAUSE_S = 0.05
_ANSWER_S = 3.0  # for somebody who waits to answer a call: it looks every `_PAUSE_S`
_READ_S = 2.0  # for somebody who waits to read that the run ends
_SILENT_S = 30.0  # without any store: the run has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What a newcomer needs.

    Attributes:
        checkpoint: file to resume from.
        generation, members: of the process group that is built with it.
        nodes: (rank, node) of those whose node is known.
        meetings: how many meetings the members have had.
        address: of the server, which may be another one than when the newcomer came.
    """

    checkpoint: str
    generation: int
    members: tuple[int, ...]
    nodes: tuple[tuple[int, int], ...]
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
        nodes = tuple((rank, node) for rank, node in said.pop("nodes"))
        return cls(members=members, nodes=nodes, address=address, **said)


def _address(said: dict[str, Any]) -> Address:
    return Address(**{**said, "near": tuple(said["near"])})


def _rendezvous(environment: ClusterEnvironment, timeout_s: float) -> dist.TCPStore:
    """Returns the store over which the ranks met at first; rank 0 hosts it."""
    host, port = environment.main_address, environment.main_port
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class JoinRequests:
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

    def host(self, address: Address) -> str:
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

    def close(self, ranks: Sequence[int]) -> None:
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
