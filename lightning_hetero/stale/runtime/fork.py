"""The server's process: forked from local rank 0, so that it inherits the user's optimizers as they are (layer T).

    local rank 0                                   server process
    fork_server(body) -- fork -------------------> body(ready, orphaned)
                      <-- details, as JSON -------   ready(details): it serves
    lifeline, held open ------------------------->   orphaned(): rank 0 let go of it, or died
    ServerProcess.stop() <-- exit code -----------   ends when its clients are gone

A fork needs no pickling: optimizers of any class work, also from a script without ``if __name__ == "__main__"``. Its
price is what a fork inherits. The child therefore gives up everything that is not its own: sockets and stores of
the rank (a peer that waits for a dead rank must not be kept waiting by a copy of its socket), devices, signal handlers,
the terminal, threads' locks as far as they can be known, and every exit hook.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from lightning_hetero.measure.device import no_device_in_this_process
from lightning_hetero.transport.awake import awake_s

Body = Callable[[Callable[..., None], Callable[[], bool]], None]

_FIRST_TRY_S = 10.0  # a child that hangs in a lock it inherited does so at once; a second fork rarely hits it again
_END_S = 1.0  # for a child that has said that it failed to be gone
_LOOK_S = 1.0  # at the parent and at the main thread, by the thread that watches both
_STUCK_S = 30.0  # without a parent and without a sign of life
_KILLED_S = 10.0  # for a killed process to be gone
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class ServerProcess:
    """The parent's handle of a forked server.

    Usable from several threads. In other processes that hold a copy (forked data loader workers) it does nothing.

    Attributes:
        pid: of the child.
        details: what the child reported when it was ready.
    """

    def __init__(self, pid: int, lifeline: int) -> None:
        self.pid = pid
        self.details: dict[str, Any] = {}
        self._lifeline: int | None = lifeline
        self._owner = os.getpid()
        self._code: int | None = None
        self._lock = threading.Lock()

    def exit_code(self) -> int | None:
        """Returns None while it runs, then its exit code; minus the signal's number if a signal ended it."""
        with self._lock:
            if self._code is None and os.getpid() == self._owner:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid == self.pid:
                        self._code = os.waitstatus_to_exitcode(status)
                except ChildProcessError:  # SIGCHLD is ignored: nobody can know; as subprocess does
                    self._code = 0
            return self._code

    def ends_within(self, timeout_s: float) -> bool:
        """Waits; returns whether the server has ended."""
        end_s, pause_s = awake_s() + timeout_s, 0.0005
        while self.exit_code() is None:
            if awake_s() >= end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(0.02, 2 * pause_s)
        return True

    def stop(self, timeout_s: float) -> int | None:
        """Waits until the server ends on its own, then kills it; idempotent.

        Args:
            timeout_s: how long to wait before SIGKILL; it ignores what can be ignored.

        Returns:
            The exit code; None in a process that is not the parent, or if the system does not let go of it.
        """
        if os.getpid() != self._owner:
            return None
        self.release()
        if not self.ends_within(timeout_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not reaped, so the number is still this child's
            self.ends_within(_KILLED_S)
        return self.exit_code()

    def release(self) -> None:
        """Tells the child that the parent is done, and leaves it to those whom it serves; idempotent."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            with contextlib.suppress(OSError):
                os.write(lifeline, b".")  # a byte, because a forked worker may hold a copy of the pipe
            os.close(lifeline)


class Watched(NamedTuple):
    """How a child is watched that serves.

    Attributes:
        word: returns what changes whenever the main thread goes on.
        hangs: tells those whom it serves that it has not for so long [s]; returns the words. Called from another
            thread, before the child ends.
        patience_s: so long.
    """

    word: Callable[[], int]
    hangs: Callable[[float], str]
    patience_s: float


def fork_server(body: Body, *, keep: Sequence[int], ready_timeout_s: float = 30.0) -> ServerProcess:
    """Forks a child that runs ``body`` and returns when it is ready.

    Args:
        body: ``body(ready, orphaned)`` runs in the child; it calls ``ready(details)`` (a JSON object), or
            ``ready(details, watched)`` with a `Watched`, once it serves. ``orphaned()`` says whether the parent is
            gone or has called `ServerProcess.stop`. The child ends when ``body`` returns (exit code 0) or raises
            (traceback on the screen, exit code 1). It also ends, with the stacks of its threads on the screen, when it
            neither shows progress nor asks ``orphaned()`` for its patience, or for half a minute when the parent is
            gone: what it is at, e.g. a collective inside an optimizer's step, will never end.
        keep: file descriptors that stay open in the child; all others from 3 on are closed there (their numbers stay
            taken, so that a forgotten file object of the parent can never write into a socket of the child).
        ready_timeout_s: how long the child may take to be ready [s].

    Raises:
        RuntimeError: this system cannot fork, or the child failed or hung; the message says what to do.
    """
    if not hasattr(os, "fork"):
        raise RuntimeError("the parameter server is forked from rank 0; this system cannot fork, use Linux or macOS")
    waits_s = (min(_FIRST_TRY_S, ready_timeout_s), ready_timeout_s)
    for wait_s in waits_s:
        try:
            return _fork_once(body, keep, wait_s)
        except TimeoutError:
            continue
    raise RuntimeError(
        f"the parameter server was forked twice and was not ready within {waits_s[0]:g} s and {waits_s[1]:g} s."
        " Usually another thread of rank 0 held a lock at the moment of the fork: start threads (loggers, profilers,"
        " data services) after training has begun, set OMP_NUM_THREADS=1, or give an overloaded machine more time"
    )


# ---- the parent's side ----------------------------------------------------------------------------------------


def _fork_once(body: Body, keep: Sequence[int], wait_s: float) -> ServerProcess:
    parent = os.getpid()
    news, report = os.pipe()
    lifeline_end, lifeline = os.pipe()
    try:
        pid = _fork(lambda: _child(body, parent, report, lifeline_end, keep))
    finally:
        os.close(report)
        os.close(lifeline_end)
    process = ServerProcess(pid, lifeline)
    try:
        with open(news) as file:
            if not _readable(news, wait_s):
                raise TimeoutError
            answer = json.loads(file.readline() or "{}")
    except BaseException:
        process.stop(0.0)
        raise
    if "ready" in answer:
        process.details = answer["ready"]
        return process
    code = process.stop(_END_S)
    if "failed" in answer:
        raise RuntimeError(f"the parameter server could not start: {answer['failed']} (its traceback is above)")
    raise RuntimeError(f"the parameter server ended with code {code} before it was ready")


def _fork(child: Callable[[], NoReturn]) -> int:
    """Forks; no signal is handled between the fork and the child's own settings."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # what is buffered now would be printed twice
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on. True, and the reason for the second try.
            warnings.filterwarnings("ignore", r".*use of fork\(\) may lead to deadlocks", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            child()
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _readable(number: int, timeout_s: float) -> bool:
    poll = select.poll()  # unlike select, knows numbers above 1023
    poll.register(number, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


# ---- the child's side -----------------------------------------------------------------------------------------


def _child(body: Body, parent: int, report: int, lifeline_end: int, keep: Sequence[int]) -> NoReturn:
    """Everything of the child; never returns, and leaves without any exit hook of the parent."""
    code = 1
    try:
        gc.freeze()  # a collection must not finalise what belongs to the parent, e.g. join its threads
        no_device_in_this_process()
        _drop_inherited({report, lifeline_end, *keep})
        _reset_signals()
        with contextlib.suppress(OSError):
            os.setsid()  # Ctrl-C and a closed terminal end the ranks, and the server with them, in order
        torch.set_num_threads(1)

        def alone() -> bool:
            # The pipe tells in time; the parent's id tells even if a forked worker of it holds the other end.
            return os.getppid() != parent or _readable(lifeline_end, 0.0)

        watch = _Watch(alone)

        def ready(details: dict[str, Any], watched: Watched = watch.watched) -> None:
            watch.watched = watched
            _tell(report, {"ready": details})

        try:
            body(ready, watch.orphaned)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            with contextlib.suppress(OSError):  # it was ready: nobody reads this
                _tell(report, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(code)


class _Watch:
    """Ends a child whose main thread shows no life, whatever that is at.

    Not at once, even if the parent is gone: workers may live on without rank 0, and a large update takes its time.

    Args:
        alone: whether the parent is gone.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone, self._asked = alone, 0
        self.watched = Watched(int, "the parameter server has hung for {:.0f} s".format, math.inf)
        threading.Thread(target=self._run, name="main-watch", daemon=True).start()

    def orphaned(self) -> bool:
        """Whether the parent is gone; asked by the main thread."""
        self._asked += 1
        return self._alone()

    def _run(self) -> None:
        before, since_s, limit_s = None, awake_s(), math.inf
        while awake_s() - since_s < limit_s:
            time.sleep(_LOOK_S)
            now = alone, _, _ = self._alone(), self._asked, self.watched.word()
            if now != before:
                before, since_s = now, awake_s()
            limit_s = min(self.watched.patience_s, _STUCK_S if alone else math.inf)
        with contextlib.suppress(BaseException):
            faulthandler.dump_traceback(2)
            said = self.watched.hangs(awake_s() - since_s)
            print(f"{said}. It ends; above is where its threads are", file=sys.stderr, flush=True)
        os._exit(1)


def _tell(report: int, message: dict[str, Any]) -> None:
    os.write(report, f"{json.dumps(message)}\n".encode())


def _drop_inherited(keep: set[int]) -> None:
    """Closes inherited files; each number stays taken by the null device. Output goes straight to the screen."""
    null = os.open(os.devnull, os.O_RDWR)
    listing = "/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"
    for number in map(int, os.listdir(listing)):
        if number not in keep and number not in (null, 1, 2):
            with contextlib.suppress(OSError):
                os.dup2(null, number, inheritable=False)
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(null, number)
    # What stands in their place may be a notebook's or a test runner's object with a thread in the parent.
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if faulthandler.is_enabled():
        faulthandler.enable(2)


def _reset_signals() -> None:
    """No handler of the parent runs here, and what a scheduler or a terminal sends to all is the ranks' business.

    The server ends with its rank, which handles the signal: SLURM's requeue saves a checkpoint first, and needs it.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
