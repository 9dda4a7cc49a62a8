"""The forked server: it inherits objects and nothing else, outlives its parent, and never becomes a zombie."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_hetero.stale.runtime import fork as process
from lightning_hetero.stale.runtime.fork import fork_server
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
Ready = Callable[[dict[str, Any]], None]
Orphaned = Callable[[], bool]


def until_let_go(ready: Ready, orphaned: Orphaned, **details: Any) -> None:
    ready(details)
    while not orphaned():
        time.sleep(0.002)


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return warm.run(["script.py"], folder, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, 60.0)


def test_it_reports_serves_and_is_reaped() -> None:
    server = fork_server(lambda r, o: until_let_go(r, o, port=7, ranks=[0, 1]), keep=[])
    assert server.details == {"port": 7, "ranks": [0, 1]}
    assert server.exit_code() is None and psutil.pid_exists(server.pid)
    assert os.getsid(server.pid) == server.pid != os.getsid(0)
    assert server.stop(20.0) == 0
    assert server.stop(20.0) == 0 and server.exit_code() == 0
    with pytest.raises(ChildProcessError):  # reaped
        os.waitpid(server.pid, 0)


def test_it_inherits_optimizers_that_no_pickle_could_carry() -> None:
    class Own(torch.optim.Adam):
        pass

    parameter = torch.nn.Parameter(torch.arange(4.0, dtype=torch.float64))
    optimizer = Own([parameter], lr=0.5)
    for _ in range(2):  # the state the fork finds; backward leaves threads of autograd behind
        optimizer.zero_grad()
        parameter.pow(2).sum().backward()
        optimizer.step()
    gradient = 2 * parameter.detach()

    def body(ready: Ready, orphaned: Orphaned) -> None:
        parameter.grad = gradient.clone()
        optimizer.step()
        until_let_go(ready, orphaned, values=parameter.tolist(), threads=torch.get_num_threads())

    server = fork_server(body, keep=[])
    assert server.stop(20.0) == 0
    parameter.grad = gradient.clone()
    optimizer.step()
    assert server.details == {"values": parameter.tolist(), "threads": 1}


def test_it_gives_up_the_files_of_the_parent_except_those_to_keep() -> None:
    ours, theirs = socket.socketpair()
    kept, peer = socket.socketpair()
    with ours, theirs, kept, peer:
        number = ours.fileno()

        def body(ready: Ready, orphaned: Orphaned) -> None:
            kept.sendall(b"from the child")
            os.write(number, b"into nothing")  # what a forgotten file object of the parent would do
            again = os.open("file", os.O_CREAT | os.O_RDWR)
            until_let_go(ready, orphaned, reused=again == number)

        server = fork_server(body, keep=[kept.fileno()])
        assert peer.recv(100) == b"from the child"
        ours.close()
        theirs.settimeout(20)
        assert theirs.recv(100) == b""  # the child holds no copy, so the end is seen
        assert server.details == {"reused": False}
        assert server.stop(20.0) == 0


def test_no_handler_of_the_parent_runs_in_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    sent = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda *_: ran.touch()) for number in sent}
    try:
        server = fork_server(until_let_go, keep=[])
        for number in sent:  # as a scheduler does to all processes of a job: its rank decides
            os.kill(server.pid, number)
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(server.pid).wait(0.2)
        assert server.stop(20.0) == 0 and not ran.exists()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_one_that_does_not_listen_is_ended() -> None:
    def deaf(ready: Ready, orphaned: Orphaned) -> None:
        ready({})
        threading.Event().wait()

    assert fork_server(deaf, keep=[]).stop(0.05) == -signal.SIGKILL
    for end in (signal.SIGSTOP, signal.SIGKILL):  # also by the system, e.g. for its memory
        server = fork_server(until_let_go, keep=[])
        os.kill(server.pid, end)
        assert server.stop(0.05) == -signal.SIGKILL


def test_one_that_hangs_ends_when_its_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an optimizer's step that waits for a collective: nobody asks whether the rank is there."""
    monkeypatch.setattr(process, "_LOOK_S", 0.01)
    monkeypatch.setattr(process, "_STUCK_S", 0.1)

    def hangs(ready: Ready, orphaned: Orphaned) -> None:
        ready({})
        threading.Event().wait()

    server = fork_server(hangs, keep=[])
    with pytest.raises(psutil.TimeoutExpired):  # as long as its rank lives it may take its time
        psutil.Process(server.pid).wait(0.3)
    server.release()
    wait_for(lambda: server.exit_code() is not None)
    assert server.exit_code() == 1


def test_one_that_shows_life_goes_on_without_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may live on."""
    monkeypatch.setattr(process, "_LOOK_S", 0.01)
    monkeypatch.setattr(process, "_STUCK_S", 0.5)

    def serves(ready: Ready, orphaned: Orphaned) -> None:
        ready({})
        asked = 0
        while asked < 200:
            asked += orphaned()
            time.sleep(0.005)

    server = fork_server(serves, keep=[])
    assert server.stop(20.0) == 0


def test_a_failure_before_it_is_ready_is_the_parents(capfd: pytest.CaptureFixture[str]) -> None:
    def body(ready: Ready, orphaned: Orphaned) -> None:
        raise ValueError("the area is too small")

    with pytest.raises(RuntimeError, match="could not start: ValueError: the area is too small"):
        fork_server(body, keep=[])
    said = capfd.readouterr().err
    assert "Traceback" in said and "the area is too small" in said

    with pytest.raises(RuntimeError, match="could not start: TypeError"):
        fork_server(lambda ready, orphaned: ready({"not": object()}), keep=[])
    with pytest.raises(RuntimeError, match="ended with code 0 before it was ready"):
        fork_server(lambda ready, orphaned: None, keep=[])
    with pytest.raises(RuntimeError, match="ended with code -9 before it was ready"):
        fork_server(lambda ready, orphaned: os.kill(os.getpid(), signal.SIGKILL), keep=[])


def test_one_that_hangs_is_forked_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_FIRST_TRY_S", 0.2)
    tried = tmp_path / "tried"

    def once(ready: Ready, orphaned: Orphaned) -> None:
        if not tried.exists():
            tried.write_text(str(os.getpid()))
            threading.Event().wait()
        until_let_go(ready, orphaned)

    server = fork_server(once, keep=[])
    assert server.exit_code() is None and not psutil.pid_exists(int(tried.read_text()))
    assert server.stop(20.0) == 0


def test_one_that_hangs_twice_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"forked twice .* 0\.1 s and 0\.1 s.* OMP_NUM_THREADS"):
        fork_server(lambda ready, orphaned: threading.Event().wait(), keep=[], ready_timeout_s=0.1)


def test_a_process_that_is_not_the_parent_does_nothing() -> None:
    server = fork_server(until_let_go, keep=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of this test itself, from Python 3.12 on
        stranger = mp.get_context("fork").Process(target=server.stop, args=(0.0,))
        stranger.start()
    stranger.join()
    assert stranger.exitcode == 0 and server.exit_code() is None
    assert server.stop(20.0) == 0


def test_exit_hooks_and_buffered_output_stay_the_parents(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
import atexit, multiprocessing.util, sys, threading, time
from lightning_hetero.stale.runtime.fork import fork_server
sys.stdout.write("buffered|")
log = open("log", "w"); log.write("once|")
atexit.register(print, "atexit")
multiprocessing.util.Finalize(None, print, args=("finalizer",), exitpriority=1)
end = threading.Event()
threading.Thread(target=end.wait).start()  # a shutdown of threading would join it
def body(ready, orphaned):
    ready({})
    print("child serves")
    while not orphaned(): time.sleep(0.01)
server = fork_server(body, keep=[])
assert server.stop(20.0) == 0
end.set()
print("parent ends")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["buffered|child serves", "parent ends", "atexit", "finalizer"]
    assert (tmp_path / "log").read_text() == "once|"


def test_it_outlives_a_killed_parent_and_knows(tmp_path: Path) -> None:
    """Also while a forked worker of the parent still holds the lifeline's other end."""
    done = script(
        tmp_path,
        """
import os, signal, time
from lightning_hetero.stale.runtime.fork import fork_server
def body(ready, orphaned):
    assert not orphaned()
    ready({})
    while not orphaned(): time.sleep(0.005)
    open("orphaned.part", "w").write(str(os.getpid()))
    os.rename("orphaned.part", "orphaned")
fork_server(body, keep=[])
if os.fork() == 0:
    while not os.path.exists("orphaned"): time.sleep(0.005)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int((tmp_path / "orphaned").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
