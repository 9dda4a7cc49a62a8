"""Launchers that let a run go on without a worker that was killed (layer L).

Lightning's launchers end every process as soon as one has died, which is right when a dead rank stops all others. With
a parameter server it does not. What a launcher of ours does when a local rank ends:

| a rank other than local rank 0                          | while `tolerates()` | otherwise      |
|---------------------------------------------------------|---------------------|----------------|
| killed by a signal (out of memory, a lost machine, ...) | a warning names it  | everybody ends |
| was silent for so long that the others left it behind   | it ends, with its traceback          |
| exit code above 0 (an exception: its own traceback)     | everybody ends      | everybody ends |

Local rank 0 holds what the user gets back: without it everybody ends. Ranks that end anyhow, because the server told
them the cause, have `GRACE_S` for their own last words; then they are killed.

The private names of Lightning used here are pinned by ``tests/ranks/lightning_compat/test_launchers.py`` (2.5, 2.6).
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, NoReturn

import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ParallelStrategy

__all__ = [
    "GRACE_S",
    "ProcessLauncher",
    "TolerantProcessLauncher",
    "TolerantScriptLauncher",
    "end_stopped_children",
    "launched_by_us",
]

_LOG = logging.getLogger(__name__)

GRACE_S = 5.0
"""What ranks get to end by themselves, and to say why, before they are killed [s]."""

_POLL_S = 0.2  # only where the system cannot tell at once that a process has ended
_ANSWER_S = 10.0  # for rank 0 to say whether a death is tolerated
_LEFT_BEHIND = 75  # exit code of a rank without which the others have gone on (sysexits.h: a temporary failure)
_PARENT = "LIGHTNING_HETERO_LAUNCHER_PID"  # tells a child of the script launcher who its parent must be


class TolerantScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further local rank, like Lightning's; this process is local rank 0.

    Args:
        cluster_environment, num_processes, num_nodes: as Lightning's.
        tolerates: whether the run would now go on without a worker; called from another thread.

    Attributes:
        tolerated: local ranks whose death was tolerated.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        tolerates: Callable[[], bool],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.tolerates = tolerates
        self.tolerated: set[int] = set()

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the other local ranks, if nobody else does, and calls ``function`` in this one."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self.tolerated = set()
            with _environment_variable(_PARENT, str(os.getpid())):
                self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with self._watching_children(), _ending_with_parent(), _ending_alone(launched_by_us()):
            return function(*args, **kwargs)

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
            watch.join()
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
                left_behind = proc.returncode == _LEFT_BEHIND
                if left_behind or (proc.returncode < 0 and failed_at_s is None and self._tolerates()):
                    self.tolerated.add(rank)
                    _note_death(rank, proc.returncode)
                elif failed_at_s is None:
                    failed_at_s = time.monotonic()
                    _LOG.error("local rank %d ended with code %d; everybody ends", rank, proc.returncode)
            if failed_at_s is not None and time.monotonic() - failed_at_s >= GRACE_S:
                self._kill_all(procs)
                return
            if not left and failed_at_s is None:
                return
            _wait_for_an_end(left if failed_at_s is None else [], told)

    def _tolerates(self) -> bool:
        with suppress(Exception):  # asked while the strategy is being torn down
            return self.tolerates()
        return False

    @staticmethod
    def _kill_all(procs: list[subprocess.Popen]) -> None:
        """As Lightning: SIGKILL, because a rank inside a collective does not react to anything milder."""
        for proc in list(procs):
            with suppress(OSError):
                proc.kill()
        if procs:  # still ours to watch
            os.kill(os.getpid(), signal.SIGKILL)


def end_stopped_children(launcher: _SubprocessScriptLauncher) -> None:
    """Has children of this launcher that are stopped when this process ends killed: nobody else will wake or end them.

    Children that run end by themselves, whatever this process ended with.
    """
    owner, known = os.getpid(), weakref.ref(launcher)

    def end() -> None:
        if os.getpid() != owner or (launcher := known()) is None:
            return
        for rank, proc in enumerate(launcher.procs, 1):
            if proc.poll() is None and _state(proc.pid) == b"T":
                print(f"local rank {rank} is stopped, and local rank 0 ends: it is killed", file=sys.stderr, flush=True)
                with suppress(OSError):
                    proc.kill()

    atexit.register(end)


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's, whose local rank 0 fails when it is told to end (SIGTERM).

    Lightning's own ends without a result and with exit code 0, and the process that launched it waits for the result.

    Private: ``_wrapping_function``, which runs in each process.
    """

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except SIGTERMException as error:
            if process_idx:
                raise
            raise RuntimeError("SIGTERM: training was told to end, and has ended before its time") from error


class TolerantProcessLauncher(ProcessLauncher):
    """Starts every local rank as a process of ``multiprocessing`` and waits for them, like Lightning's.

    Args:
        strategy, start_method: as Lightning's.
        tolerates: whether the run would now go on without a worker; asked in local rank 0, from another thread.

    Attributes:
        tolerated: local ranks whose death was tolerated.
    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Any = "spawn", *, tolerates: Callable[[], bool]
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self.tolerates = tolerates
        self.tolerated: set[int] = set()

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls ``function`` in every local rank; returns what rank 0's returned.

        Raises:
            torch.multiprocessing.ProcessRaisedException: a rank failed; with its traceback.
            torch.multiprocessing.ProcessExitedException: a rank died whose death is not tolerated.
        """
        # As Lightning's up to the join, which ends everybody when one process has failed.
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method == "spawn":
            _check_missing_main_guard()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                "trainer.fit() a second time on the same Trainer is not possible with a strategy that spawns its"
                " processes; make a new Trainer and pass fit(ckpt_path=...)"
            )
        environment = self._strategy.cluster_environment
        assert environment is not None
        os.environ["MASTER_PORT"] = str(environment.main_port)
        self.tolerated = set()
        context = mp.get_context(self._start_method)
        results = context.SimpleQueue()
        questions, answers = context.Pipe()
        given = [trainer, function, args, kwargs, results]
        if self._start_method == "spawn":
            given.append(_GlobalStateSnapshot.capture())
        else:
            given.append(None)
        with questions:
            with answers:
                processes: Any = mp.start_processes(
                    self._run_rank,
                    args=(answers, *given),
                    nprocs=self._strategy.num_processes,
                    start_method=self._start_method,
                    join=False,
                )
            self.procs = processes.processes
            self._join(processes, questions)
        output = results.get()
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _run_rank(self, local_rank: int, answers: Connection, *given: Any) -> None:
        """One rank's process. Local rank 0 answers whether a death is tolerated: the server is its child."""
        if local_rank == 0:
            threading.Thread(target=self._answer, args=(answers,), name="tolerance", daemon=True).start()
        else:
            answers.close()
        with _ending_alone(local_rank > 0):
            try:
                self._wrapping_function(local_rank, *given)
            except BaseException as error:
                # Lightning calls this in the process that launches, which knows nothing of the run; ranks must hear.
                self._strategy.on_exception(error)
                raise

    def _answer(self, answers: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                question = answers.recv_bytes()
                try:
                    tolerates = self.tolerates()
                except Exception:  # asked while the strategy is being torn down
                    tolerates = False
                answers.send_bytes(question + (b"1" if tolerates else b"0"))

    def _join(self, processes: Any, questions: Connection) -> None:
        """Waits for all ranks; raises what torch raises for the first failure that is not tolerated."""
        while processes.sentinels:
            others_only = 0 not in processes.sentinels.values()
            ended: list[Any] = wait(list(processes.sentinels), GRACE_S if others_only else None)
            if not ended:
                self._end_stopped(processes)
            for sentinel in ended:
                rank = processes.sentinels[sentinel]
                process = processes.processes[rank]
                process.join()
                code = process.exitcode
                left_behind = rank > 0 and (code == _LEFT_BEHIND or rank in self.tolerated)
                killed = code < 0 and rank > 0 and not left_behind
                if code and not left_behind and not (killed and _tolerated(questions, processes.processes[0])):
                    self._end_all(processes, sentinel)
                del processes.sentinels[sentinel]
                if code:
                    self.tolerated.add(rank)
                    _note_death(rank, code)

    def _end_stopped(self, processes: Any) -> None:
        """Rank 0 has come to the end: nobody waits for a rank that is stopped (SIGSTOP), perhaps for ever."""
        for rank in processes.sentinels.values():
            if _state(processes.processes[rank].pid) == b"T":
                self.tolerated.add(rank)
                processes.processes[rank].kill()

    @staticmethod
    def _end_all(processes: Any, failed: Any) -> NoReturn:
        others = [s for s in processes.sentinels if s != failed]
        deadline = time.monotonic() + GRACE_S
        while others and (left_s := deadline - time.monotonic()) > 0:
            ended = wait(others, left_s)
            others = [s for s in others if s not in ended]
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join()
        cause = next((s for s in [failed, *processes.sentinels] if _has_cause(processes, s)), failed)
        for sentinel in [s for s in processes.sentinels if s != cause]:
            del processes.sentinels[sentinel]
        processes.join()  # raises for the one that is left, with its traceback
        raise AssertionError("unreachable: torch raises for a process that has failed")


def _has_cause(processes: Any, sentinel: Any) -> bool:
    """Whether this process has left a traceback of its own, and not only heard from the server of another's failure."""
    try:
        with open(processes.error_files[processes.sentinels[sentinel]], "rb") as file:
            return RemoteFailureError.__name__.encode() not in file.read()
    except OSError:
        return False


def _tolerated(questions: Connection, rank_zero: Any) -> bool:
    """Asks local rank 0; if it does not answer in time, no. What it says later is about an earlier death."""
    question, deadline_s = os.urandom(8), time.monotonic() + _ANSWER_S
    with suppress(EOFError, OSError):
        questions.send_bytes(question)
        while questions in wait([questions, rank_zero.sentinel], max(0.0, deadline_s - time.monotonic())):
            answer = questions.recv_bytes()
            if answer[:-1] == question:
                return answer[-1:] == b"1"
    return False


def _note_death(local_rank: int, code: int) -> None:
    if code == _LEFT_BEHIND:
        _LOG.info("local rank %d was left behind, and has ended", local_rank)
        return
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    _LOG.info("local rank %d was killed by %s; the others go on without it", local_rank, name)


def _wait_for_an_end(procs: list[subprocess.Popen], told: Connection | None = None) -> None:
    """Returns soon after one of the processes has ended, or ``told`` is readable; sometimes earlier."""
    numbers: list[int] = []
    others = [] if told is None else [told]
    try:
        seen = bool(procs) and hasattr(os, "pidfd_open")
        with suppress(OSError):  # ended a moment ago
            for proc in procs if seen else ():
                numbers.append(os.pidfd_open(proc.pid))
            # Now and then in any case, to notice that `procs` was emptied.
            _sleep_until([*numbers, *others], 10 * _POLL_S if seen else _POLL_S)
    finally:
        for number in numbers:
            os.close(number)


def _sleep_until(readable: list[Any], most_s: float) -> None:
    if readable:
        wait(readable, most_s)
    else:
        time.sleep(most_s)


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    """Set for children started inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _ending_alone(applies: bool) -> Iterator[None]:
    """In a rank that the others have left behind: it ends, which does not end them."""
    try:
        yield
    except LeftBehindError as error:
        if not applies:
            raise
        traceback.print_exc()
        raise SystemExit(_LEFT_BEHIND) from error


def _state(pid: int) -> bytes:
    """Returns the letter of the process's state, "T": stopped; empty if that cannot be told."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # of another user, or a system without /proc
        return file.read().rpartition(b")")[2].split()[0]
    return b""


def _has_ended(pid: int) -> bool:
    """Whether there is no such process, or one that only waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user by now
        return False
    return _state(pid) == b"Z"


def launched_by_us() -> bool:
    """Whether this process is a child of `TolerantScriptLauncher`."""
    return _PARENT in os.environ


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    """In a child of the script launcher: if local rank 0 dies, so does this process, unless it finishes soon.

    Nobody else would notice: the parameter server goes on without rank 0, and the user believes that all is over.
    """
    parent, launched = os.getppid(), os.environ.get(_PARENT)
    if launched != str(parent):
        if launched is not None and _has_ended(int(launched)):
            raise RuntimeError(
                "local rank 0, which started this process, has ended before this one was ready to train: its own error"
                " is above"
            )
        yield  # somebody else's child, perhaps of one of ours
        return
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_S):
            if os.getppid() != parent:
                if not finished.wait(GRACE_S):
                    rank = os.environ.get("LOCAL_RANK", "?")
                    sys.stderr.write(f"local rank 0 is gone; local rank {rank} ends, too\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
