"""A rank that comes late, or comes again, into a run that is under way (layer L).

    newcomer                                     members
    is a run announced where all met at first?   rank 0 announced it when the server started
    asks for an invitation, waits                epoch ends: somebody is missing; does he ask?  -> a checkpoint
    <------------------------------------------- next epoch begins: invitation
    all: new process group with the newcomer
    resumes from the checkpoint, connects -----> barrier; the epoch goes on, with him

The newcomer resumes as from any checkpoint of Lightning's, so its counters, schedulers and callbacks are those of the
others. The members wait for it at that barrier, which is the only wait, and only when somebody has asked.

Ranks started by somebody else than torchrun (which restarts all ranks instead) can join; rank 0 cannot: it writes the
checkpoints, so without it the run has ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_hetero.stale.launcher import launched_by_us
from lightning_hetero.stale.start import Address

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from lightning_hetero.stale.run import StaleRun

__all__ = ["Admission", "Door", "Invitation", "Newcomer"]

_RUN, _ASKS, _INVITED = "lightning_hetero/run", "lightning_hetero/asks", "lightning_hetero/invited"
_BY_JOIN = 1 << 20  # process groups built with newcomers are numbered from here, those after deaths from 1
_LOOK_S = 2.0  # for a store that may not be there: then nothing runs yet
_PAUSE_S = 0.2
_SILENT_S = 30.0  # without any store: the run has ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What a newcomer needs.

    Attributes:
        checkpoint: file to resume from.
        generation, members: of the process group that is built with it.
        meetings: how many meetings the members have had.
    """

    checkpoint: str
    generation: int
    members: tuple[int, ...]
    meetings: int


def _rendezvous(environment: ClusterEnvironment, timeout_s: float) -> dist.TCPStore:
    """Returns the store over which the ranks met at first; rank 0 hosts it."""
    host, port = environment.main_address, environment.main_port
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class Door:
    """The members' side, at the rank that writes checkpoints.

    Args:
        environment: tells where the rendezvous store is.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self._environment = environment
        self._store: dist.TCPStore | None = None

    def announce(self, address: Address) -> None:
        """Says where the server is, to whoever comes to where the ranks met at first: in torch's own store there."""
        with suppress(RuntimeError):  # e.g. a rendezvous through a file: nobody can join, nothing else is lost
            _rendezvous(self._environment, _LOOK_S).set(_RUN, json.dumps(asdict(address)))

    def open(self, address: Address) -> None:
        """Hosts a store in the place of torch's, which went with the process group that a death has broken."""
        if self._store is not None:
            return
        host, port = self._environment.main_address, self._environment.main_port
        try:
            self._store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_LOOK_S)
            )
            self._store.set(_RUN, json.dumps(asdict(address)))
        except RuntimeError as error:  # nobody can join then, nothing else is lost
            rank_zero_warn(f"no rank can come again into this run, as {host}:{port} cannot be used: {error}")

    def asking(self, missing: Sequence[int]) -> list[int]:
        """Returns which of the missing ranks wait for an invitation."""
        store = self._store
        try:
            return [] if store is None else [r for r in missing if store.check([f"{_ASKS}/{r}"])]
        except RuntimeError:
            return []

    def invite(self, rank: int, invitation: Invitation) -> None:
        """Lets a newcomer in."""
        assert self._store is not None
        self._store.delete_key(f"{_ASKS}/{rank}")
        self._store.set(f"{_INVITED}/{rank}", json.dumps(asdict(invitation)))

    def shut(self, ranks: Sequence[int]) -> None:
        """The run ends: takes the announcement away and sends home who still waits."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            self._store.delete_key(_RUN)
            # Whoever waits still reads this before the store ends with this process.
            for rank in self.asking(ranks):
                self._store.set(f"{_INVITED}/{rank}", "")


class Newcomer:
    """The side of a rank that finds a run under way.

    Attributes:
        address: of the server.
        invitation: once `wait` has returned.
    """

    def __init__(self, environment: ClusterEnvironment, rank: int, address: Address) -> None:
        self._environment, self._rank = environment, rank
        self.address = address
        self.invitation: Invitation | None = None

    @classmethod
    def find(cls, environment: ClusterEnvironment, rank: int) -> Newcomer | None:
        """Returns the newcomer that this process is, or None: it belongs to a run that is just starting."""
        if rank == 0 or launched_by_us() or isinstance(environment, TorchElasticEnvironment):
            return None
        if not environment.creates_processes_externally:
            return None
        try:
            store = _rendezvous(environment, _LOOK_S)
            if not store.check([_RUN]):
                return None
            said = json.loads(store.get(_RUN))
        except (RuntimeError, ValueError):
            return None
        return cls(environment, rank, Address(**{**said, "near": tuple(said["near"])}))

    def wait(self) -> Invitation:
        """Asks to join and waits for the end of an epoch.

        Raises:
            RuntimeError: the run ended before that.
        """
        text, silent_s = None, 0.0
        while text is None:
            try:
                text = self._ask()
                silent_s = 0.0
            except RuntimeError as error:  # the store moves when the members have noticed the death
                silent_s += _PAUSE_S
                time.sleep(_PAUSE_S)
                if silent_s > _SILENT_S:
                    raise RuntimeError(f"the run that rank {self._rank} wanted to join has ended: {error}") from error
        if not text:
            raise RuntimeError(f"the run that rank {self._rank} wanted to join ended before another epoch began")
        said = json.loads(text)
        self.invitation = Invitation(**{**said, "members": tuple(said["members"])})
        return self.invitation

    def _ask(self) -> str:
        """Asks until there is an answer; raises RuntimeError when the store has gone."""
        store = _rendezvous(self._environment, _LOOK_S)
        key = f"{_INVITED}/{self._rank}"
        store.delete_key(key)  # of an earlier try
        store.set(f"{_ASKS}/{self._rank}", str(os.getpid()))
        while not store.check([key]):
            time.sleep(_PAUSE_S)
        text = store.get(key).decode()
        store.delete_key(key)
        return text


class Admission:
    """Lets newcomers into a run between two epochs; called by all members alike.

    Args:
        run: the members' run, which rebuilds its groups.
        door: where newcomers ask.
    """

    def __init__(self, run: StaleRun, door: Door) -> None:
        self._run, self.door = run, door
        self._asking: list[int] = []
        self._checkpoint = ""
        self._count = 0

    def look(self) -> None:
        """At the end of an epoch: if somebody is missing and asks, saves what he will resume from."""
        run = self._run
        strategy, trainer = run.strategy, run.trainer
        missing = [rank for rank in range(strategy.world_size) if rank not in run.alive]
        if not missing:
            return
        self._asking = strategy.broadcast(self.door.asking(missing) if strategy.is_global_zero else [])
        if self._asking:
            name = f".newcomer-{os.getpid()}-{self._count}.ckpt"
            folder = os.path.abspath(trainer.default_root_dir)
            self._checkpoint = strategy.broadcast(os.path.join(folder, name))
            trainer.save_checkpoint(self._checkpoint)

    def admit(self) -> None:
        """Before an epoch: builds the process group with the newcomers and waits until they are connected."""
        asking, self._asking = self._asking, []
        if not asking:
            return
        run, self._count = self._run, self._count + 1
        members, before = tuple(sorted({*run.alive, *asking})), run.alive
        generation = _BY_JOIN + 2 * self._count
        if run.strategy.is_global_zero:
            for rank in asking:
                invitation = Invitation(
                    checkpoint=self._checkpoint, generation=generation, members=members, meetings=run.meetings
                )
                self.door.invite(rank, invitation)
        try:
            run.rebuild(members, generation)
            dist.barrier()
        except RuntimeError as error:  # also MemberMissingError: he did not come after all
            rank_zero_warn(f"rank {asking} wanted to join and did not: {error}")
            run.rebuild(before, generation + 1)
        finally:
            if run.strategy.is_global_zero:
                with suppress(OSError):
                    os.remove(self._checkpoint)
