"""Workers as processes of one node: slots in shared memory, a unix socket as doorbell and sign of life (layer T).

    address, keep = listener.address, listener.fileno_list()     # rank 0, before it forks the server
    server:  listener.events() ...                               # in the forked child, which keeps those descriptors
    rank 0:  listener.detach()                                   # files stay, descriptors go
    workers: SharedMemoryLink(address, rank)

A worker's death is an EOF on its socket, or its pidfd where a forked child of its own still holds the socket.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from lightning_hetero.transport.base import (
    Alive,
    Arrived,
    Ask,
    Gone,
    Happened,
    Joined,
    Listener,
    Reply,
    Request,
    Say,
)
from lightning_hetero.transport.seqlock import ParameterArea, Slot, check_sizes
from lightning_hetero.transport.shared_memory.directory import (
    make_directory,
    map_parameters,
    map_slot,
    remove_directory,
)
from lightning_hetero.transport.shared_memory.link import SharedMemoryLink
from lightning_hetero.transport.shared_memory.state_file import StateFile
from lightning_hetero.transport.sockets import (
    HELLO,
    Hello,
    WireError,
    open_pidfd,
    payload_size,
    peer_credentials,
    send_some,
)

__all__ = ["SharedMemoryLink", "SharedMemoryListener"]

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0  # who connects and says nothing is dropped
_READ_BYTES = 1 << 18


class SharedMemoryListener(Listener):
    """The server's end; made by `create`, in the process that forks the server or in the server itself.

    Memory is mapped and the selector made at first use, so a fork in between is safe.

    Attributes:
        address: what workers need: the folder and a token.
    """

    def __init__(
        self, folder: Path, lock: int, ranks: Iterable[int], slot_bytes: int, parameter_bytes: int
    ) -> None:
        self._folder, self._lock = folder, lock
        self._token = secrets.token_bytes(16)
        self.address = f"{folder}#{self._token.hex()}"
        self.ranks = frozenset(ranks)
        self._slot_bytes, self._parameter_bytes = slot_bytes, parameter_bytes
        self._state = StateFile(folder)
        self._door = _listening(folder / "control")
        self._bell_in, self._bell_out = os.pipe()
        os.set_blocking(self._bell_in, False)
        os.set_blocking(self._bell_out, False)
        self._selector: selectors.BaseSelector | None = None
        self._slots: dict[int, Slot] = {}
        self._parameters: ParameterArea | None = None
        self._peers: set[_Peer] = set()
        self._workers: dict[int, _Peer] = {}
        self._happened: list[Happened] = []
        self._woken = False
        self._open = True

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str] | None = None,
        *,
        ranks: Iterable[int],
        slot_bytes: int,
        parameter_bytes: int,
    ) -> SharedMemoryListener:
        """Makes folder, files and socket; workers may connect from now on.

        Args:
            directory: the folder to make our own (0700) in; None: /dev/shm, XDG_RUNTIME_DIR or the temporary folder.
            ranks: the workers of this node.
            slot_bytes: size of each worker's slot.
            parameter_bytes: size of the parameters.

        Raises:
            ValueError: a size is not positive, ranks are none or negative, or the folder's path is too long.
            OSError: no room for the files.
        """
        check_sizes(slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
        ranks = sorted(set(ranks))
        if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ValueError(f"ranks={ranks!r} must be whole numbers >= 0, at least one")
        files = {f"slot-{rank}": Slot.size(slot_bytes) for rank in ranks}
        files["parameters"] = ParameterArea.size(parameter_bytes)
        folder, lock = make_directory(directory, files)
        try:
            return cls(folder, lock, ranks, slot_bytes, parameter_bytes)
        except BaseException as error:
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and "too long" in str(error):
                raise ValueError(
                    f"{folder} is too long for a unix socket: name a folder with a shorter path"
                ) from error
            raise

    # ---- across the fork ----------------------------------------------------------------------------------

    def fileno_list(self) -> list[int]:
        """Returns the descriptors a forked server must keep open, before `events` was ever called."""
        return [self._lock, self._door.fileno(), self._bell_in, self._bell_out]

    def detach(self) -> None:
        """Lets go of everything without removing it: for the parent, once the forked server has taken over."""
        self._shut()

    # ---- the server's thread ------------------------------------------------------------------------------

    def events(self, timeout_s: float | None) -> list[Happened]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        selector = self._started()
        while True:
            rest_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            waited = 0.0 if self._happened else rest_s
            if any(peer.rank is None for peer in self._peers):
                waited = min(HELLO_TIMEOUT_S, HELLO_TIMEOUT_S if waited is None else waited)
            for key, mask in selector.select(waited):
                if isinstance(key.data, _Peer):
                    self._serve(key.data, mask, ended=key.fd == key.data.pidfd)
                else:
                    key.data()
            self._drop_mute()
            if self._happened or self._woken or (deadline is not None and time.monotonic() >= deadline):
                happened, self._happened, self._woken = self._happened, [], False
                return happened

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._bell_out, b"!")

    def reply(self, rank: int, reply: Reply) -> None:
        if (peer := self._workers.get(rank)) is not None:
            self._send(peer, reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        if rank not in self._slots:
            if rank not in self.ranks:
                raise ValueError(f"rank={rank} has no slot here, only {sorted(self.ranks)}")
            self._slots[rank] = map_slot(self._folder, rank, self._slot_bytes)
        return self._slots[rank].check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        if self._parameters is None:
            self._parameters = map_parameters(self._folder, self._parameter_bytes)
        self._parameters.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        self._state.write(data)

    def disconnect(self, rank: int) -> None:
        if (peer := self._workers.get(rank)) is not None:
            self._drop(peer, "disconnected by the server")

    def dismiss(self, rank: int, reason: str) -> None:
        if (peer := self._workers.get(rank)) is not None:
            self._send(peer, Reply(kind=Say.LEFT, text=reason))  # stays to be read when the connection is closed
            self._drop(peer, reason)

    def remove(self) -> None:
        """Removes the files; what has been mapped stays usable. From any thread."""
        remove_directory(self._folder)

    def close(self) -> None:
        if self._open:
            self.remove()
            self._shut()

    # ---- connections --------------------------------------------------------------------------------------

    def _started(self) -> selectors.BaseSelector:
        if not self._open:
            raise RuntimeError("this listener is closed, or detached in favour of a forked server")
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._door, selectors.EVENT_READ, self._accept)
            self._selector.register(self._bell_in, selectors.EVENT_READ, self._answer_bell)
        return self._selector

    def _answer_bell(self) -> None:
        self._woken = True
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell_in, 4096)

    def _accept(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:  # gone again already, or no descriptors left: the next event tries again
            return
        connection.setblocking(False)
        pid, uid = peer_credentials(connection)
        peer = _Peer(connection, pid)
        self._peers.add(peer)
        self._started().register(connection, selectors.EVENT_READ, peer)
        if uid != os.getuid():
            self._refuse(peer, f"user {uid} is not the user {os.getuid()} this server works for")

    def _serve(self, peer: _Peer, mask: int, *, ended: bool) -> None:
        """Does what a peer's socket or pidfd is ready for."""
        if peer not in self._peers:  # dropped earlier in this round
            return
        if ended:
            self._drain(peer)
            self._drop(peer, f"its process {peer.pid} has ended")
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if mask & selectors.EVENT_READ and peer in self._peers:
            self._read(peer)

    def _drain(self, peer: _Peer) -> None:
        """Reads all that a process sent before its end."""
        while peer in self._peers and self._read(peer):
            pass

    def _read(self, peer: _Peer) -> bool:
        """Reads once; tells whether there may be more."""
        try:
            data = peer.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(peer, f"its connection failed: {error}")
            return False
        if not data:
            self._drop(peer, "closed the connection, or its process ended")
            return False
        peer.inbox += data
        try:
            self._take_in(peer)
        except WireError as error:
            self._refuse(peer, str(error))
        except ValueError as error:
            self._refuse(peer, f"sent what is no request: {error}")
        return True

    def _take_in(self, peer: _Peer) -> None:
        if peer.rank is None:
            if len(peer.inbox) < HELLO.size:
                return
            self._greet(peer, Hello.unpack(peer.take(HELLO.size)))
        while peer.rank is not None and len(peer.inbox) >= Request.SIZE:
            size_bytes = payload_size(Request, bytes(peer.inbox[: Request.SIZE]))
            if len(peer.inbox) < Request.SIZE + size_bytes:
                return
            request = Request.unpack(peer.take(Request.SIZE), peer.take(size_bytes))
            alive = request.kind is Ask.ALIVE
            self._happened.append(Alive(peer.rank) if alive else Arrived(peer.rank, request))

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token, self._token):
            raise WireError("the token is wrong: the address is of another run")
        if hello.rank not in self.ranks:
            raise WireError(f"rank {hello.rank} is not of this node: {sorted(self.ranks)}")
        if (old := self._workers.get(hello.rank)) is not None:
            self._drain(old)  # its end may wait to be noticed
            if old in self._peers and not old.has_ended():
                raise WireError(f"rank {hello.rank} is connected already, from process {old.pid}")
            self._drop(old, f"its process {old.pid} has ended")
        peer.rank = hello.rank
        self._workers[hello.rank] = peer
        if (descriptor := open_pidfd(peer.pid)) is not None:
            peer.pidfd = descriptor
            self._started().register(descriptor, selectors.EVENT_READ, peer)
        self._happened.append(Joined(hello.rank))
        self._send(
            peer, Reply(kind=Say.DONE, numbers=(self._slot_bytes, self._parameter_bytes, os.getpid()))
        )

    def _send(self, peer: _Peer, reply: Reply) -> None:
        peer.outbox += reply.pack()
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """Sends what fits; a stopped worker's rest waits in memory, not in our way."""
        try:
            while peer.outbox:
                sent = send_some(peer.connection, peer.outbox)
                del peer.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drain(peer)
            self._drop(peer, f"its connection failed: {error}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self._started().modify(peer.connection, wanted, peer)

    def _refuse(self, peer: _Peer, reason: str) -> None:
        """Says why, and ends the connection."""
        _log.warning("refused a connection from process %d: %s", peer.pid, reason)
        with contextlib.suppress(OSError):
            send_some(peer.connection, Reply(kind=Say.FAILED, text=reason).pack())
        self._drop(peer, f"refused: {reason}")

    def _drop_mute(self) -> None:
        oldest = time.monotonic() - HELLO_TIMEOUT_S
        for peer in [p for p in self._peers if p.rank is None and p.since < oldest]:
            self._refuse(peer, f"said nothing for {HELLO_TIMEOUT_S:g} s")

    def _drop(self, peer: _Peer, reason: str) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        if self._selector is not None:
            self._selector.unregister(peer.connection)
            if peer.pidfd is not None:
                self._selector.unregister(peer.pidfd)
        peer.close()
        if peer.rank is not None:
            del self._workers[peer.rank]
            self._happened.append(Gone(peer.rank, reason))

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        for peer in list(self._peers):
            self._drop(peer, "the server has closed its listener")
        if self._selector is not None:
            self._selector.close()
        self._door.close()
        for descriptor in (self._lock, self._bell_in, self._bell_out):
            os.close(descriptor)
        self._state.close()
        self._slots, self._parameters = {}, None


def _listening(path: Path) -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(str(path))
        os.chmod(path, 0o600)
        door.listen(128)
        door.setblocking(False)
    except BaseException:
        door.close()
        raise
    return door


class _Peer:
    """A connection; a worker once it has said who it is."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.rank: int | None = None
        self.pidfd: int | None = None
        self.since = time.monotonic()
        self.inbox = bytearray()
        self.outbox = bytearray()

    def take(self, size_bytes: int) -> bytes:
        data = bytes(self.inbox[:size_bytes])
        del self.inbox[:size_bytes]
        return data

    def has_ended(self) -> bool:
        if self.pidfd is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            return bool(selector.select(0))

    def close(self) -> None:
        # A forked child of ours may hold the socket, too: closing alone would not tell the peer.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:  # closed once: the number may be somebody else's by the second time
            os.close(pidfd)
