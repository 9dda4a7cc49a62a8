"""A rank that was cut off from the server that it has started leaves it to the others, unless that has died."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.stale.fit import session as module
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.fork import ServerProcess, fork_server


class Cut:
    """A worker whose connection has ended while the process was not gone yet."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(close=lambda: None, left_behind=False, cut=True, hangs=False)

    def detach(self) -> None: ...


def serve(ready: Any, orphaned: Any) -> None:
    ready({})
    while not orphaned():
        pass


def closed(process: ServerProcess) -> None:
    session: Any = Session.__new__(Session)
    session.worker, session._process, session._pulse = Cut(), process, None
    session.close(patience_s=0.0)


def test_a_server_that_dies_just_now_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    process = fork_server(serve, keep=())
    ends_within = process.ends_within

    def killed_meanwhile(timeout_s: float) -> bool:
        if process.exit_code() is None:
            os.kill(process.pid, signal.SIGKILL)
        return ends_within(timeout_s)

    monkeypatch.setattr(process, "ends_within", killed_meanwhile)
    closed(process)
    assert process.exit_code() == -9


def test_a_server_that_lives_is_left_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DYING_S", 0.05)
    process = fork_server(serve, keep=())
    stopped: list[float] = []
    monkeypatch.setattr(process, "stop", stopped.append)
    closed(process)
    assert stopped == [] and process._lifeline is None
    monkeypatch.undo()
    assert process.stop(5.0) == 0
