"""The worker's side of `tests.ranks.harness`: a process that does one job after another, always as the same rank."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.garbage import search_rarely
from tests.seeds import seed_all

# What launchers set; inherited from outside, it would tell Lightning a rank that is not ours.
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "LSB_", "PL_", "MASTER_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

SHOW_STACK = signal.SIGRTMIN + 5
"""A process that gets this signal writes the stacks of its threads beside its rank's."""


@dataclass
class Outcome:
    """What one rank answers: its value, or its exception with the traceback as text.

    ``failed_at_s`` orders the failures of one job, so that the cause is reported and not a peer's "connection
    closed"; the clock is the node's. A rank that died cannot say when, and comes first.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    failed_at_s: float = -math.inf


@dataclass
class Job:
    call: bytes  # pickled (fn, args): unpickled under the guard that reports errors
    sys_path: list[str]
    folder: str
    timeout_s: float


Joins = Callable[[int, int, Job], AbstractContextManager[None]]


def serve(rank: int, world_size: int, control: Connection, lifeline: Connection, joined: Joins | None = None) -> None:
    """Does one job after another; ``joined`` is around each, `_joined_group` unless given."""
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    for name in list(os.environ):
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    torch.set_num_threads(1)
    environment = dict(os.environ)
    search_rarely()  # as each job's end, see below
    control.send_bytes(pickle.dumps(Outcome()))
    while True:
        try:
            job: Job = pickle.loads(control.recv_bytes())
        except EOFError:
            return
        with _stack_in_time(rank, job):
            outcome = _do(rank, world_size, job, joined or _joined_group)
            control.send_bytes(_pickled(outcome))
        if outcome.error is not None:
            _leave_group()  # now: the peers may be waiting for this rank
        del outcome  # and what its traceback holds
        control.recv_bytes()
        _leave_group()
        _forget_groups()
        # On all ranks now: a fit that failed leaves groups as garbage. Whose destructor finds a collective under way
        # waits for it, up to the group's timeout, or until the other end is destroyed; in a later job it would hang.
        search_rarely()
        os.chdir(tempfile.gettempdir())  # the parent deletes the job's folder
        os.environ.clear()
        os.environ.update(environment)
        control.send_bytes(pickle.dumps(Outcome()))


def _die_with_parent(lifeline: Connection) -> None:
    """Ends the process when the parent is gone, even while the main thread hangs in a collective."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _do(rank: int, world_size: int, job: Job, joined: Joins) -> Outcome:
    try:
        sys.path[:] = job.sys_path
        with joined(rank, world_size, job), _no_threads_left(rank):
            fn, args = pickle.loads(job.call)
            outcome = Outcome(value=fn(rank, world_size, *args))
            pickle.loads(pickle.dumps(outcome))  # what cannot be read back must fail here, with a traceback
            return outcome
    except BaseException as error:
        return Outcome(error=error, trace=traceback.format_exc(), failed_at_s=time.monotonic())


def _pickled(outcome: Outcome) -> bytes:
    try:
        answer = pickle.dumps(outcome)
        pickle.loads(answer)  # some exceptions pickle but cannot be built again
        return answer
    except Exception:
        outcome.error = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
        return pickle.dumps(outcome)


@contextlib.contextmanager
def _stack_in_time(rank: int, job: Job) -> Iterator[None]:
    """Writes where this rank stands shortly before its time is over: in the job, or in its answer."""
    with Path(job.folder, f"stack-{rank}").open("w") as stack:
        faulthandler.dump_traceback_later(0.9 * job.timeout_s, file=stack)
        faulthandler.register(SHOW_STACK, file=stack)  # forked DataLoader workers have it, too
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(SHOW_STACK)


@contextlib.contextmanager
def in_its_folder(rank: int, world_size: int, job: Job) -> Iterator[None]:
    """Seeds every generator in the job's empty folder, and makes no group."""
    work = Path(job.folder, "work")
    work.mkdir(exist_ok=True)
    os.chdir(work)
    seed_all()
    torch.set_default_dtype(torch.float32)
    rank_zero_only.rank = rank  # pyright: ignore[reportFunctionMemberAccess]
    yield


@contextlib.contextmanager
def _joined_group(rank: int, world_size: int, job: Job) -> Iterator[None]:
    with in_its_folder(rank, world_size, job):
        meeting = Path(job.folder, "store").as_uri()
        dist.init_process_group("gloo", meeting, timedelta(seconds=job.timeout_s), world_size, rank)
        # None may fail and leave before all have come: where joining fails torch counts a group that it never
        # forgets, names the next one differently than the others do, and the next job waits in vain.
        dist.barrier()
        yield


@contextlib.contextmanager
def _no_threads_left(rank: int) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in left:
        thread.join(0.5)
    if names := [thread.name for thread in left if thread.is_alive()]:
        raise RuntimeError(f"rank {rank} left threads behind: {names}; stop them in teardown")


def _forget_groups() -> None:
    """Empties DTensor's caches. They hold groups that are left: the next job's may have the same names, and each has a
    thread of gloo that wakes a hundred times a second."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        getattr(debug, "_clear_sharding_prop_cache", int)()  # since torch 2.11
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
