"""A Python that has imported Lightning already: a script starts in it at once, not after three seconds.

    process = warm.start(["script.py", "--fast"], folder, environ, screen, screen)
    process.wait(60.0)  # `poll`, `wait`, `kill` and `pid` as of subprocess.Popen
    done = warm.run(["script.py"], folder, environ, 60.0)  # as subprocess.run

Each script runs in a fork of one process that did nothing but imports (`tests.preload`): as ``__main__``, with a
folder, an environment and a screen of its own, and with the end of any program, traceback and exit hooks included.
The first Pythons that a script starts by itself, as Lightning does its other ranks, are warm, too: true children of it,
forked before it began. They are those of `subprocess.Popen` with ``env`` and ``cwd`` at most, and those with which
`multiprocessing` spawns a process or a server of forks.
What it shares with its siblings, unlike programs that are started one by one, is the seed of Python's hashes.
A test of starting itself starts Python.
"""

from __future__ import annotations

import atexit
import fcntl
import io
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.01
_SPARES = 3  # as many as one program starts at a time
_MOST_FILES = 64
_ABOVE = 512  # numbers of files that nobody uses


class WarmProcess:
    """A running script, to be handled like a `subprocess.Popen`.

    Attributes:
        pid: its process id, which stays its own until `poll` or `wait` has told the end.
        returncode: None until then; minus the signal's number if a signal ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        return _wait(self, timeout)

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _wait(process: WarmProcess | subprocess.Popen[bytes], timeout: float | None) -> int:
    deadline = None if timeout is None else time.monotonic() + timeout
    while (code := process.poll()) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise subprocess.TimeoutExpired(f"warm process {process.pid}", timeout or 0.0)
        time.sleep(_POLL_S)
    return code


def start(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], stdout: int, stderr: int
) -> WarmProcess:
    """Starts a script.

    Args:
        command: file of the script, seen from the folder, or ``"-m"`` and a module's name; then its arguments.
        folder: where it works.
        environ: all of its environment. What is read by imports (OMP_NUM_THREADS) has been read: it was 1.
        stdout, stderr: descriptors of open files.
    """
    request = _request(command, folder, environ) | {"spares": _SPARES}
    return WarmProcess(_ask(request, stdout, stderr))


def run(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, and to the end of whoever else holds its screen, like `subprocess.run`.

    Raises:
        subprocess.TimeoutExpired: not within ``timeout`` seconds; the script is killed.
    """
    ends = [os.pipe() for _ in range(2)]
    process = start(command, folder, environ, ends[0][1], ends[1][1])
    for _, write in ends:
        os.close(write)
    said: list[list[str]] = [[], []]
    readers = [
        threading.Thread(target=_read, args=(os.fdopen(read), into), daemon=True)
        for (read, _), into in zip(ends, said, strict=True)
    ]
    deadline = time.monotonic() + timeout
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
    try:
        if any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(list(command), timeout)
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(list(command), process.wait(), "".join(said[0]), "".join(said[1]))


def pids() -> set[int]:
    """Returns the id of the process that starts all others, if it runs; leak guards leave it alone."""
    return {_python.pid} if _python is not None else set()


def close() -> None:
    """Ends it; `start` starts another when needed."""
    global _python, _line
    if _python is not None and _line is not None:
        _line.close()  # it ends with its line
        _python.wait()
        _python = _line = None


atexit.register(close)


# ---- this side ------------------------------------------------------------------------------------------------

_python: subprocess.Popen[bytes] | None = None
_line: socket.socket | None = None
_turn = threading.Lock()


def _ask(request: dict[str, Any], *files: int) -> Any:
    with _turn:
        return _ask_alone(request, *files)


def _ask_alone(request: dict[str, Any], *files: int) -> Any:
    global _python, _line
    if _python is None or _line is None:
        _line, other = socket.socketpair()
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ |= {"OMP_NUM_THREADS": "1", "WARM_PATHS": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, __file__, str(other.fileno())]
        with other:
            _python = subprocess.Popen(
                command, cwd="/", env=environ, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )
    _send(_line, request, *files)
    answer, _ = _receive(_line)
    if not answer:
        raise RuntimeError(f"the process that starts scripts ended with code {_python.wait()}")
    return json.loads(answer)


def _request(command: Sequence[str], folder: Path | str, environ: Mapping[str, str]) -> dict[str, Any]:
    return {"command": list(command), "folder": str(folder), "environ": dict(environ)}


def _send(line: socket.socket, request: dict[str, Any], *files: int) -> None:
    message = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(line, [message], list(files))
    if sent < len(message):  # else the other side may have closed it already
        line.sendall(message[sent:])


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Returns one message, and the files that came with it; an empty one if the other side has gone."""
    message, files = b"", []
    while not message.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(line, 1 << 16, _MOST_FILES)
        files += more
        message += part
        if not part:
            return b"", files
    return message, files


def _read(file: IO[str], into: list[str]) -> None:
    with file:
        into.append(file.read())


# ---- the other side -------------------------------------------------------------------------------------------

_PATHS = sys.path[1:]  # what every Python has


def _serve(line: socket.socket) -> list[str] | None:
    """Starts what is asked for until nobody asks any more; in each child, returns the command to run."""
    while True:
        message, files = _receive(line)
        if not message:
            return None
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            line.close()
            return _become(request, files)
        for file in files:
            os.close(file)
        line.sendall(json.dumps(answer).encode() + b"\n")


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    for _ in range(request.get("spares", 0)):
        if (command := _spare(files)) is not None:
            return command
    if _spares:
        global _parent
        _parent = os.getpid()
        subprocess.Popen = _WarmPopen
        multiprocessing.util.spawnv_passfds = _spawn
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    numbers = [1, 2, *request.get("keep", ())]
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in files]  # out of the way of the numbers wanted
    for file in files:
        os.close(file)
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return request["command"]


_spares: list[tuple[int, socket.socket]] = []  # pid, and where it waits for what to become
_parent = 0  # pid of the process whose children they are


def _spare(files: list[int]) -> list[str] | None:
    """Forks a child that waits; in the child, returns the command to run when there is one, and ends without."""
    ours, its = socket.socketpair()
    if pid := os.fork():
        its.close()
        _spares.append((pid, ours))
        return None
    for line in (ours, *(line for _, line in _spares)):
        line.close()  # else those would not notice that the parent has gone
    _spares.clear()
    for file in files:
        os.close(file)  # nobody waits for the end of a screen because of this
    os.chdir("/")
    message, files = _receive(its)
    if not message:
        os._exit(0)
    its.close()
    return _become(json.loads(message), files)


class _WarmPopen(subprocess.Popen[bytes]):
    """In a script: a Python that it starts is one of its spare processes, as long as there are any."""

    def __init__(self, args: Any, **options: Any) -> None:
        self._spare_lock: threading.Lock | None = None  # None: a process like any other
        if not set(options) <= {"env", "cwd"} or not _is_script(args) or not _spares or os.getpid() != _parent:
            super().__init__(args, **options)
            return
        self.pid, line = _spares.pop(0)
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._spare_lock = threading.Lock()
        with line:
            folder, environ = os.path.abspath(options.get("cwd") or "."), options.get("env") or os.environ
            _send(line, _request(args[1:], folder, environ), 1, 2)

    def poll(self) -> int | None:
        if self._spare_lock is None:
            return super().poll()
        with self._spare_lock:
            if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(ended[1])
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._spare_lock is None:
            return super().wait(timeout)
        return _wait(self, timeout)

    def send_signal(self, sig: int) -> None:
        if self._spare_lock is None:
            super().send_signal(sig)
        elif self.poll() is None:
            os.kill(self.pid, sig)


_cold_spawn = multiprocessing.util.spawnv_passfds


def _spawn(path: Any, args: Sequence[Any], keep: Sequence[int]) -> int:
    """As of `multiprocessing`: starts ``args`` with the files to keep under their numbers; returns the process id."""
    command = list(args[args.index("-c") :]) if "-c" in args else ["-c", ""]
    ours = command[1].startswith(("from multiprocessing.spawn import", "from multiprocessing.forkserver import"))
    if not ours or not _spares or os.getpid() != _parent:
        return _cold_spawn(path, args, keep)
    pid, line = _spares.pop(0)
    numbers = sorted({*keep})
    with line:
        _send(line, _request(command, os.getcwd(), os.environ) | {"keep": numbers}, 1, 2, *numbers)
    return pid


def _is_script(args: Any) -> bool:
    return isinstance(args, list) and args[0] == sys.executable and (args[1] == "-m" or args[1].endswith(".py"))


def _paths(name: str) -> list[str]:
    return list(filter(None, os.environ.get(name, "").split(os.pathsep)))


def _play(command: list[str]) -> None:
    """Runs it as ``python *command`` would."""
    paths = _paths("PYTHONPATH")
    paths += [path for path in _PATHS if path not in paths]
    if command[0] == "-m":
        sys.argv, sys.path = command[1:], [os.getcwd(), *paths]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv, sys.path = ["-c", *command[2:]], ["", *paths]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(command[1], vars(main))
    else:  # not `runpy.run_path`, which shows the script another name of itself than Python does
        script = os.path.abspath(command[0])
        sys.argv, sys.path = command, [os.path.dirname(script), *paths]
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = script
        with io.open_code(script) as file:
            exec(compile(file.read(), script, "exec"), vars(main))


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), *_paths("WARM_PATHS")]
    from tests import preload  # noqa: F401

    if (command := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _play(command)
