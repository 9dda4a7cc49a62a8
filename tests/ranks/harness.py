"""Ranks for tests: real processes that stay alive between tests, each job with its own gloo default group.

    parent: run_ranks ──job──►  rank 0..n-1: init_process_group(file://), fn(rank, world_size, *args)
            ◄──result──         a rank that raised leaves the group at once: its peers may wait for it
            ──release──►        destroy_process_group, restore environment and folder
            ◄──done───

The first call of a session starts a fork server, itself a fork of the Python of `tests.warm`, which imports torch and
Lightning first (seconds); every pool after it costs a fork, every job milliseconds. No ports are chosen: the ranks
meet in a file. A rank that does not finish in time is killed with its whole pool, and the next call starts a new one.

The environment of the test process does not reach the ranks: set variables inside the function.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing import util as mp_util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psutil
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from tests import warm
from tests.ranks.rank_process import SHOW_STACK, Job, Outcome, serve

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
START_S = 180.0  # one cold import of torch and Lightning on a busy machine
AFTERMATH_S = 2.0  # how long the other ranks may go on after the first one failed; then they are killed
SHOW_S = 0.3  # for stacks to be written
DEEPER_S = 60.0  # for gdb, which reads what torch's libraries call their functions
LEAVE_S = 10.0  # how long leaving the group may take


class RankTimeoutError(TimeoutError):
    """A rank did not finish in time; the message shows where each late rank stood."""


class RankTracebackError(Exception):
    """Carries a rank's traceback as the ``__cause__`` of the exception raised in the parent."""


class RankEnvironment(ClusterEnvironment):
    """Tells a Trainer inside `run_ranks` its place; Lightning keeps the default group that exists already.

    ``Trainer(accelerator="cpu", devices=world_size, plugins=[RankEnvironment(rank, world_size)], ...)``

    Args:
        rank: global rank, which is also the local one: all ranks are on one node.
        world_size: number of ranks; must equal ``devices`` (ValueError if not).
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be in 0..{world_size - 1} (world_size={world_size})")
        self._rank, self._world_size = rank, world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        raise RuntimeError("ranks of run_ranks meet in a file, without a port: was their group destroyed?")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        if size != self._world_size:
            raise ValueError(f"the Trainer wants {size} processes, run_ranks has {self._world_size}")

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self._rank:
            raise ValueError(f"the Trainer wants rank {rank}, this process is rank {self._rank}")

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class _Pool:
    """``world_size`` worker processes, one pair of pipes each: control, and a lifeline nobody writes to."""

    def __init__(self, world_size: int, context: Any = None, target: Callable[..., None] = serve) -> None:
        context = context or process_context()
        self.controls: list[Connection] = []
        self.lifelines: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            control, worker_control = context.Pipe()
            worker_lifeline, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=target, args=(rank, world_size, worker_control, worker_lifeline), name=f"rank-{rank}"
            )
            process.start()
            worker_control.close()
            worker_lifeline.close()
            self.controls.append(control)
            self.lifelines.append(lifeline)
            self.processes.append(process)
        started = self._collect(START_S)
        if len(started) < world_size or _first_failed(started) is not None:
            self.kill()
            raise RuntimeError(f"only ranks {sorted(started)} of {world_size} started within {START_S:.0f} s")

    def run(self, fn: Callable[..., T], args: tuple[Any, ...], timeout_s: float) -> list[T]:
        call = pickle.dumps((fn, args))
        ranks = range(len(self.controls))
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
            outcomes = self._exchange(Job(call, list(sys.path), folder, timeout_s))
            if (rank := _first_failed(outcomes)) is not None:
                error = outcomes[rank].error
                assert error is not None
                raise error from RankTracebackError(f"rank {rank}:\n{outcomes[rank].trace}")
            if late := sorted(set(ranks) - outcomes.keys()):
                stacks = _stacks(folder, late)
                raise RankTimeoutError(f"ranks {late} did not finish within {timeout_s} s, killed\n{stacks}")
        return [outcomes[rank].value for rank in ranks]

    def _exchange(self, job: Job) -> dict[int, Outcome]:
        """Sends the job, collects what comes in time; kills the pool unless all are ready for the next."""
        ready = False
        try:
            self._send_all(pickle.dumps(job))
            outcomes = self._collect(job.timeout_s)
            if late := set(range(len(self.controls))) - outcomes.keys():
                self._end_children(late)
                self._look_deeper(late, job.folder)
            else:
                self._send_all(b"release")
                done = self._collect(LEAVE_S)
                ready = len(done) == len(self.controls) and _first_failed(done) is None
            return outcomes
        finally:  # also after Ctrl-C: half a conversation cannot be taken up again
            if not ready:
                self.kill()

    def _end_children(self, ranks: set[int]) -> None:
        """Has the DataLoader workers of late ranks write where they stand, which is perhaps why, and ends them."""
        for rank in ranks:
            with contextlib.suppress(psutil.Error):  # it is dead
                children = psutil.Process(self.processes[rank].pid).children(recursive=True)
                for child in children:
                    child.send_signal(SHOW_STACK)
                psutil.wait_procs(children, timeout=SHOW_S)
                for child in children:
                    child.kill()

    def _look_deeper(self, ranks: set[int], folder: str) -> None:
        """Where a rank hangs in its answer, nothing of Python's waits: gdb, if there is one, shows what does."""
        for rank in ranks:
            stack = Path(folder, f"stack-{rank}")
            if "in _pickled" in stack.read_text() and (gdb := shutil.which("gdb")):
                asks = ("set print frame-arguments none", "thread 1", "backtrace 25", "thread apply all backtrace 6")
                command = [gdb, "-batch", "-p", str(self.processes[rank].pid)]
                command += [word for ask in asks for word in ("-ex", ask)]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = subprocess.run(command, capture_output=True, text=True, timeout=DEEPER_S).stdout
                    with stack.open("a") as file:
                        file.writelines(line for line in said.splitlines(True) if line.startswith(("#", "Thread")))

    def _send_all(self, message: bytes) -> None:
        for control in self.controls:
            with contextlib.suppress(OSError):  # a dead rank is noticed when its answer is read
                control.send_bytes(message)

    def _collect(self, timeout_s: float) -> dict[int, Outcome]:
        """Waits for one message per rank; not much longer once a rank has failed."""
        outcomes: dict[int, Outcome] = {}
        pending = dict(enumerate(self.controls))
        deadline = time.monotonic() + timeout_s
        while pending and (remaining := deadline - time.monotonic()) > 0:
            ready = wait(list(pending.values()), remaining)
            for rank in [rank for rank, control in pending.items() if control in ready]:
                del pending[rank]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self.controls[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(LEAVE_S)
            died = f"rank {rank} died with exit code {self.processes[rank].exitcode}"
            return Outcome(error=RuntimeError(died), trace=f"{died}, without a traceback")

    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for end in [*self.controls, *self.lifelines]:
            end.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.controls, self.lifelines, self.processes = [], [], []


def _first_failed(outcomes: dict[int, Outcome]) -> int | None:
    failed = [rank for rank, outcome in outcomes.items() if outcome.error is not None]
    return min(failed, key=lambda rank: outcomes[rank].failed_at_s, default=None)


_POOLS: dict[Hashable, _Pool] = {}  # by number of ranks, and, where they are other processes, what they are


def run_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Calls ``fn(rank, world_size, *args)`` on every rank of a fresh gloo default group.

    Ranks run with one thread, the same seed, a common empty working folder which is deleted afterwards, and
    no launcher variables. A rank must not leave a non-daemon thread behind (RuntimeError).

    Args:
        world_size: number of ranks, at least 1.
        fn: importable by name (module level, no lambda); arguments and results are pickled, tensors by value.
        timeout_s: after it, ranks still running are killed.

    Returns:
        The results, by rank.

    Raises:
        RankTimeoutError: a rank did not finish; shows where it stood, and its DataLoader workers.
        RuntimeError: a rank died.
        BaseException: what the first rank to fail raised, its traceback as ``__cause__``.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise TypeError(f"{fn.__qualname__} cannot be imported by name in a rank: define it at module level")
    return pool_of(world_size, lambda: _Pool(world_size)).run(fn, args, timeout_s)


def pool_of(key: Hashable, make: Callable[[], _Pool]) -> _Pool:
    """Returns the pool that is kept under ``key``, a new one if there is none or a process of it has ended."""
    pool = _POOLS.get(key)
    if pool is None or not pool.alive():
        pool = _POOLS[key] = make()
    return pool


def process_context() -> Any:
    """Returns the `multiprocessing` context whose processes start soonest: forks of `tests.preload` if possible."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context: Any = mp.get_context("forkserver")
    server = vars(forkserver)["_forkserver"]  # not in typeshed
    if server._forkserver_pid is None:
        context.set_forkserver_preload(["tests.preload"])
        resource_tracker.ensure_running()  # else `forkserver` would start it, and warm, too: it ignores signals
        with mock.patch.object(mp_util, "spawnv_passfds", _warm):
            forkserver.ensure_running()
        server.ensure_running = lambda: None  # which waits for a child; this is a child of the warm Python
    return context


def _warm(path: Any, args: Sequence[Any], keep: Sequence[int]) -> int:
    """Starts a server of forks with the files to keep under their numbers; returns its process id."""
    numbers = sorted({*keep})
    request = warm._request(list(args[args.index("-c") :]), os.getcwd(), os.environ) | {"keep": numbers}
    return warm._ask(request, 1, 2, *numbers)


def worker_pids() -> set[int]:
    """Returns the process ids of all workers and of their fork server, which leak guards leave alone."""
    server = vars(forkserver)["_forkserver"]._forkserver_pid  # not in typeshed
    workers = {process.pid for pool in _POOLS.values() for process in pool.processes}
    return workers | ({server} if server else set())


def close_pools() -> None:
    """Ends every worker; `run_ranks` starts new ones when needed."""
    for pool in _POOLS.values():
        pool.kill()
    _POOLS.clear()


atexit.register(close_pools)


def _stacks(folder: str, ranks: list[int]) -> str:
    """Returns what faulthandler wrote on the late ranks shortly before the deadline."""
    files = {rank: Path(folder, f"stack-{rank}") for rank in ranks}
    return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists())
