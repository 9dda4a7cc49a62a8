"""Stores of torch.distributed through which ranks find each other (layer T)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

from lightning_hetero.transport.awake import Aside

T = TypeVar("T")


def host_store(host: str, timeout: timedelta, port: int = 0) -> TCPStore:
    """Returns a store hosted by this process; ``.port`` tells where.

    Args:
        host: address under which peers reach this machine. On a loopback address nobody else can connect.
        timeout: of the store's own operations.
        port: 0: any that is free.

    Raises:
        OSError, RuntimeError: the port is taken.
    """
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if host in ("localhost", "127.0.0.1"):
        listening = socket.create_server(("127.0.0.1", port))
        port = listening.getsockname()[1]
        return TCPStore("127.0.0.1", port, master_listen_fd=listening.detach(), **options)
    return TCPStore(host, port, **options)


def reach_store(host: str, port: int, timeout: timedelta = timedelta(seconds=60)) -> TCPStore:
    """Returns the store that another process hosts; ``timeout``: of its operations, and to find it.

    Raises:
        RuntimeError: nobody answers there.
    """
    options: dict[str, Any] = {"is_master": False, "timeout": timeout, "wait_for_workers": False}
    return _within(timeout.total_seconds(), lambda: TCPStore(host, port, **options))


class BoundedStore:
    """A store of torch's that others than the ranks may use: whatever it is asked ends within a bound.

    Torch waits for a store's host without end, whatever the timeout: while it is stopped, and while strangers'
    connections keep it busy.

    Args:
        reach: returns the store.
        answer_s: how long it may take to answer [s].

    Raises (all methods, which are the store's):
        RuntimeError: its host is gone, or silent.
    """

    def __init__(self, reach: Callable[[], Store], answer_s: float) -> None:
        self._answer_s = answer_s
        self._store = _within(answer_s, reach)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: _within(self._answer_s, lambda: getattr(self._store, name)(*args))


def _within(answer_s: float, question: Callable[[], T]) -> T:
    aside = Aside(question, "store")
    if not aside.ends_within(answer_s):
        raise RuntimeError(f"the store has not answered for {answer_s:g} s: its host is stopped or busy")
    return aside.result()
