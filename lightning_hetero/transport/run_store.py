"""The store of a run: written by its ranks alone, and asked without waiting for ever (layer T).

Any process that reaches the port of a store of torch's may read and write it. So the ranks share a secret, which one of
them has given out over the process group, and sign what they write. A record that is not signed is none.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import HashStore, Store

from lightning_hetero.transport.awake import Aside
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.transport.sockets import FOREVER
from lightning_hetero.transport.store import host_store, reach_store

T = TypeVar("T")
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
