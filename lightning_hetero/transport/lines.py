"""Connections that ranks keep open to the host of their meetings: one that ends says that its process has (layer T).

A rank that is killed is known at once, not after its silence. A line carries nothing but the rank's token, which the
run's store, whose records are signed, has, too: others may connect, and are not listened to.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from lightning_hetero.transport.run_store import SignedStore

_PORT, _LINE = "lines", "line/"
_TOKEN_BYTES = 32  # of hexadecimal digits
_STRANGERS = 64  # connections that have not said a token, at most
_CONNECT_S = 5.0
_ports: set[int] = set()
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_inherited(port: int) -> None:
    """Processes that are forked from now on leave a port on which this one listens to it: it may listen there again."""
    _ports.add(port)


def _close_inherited() -> None:
    """A DataLoader worker that was forked would hold its parent's line open after the parent's death."""
    for line in list(_open):
        line.close()
    for name in os.listdir("/proc/self/fd") if _ports and os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as held:
            listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and held.getsockname()[1] in _ports:
                os.close(int(name))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


class HostLines:
    """The host's ends.

    Args:
        host: address of this process's machine.
        store: of the run; told the port.
    """

    def __init__(self, host: str, store: SignedStore) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        _open.add(self._listener)
        self._new: list[socket.socket] = []
        self._of: dict[str, socket.socket] = {}
        store.set(_PORT, str(self._listener.getsockname()[1]))

    def ended(self, store: SignedStore, names: Iterable[str]) -> list[str]:
        """Returns which of these processes have ended, as far as their lines tell."""
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                line.setblocking(False)
                _open.add(line)
                self._new.append(line)
        names = list(names)
        if self._new:
            tokens = {store.get(f"{_LINE}{name}"): name for name in names if name not in self._of}
            self._new = [line for line in self._new if self._is_new(line, tokens)][-_STRANGERS:]
        return [name for name in names if name in self._of and _read(self._of[name], 1) == b""]

    def _is_new(self, line: socket.socket, tokens: dict[str | None, str]) -> bool:
        """Whether a line has still to say whose it is; what says nothing of use is a stranger's, and is let go of."""
        if (said := _read(line, _TOKEN_BYTES)) is None:
            return True
        if (name := tokens.get(said.decode(errors="replace"))) is not None:
            self._of[name] = line
        return False

    def close(self) -> None:
        """Ends all lines; idempotent."""
        for line in (self._listener, *self._of.values(), *self._new):
            line.close()


def _read(line: socket.socket, most: int) -> bytes | None:
    """Returns what has come; nothing if the line has ended; None: nothing has come."""
    try:
        return line.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def guest_line(host: str, name: str, ask: Callable[[Callable[[SignedStore], Any]], Any]) -> socket.socket | None:
    """Returns a line to the host, which is to be kept open; None: it takes none yet.

    Args:
        host: address of its machine.
        name: of this process.
        ask: asks the run's store.

    Raises:
        OSError: it cannot be reached.
    """
    token = secrets.token_hex(_TOKEN_BYTES // 2)

    def tell(store: SignedStore) -> str | None:
        store.set(f"{_LINE}{name}", token)
        return store.get(_PORT)

    if (port := ask(tell)) is None:
        return None
    line = socket.create_connection((host, int(port)), _CONNECT_S)
    _open.add(line)
    line.sendall(token.encode())
    return line
