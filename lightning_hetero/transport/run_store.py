"""The store of a run: written by its ranks alone, and asked without waiting for ever (layer T).

Any process that reaches the port of a store of torch's may read and write it. So the ranks share a secret, which one of
them has given out over the process group, and sign what they write. A record that is not signed is none.

Stores of torch.distributed through which ranks find each other.

Connections that ranks keep open to the host of their meetings: one that ends says that its process has.

A rank that is killed is known at once, not after its silence. A line carries nothing but the rank's token, which the
run's store, whose records are signed, has, too: others may connect, and are not listened to.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import HashStore, Store, TCPStore

from lightning_hetero.transport.awake import Aside
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.transport.sockets import FOREVER

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


_DIGEST = "sha256"
_SIGN_BYTES = 64  # of hexadecimal digits


class SilentError(RuntimeError):
    """The process that hosts the store does not answer."""


class SignedStore:
    """A store of torch's whose records are signed with the secret of the run.

    Args:
        store: where they are.
        secret: known to the ranks of the run alone.

    Raises (all methods):
        RuntimeError: the store's host is gone.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store: Any = store  # torch's stubs do not know that values may be bytes
        self._secret = secret

    def set(self, key: str, value: str) -> None:
        """Writes a record."""
        self._store.set(key, self._sign(key, value) + value)

    def get(self, key: str) -> str | None:
        """Returns a record; None: this run has no such record."""
        if not self._store.check([key]):
            return None
        try:
            record: bytes = self._store.get(key)
            sign, value = record[:_SIGN_BYTES].decode(), record[_SIGN_BYTES:].decode()
        except UnicodeDecodeError:
            return None
        return value if hmac.compare_digest(sign, self._sign(key, value)) else None

    def has(self, key: str) -> bool:
        """Whether there is a record of this run."""
        return self.get(key) is not None

    def first(self, key: str, value: str) -> str:
        """Writes a record unless there is one; returns the one that holds."""
        self._store.compare_set(key, "", self._sign(key, value) + value)
        if (holds := self.get(key)) is None:  # a stranger's
            self.set(key, value)
            holds = value
        return holds

    def delete(self, key: str) -> None:
        """Takes a record away."""
        self._store.delete_key(key)

    def say(self, key: str) -> None:
        """Tells those who `wait` for it."""
        self._store.set(f"{key}/{self._sign(key, '')}", "")

    def wait(self, key: str) -> None:
        """Returns when somebody of the run says that, however long it takes."""
        self._store.wait([f"{key}/{self._sign(key, '')}"], FOREVER)

    def _sign(self, key: str, value: str) -> str:
        return hmac.new(self._secret, f"{key}\n{value}".encode(), _DIGEST).hexdigest()


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a rank that joins finds the store of the run.

    Attributes:
        host, port: of the store.
        rank: of the process that hosts it, global.
        secret: of the run, as hexadecimal digits.
    """

    host: str
    port: int
    rank: int
    secret: str = field(repr=False)


class RunStore:
    """A signed store whose host may be stopped: what is asked is asked from a thread that is left alone then.

    Torch waits for the host of a store without end, whatever its timeout. A thread whose wait has failed stays where
    it is, and with it torch's lock on this connection: nobody asks again.

    Args:
        store, secret: see `SignedStore`; no store: this rank has no part in it.
        answer_s: how long the host may be silent [s].
        address: for ranks that join.
        hosts: whether the store is in this process.

    Attributes:
        address, hosts: as given.
        rank: of the process that hosts it, global.
    """

    def __init__(
        self, store: Store | None, secret: bytes, *, answer_s: float = 1800.0, address: StoreAddress | None = None,
        hosts: bool = False,
    ) -> None:  # fmt: skip
        self._signed = None if store is None else SignedStore(store, secret)
        self._answer_s, self.address, self.hosts = answer_s, address, hosts
        self.rank = 0 if address is None else address.rank
        self._silent_s = 0.0

    @classmethod
    def of_all(cls, channel: SideChannel, host: str, timeout: timedelta, *, rank: int | None = None) -> RunStore:
        """Returns the store of the ranks of a channel, hosted by its first one, which must live longest; a collective.

        Args:
            channel: over all ranks.
            host: address of this rank's machine; on a loopback address nobody else can connect.
            timeout: of the store's own operations, and of its host's silence.
            rank: this process, global; None: as in the channel.
        """
        if channel.world_size == 1:
            return cls(HashStore(), b"", answer_s=timeout.total_seconds())
        hosted = host_store(host, timeout) if channel.rank == 0 else None
        said = None if hosted is None else StoreAddress(
            host, hosted.port, channel.rank if rank is None else rank, secrets.token_hex(32)
        )
        return cls.join(channel.all_gather_object(said)[0], timeout, hosted)

    @classmethod
    def join(cls, address: StoreAddress | None, timeout: timedelta, hosted: Store | None = None) -> RunStore:
        """Returns the store of a run that others have begun.

        Args:
            address: of the store; None: nobody knows where it is, and this rank has no part in it.
            timeout: see `of_all`.
            hosted: the store itself, if it is in this process.

        Raises:
            RuntimeError: nobody answers there.
        """
        if address is None:
            return cls(None, b"")
        store = hosted or reach_store(address.host, address.port, timeout)
        return cls(
            store, bytes.fromhex(address.secret), answer_s=timeout.total_seconds(), address=address,
            hosts=hosted is not None,
        )  # fmt: skip

    def ask(self, question: Callable[[SignedStore], T], answer_s: float | None = None) -> T:
        """Returns what a question gives.

        Args:
            question: asks the store, perhaps several times.
            answer_s: how long its host may be silent; None: as given at first [s].

        Raises:
            SilentError: it was.
            RuntimeError: the host is gone, or this rank has let go of the store.
        """
        store = self._signed
        if store is None:
            raise RuntimeError("this rank has left the run")
        wait_s = self._answer_s if answer_s is None else answer_s
        if not self._silent_s:
            aside = Aside(lambda: question(store), "run-store")
            if aside.ends_within(wait_s):
                return aside.result()
            self._silent_s = wait_s
        raise SilentError(
            f"the run's store has not answered for {self._silent_s:g} s: the process that holds it is stopped, or"
            " this rank is cut off from the network"
        )

    def reached(self, answer_s: float = 3.0) -> StoreAddress | None:
        """Returns its address for a rank that joins; None: its host is gone, or silent for so long."""
        with suppress(RuntimeError):
            self.ask(lambda store: store.get("reached"), answer_s)
            return self.address
        return None

    def wait(self, key: str) -> None:
        """Returns when somebody says that, however long it takes; meanwhile nothing else can be asked."""
        assert self._signed is not None
        self._signed.wait(key)

    @property
    def kept(self) -> object:
        """What keeps a store in this process open, also when it is let go of."""
        return self._signed

    def let_go(self) -> None:
        """Closes the connection; idempotent."""
        self._signed = None


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
