"""The script launcher: it may go on without a worker that was killed, and no process outlives it (layer L).

The one for ``multiprocessing`` is in `process_launchers`; the rules are the same.

Lightning's launchers end every process as soon as one has died, which is right when a dead rank stops all others. With
a parameter server it does not. What a launcher of ours does when a local rank ends:

| a rank other than local rank 0                          | while `tolerates()` | otherwise      |
|---------------------------------------------------------|---------------------|----------------|
| killed by a signal (out of memory, a lost machine, ...) | a warning names it  | everybody ends |
| was silent for so long that the others left it behind   | it ends, with its traceback          |
| exit code above 0 (an exception: its own traceback)     | everybody ends      | everybody ends |

Local rank 0 holds what the user gets back: without it everybody ends, also while they start. Ranks that end anyhow,
because they know the cause, have `GRACE_S` for their own last words; then they are killed.

The private names of Lightning used here are pinned by ``tests/ranks/lightning_compat/test_launchers.py`` (2.6).
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.base import LeftBehindError
from lightning_hetero.transport.sockets import has_ended, open_pidfd, process_state

_LOG = logging.getLogger(__name__)

GRACE_S = 5.0
"""What ranks get to end on their own, and to say why, before they are killed [s]."""

_POLL_S = 0.2  # only where the system cannot tell at once that a process has ended
LEFT_BEHIND = 75
"""Exit code of a rank without which the others have gone on (sysexits.h: a temporary failure)."""
_PARENT = "LIGHTNING_HETERO_LAUNCHER"  # tells a child of the script launcher "<its parent's pid>:<its `_done`>"

_launches = 0  # of this process, by the script launcher
_done = -1  # in local rank 0: memory with the number of launches that have returned, which its children read


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further local rank, like Lightning's; this process is local rank 0.

    Args:
        cluster_environment, num_processes, num_nodes: as Lightning's.
        check: raises what is wrong with the Trainer's devices and nodes.
        tolerates: whether the run would now go on without a worker; called from another thread.

    Attributes:
        tolerated: local ranks whose death was tolerated.
    """

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int, *,
        check: Callable[[int, int], None], tolerates: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check, self.tolerates = check, tolerates
        self.tolerated: set[int] = set()

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the other local ranks, if nobody else does, and calls ``function`` in this one."""
        global _done, _launches
        environment, _launches = self.cluster_environment, _launches + 1
        self._check(self.num_processes, self.num_nodes)
        if not environment.creates_processes_externally:
            self.tolerated = set()
            if _done < 0 and hasattr(os, "memfd_create"):
                _done = os.memfd_create("lightning_hetero_done")
            os.environ[_PARENT] = f"{os.getpid()}:{_done}"
            try:
                self._call_children_scripts()
            finally:
                del os.environ[_PARENT]
            atexit.register(_end_stopped, os.getpid(), self.procs)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with self._watching_children(), _ending_with_parent(_launches), ending_alone(launched_by_us()):
            result = function(*args, **kwargs)
        if _done >= 0:
            os.pwrite(_done, _launches.to_bytes(8, "little"), 0)
        return result

    @contextmanager
    def _watching_children(self) -> Iterator[None]:
        """Children are watched inside only: they live on between two runs, where nobody waits for them."""
        if not self.procs:
            yield
            return
        told, teller = Pipe(duplex=False)
        watch = threading.Thread(target=self._watch_children, args=(told,), name="child-watch", daemon=True)
        watch.start()
        try:
            yield
        finally:
            teller.send_bytes(b".")  # closing it is not enough: a forked process may hold a copy
            watch.join(GRACE_S)
            teller.close()
            told.close()

    def _watch_children(self, told: Connection | None = None) -> None:
        """Kills all children, and this process, when one has died whose death is not tolerated.

        Ends when all children have ended, or when somebody has emptied `procs`: then they are watched elsewhere.

        Args:
            told: becomes readable when this is to end.
        """
        procs, failed_at_s = self.procs, None
        while procs and not (told is not None and told.poll()):
            left = [p for p in procs if p.poll() is None]
            for rank, proc in enumerate(list(procs), 1):
                if rank in self.tolerated or not proc.returncode:
                    continue
                left_behind = proc.returncode == LEFT_BEHIND
                if left_behind or (proc.returncode < 0 and failed_at_s is None and would_go_on(self.tolerates)):
                    self.tolerated.add(rank)
                    note_death(rank, proc.returncode)
                elif failed_at_s is None:
                    failed_at_s = awake_s()
                    _LOG.error("local rank %d ended with code %d; everybody ends", rank, proc.returncode)
            if failed_at_s is not None and awake_s() - failed_at_s >= GRACE_S:
                self._kill_all(procs)
                return
            if not left and failed_at_s is None:
                return
            _wait_for_an_end(left if failed_at_s is None else [], told)

    @staticmethod
    def _kill_all(procs: list[subprocess.Popen]) -> None:
        """As Lightning: SIGKILL, because a rank inside a collective does not react to anything milder."""
        for proc in list(procs):
            with suppress(OSError):
                proc.kill()
        if procs:  # still ours to watch
            os.kill(os.getpid(), signal.SIGKILL)


def _end_stopped(owner: int, procs: list[subprocess.Popen]) -> None:
    """Kills children that are stopped when the process that started them ends: nobody else will wake or end them.

    Children that run end on their own, whatever this process ended with.
    """
    for rank, proc in enumerate(procs, 1) if os.getpid() == owner else ():
        if proc.poll() is None and process_state(proc.pid) == b"T":
            with suppress(OSError):  # perhaps nobody reads the screen any more
                proc.kill()
                print(f"local rank {rank} is stopped, and local rank 0 ends: it is killed", file=sys.stderr, flush=True)


def would_go_on(tolerates: Callable[[], bool]) -> bool:
    """Asks; it may be while the strategy is being torn down."""
    with suppress(Exception):
        return tolerates()
    return False


def note_death(local_rank: int, code: int) -> None:
    if code == LEFT_BEHIND:
        _LOG.info("local rank %d was left behind, and has ended", local_rank)
        return
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    _LOG.info("local rank %d was killed by %s; the others go on without it", local_rank, name)


def _wait_for_an_end(procs: list[subprocess.Popen], told: Connection | None = None) -> None:
    """Returns soon after one of the processes has ended, or ``told`` is readable; sometimes earlier."""
    numbers = [number for proc in procs if (number := open_pidfd(proc.pid)) is not None]
    try:
        # Now and then in any case, to notice that `procs` was emptied.
        wait([*numbers, *([] if told is None else [told])], 10 * _POLL_S if numbers else _POLL_S)
    finally:
        for number in numbers:
            os.close(number)


@contextmanager
def ending_alone(applies: bool) -> Iterator[None]:
    """In a rank that the others have left behind: it ends, which does not end them."""
    try:
        yield
    except LeftBehindError as error:
        if not applies:
            raise
        traceback.print_exc()
        raise SystemExit(LEFT_BEHIND) from error


def launched_by_us() -> bool:
    """Whether this process is a child of `ScriptLauncher`."""
    return _PARENT in os.environ


@contextmanager
def _ending_with_parent(launch: int) -> Iterator[None]:
    """In a child of the script launcher: if local rank 0 dies or fails, so does this process, unless it finishes soon.

    Nobody else would notice before the timeout: others wait for rank 0, or go on, and the user believes all is over.

    Args:
        launch: number of this launch. A local rank 0 that has ended after it is no reason to end.
    """
    parent, (started_by, _, done) = os.getppid(), os.environ.get(_PARENT, "").partition(":")
    if started_by != str(parent):
        if started_by and has_ended(int(started_by), 0.0):
            raise RuntimeError(
                "local rank 0, which started this process, has ended before this one was ready to train: its own error"
                " is above"
            )
        yield  # somebody else's child, perhaps of one of ours
        return
    finished = threading.Event()
    with ExitStack() as opened:
        memory = None
        with suppress(OSError):  # a system without it
            memory = opened.enter_context(open(f"/proc/{parent}/fd/{done}", "rb", buffering=0))

        def watch() -> None:
            while not finished.wait(_POLL_S):
                if os.getppid() == parent:
                    continue
                if memory is not None and int.from_bytes(os.pread(memory.fileno(), 8, 0), "little") >= launch:
                    return
                if not finished.wait(GRACE_S):
                    rank = os.environ.get("LOCAL_RANK", "?")
                    with suppress(OSError):  # perhaps nobody reads the screen any more, and this rank is to end
                        print(f"local rank 0 is gone; local rank {rank} ends, too", file=sys.stderr, flush=True)
                    os._exit(1)
                return

        thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join(GRACE_S)
