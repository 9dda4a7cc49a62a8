"""Each leak guard stays silent on a clean test, fails on a leak, and cleans it up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import guards

GUARDS = [
    guards.child_processes,
    guards.droppings,
    guards.environment,
    guards.listening_ports,
    guards.process_group,
    guards.process_state,
    guards.threads,
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_nothing_leaked_nothing_said(guard: Callable[[], AbstractContextManager[None]]) -> None:
    with guard():
        pass


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_KEPT", "old")
    with pytest.raises(guards.LeakError, match=r"HETERO_KEPT.*HETERO_NEW"), guards.environment():
        os.environ["HETERO_KEPT"] = "new"
        os.environ["HETERO_NEW"] = "1"
    assert os.environ["HETERO_KEPT"] == "old"
    assert "HETERO_NEW" not in os.environ


def test_tolerated_variables_are_put_back_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with guards.environment():
        os.environ["LOCAL_RANK"] = "3"
    assert "LOCAL_RANK" not in os.environ


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GRACE_S", 0.01)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(guards.LeakError, match="forgotten"), guards.threads():
        thread.start()
    stop.set()
    thread.join()


def test_process_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(guards.LeakError, match="process group"), guards.process_group():
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


def test_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GRACE_S", 0.01)
    with pytest.raises(guards.LeakError, match="import sys"), guards.child_processes():
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.wait() == -signal.SIGKILL
    assert child.stdin is not None
    child.stdin.close()


def test_listening_ports() -> None:
    server = socket.socket()
    with pytest.raises(guards.LeakError, match=r"127\.0\.0\.1"), guards.listening_ports():
        server.bind(("127.0.0.1", 0))
        server.listen()
    server.close()


def test_droppings(tmp_path: Path) -> None:
    with pytest.raises(guards.LeakError, match="lightning_logs"), guards.droppings(tmp_path):
        (tmp_path / "lightning_logs").mkdir()


def test_process_state_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with guards.process_state():
        first = torch.rand(3)
        torch.set_default_dtype(torch.float64)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert torch.get_default_dtype() is torch.float32
    assert signal.getsignal(signal.SIGTERM) is before
    with guards.process_state():
        assert torch.equal(torch.rand(3), first)


def test_tests_outside_pure_run_in_an_empty_folder() -> None:
    assert list(Path.cwd().iterdir()) == []
    assert not Path.cwd().is_relative_to(guards.REPOSITORY)
