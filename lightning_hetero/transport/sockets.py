"""Framing of messages on sockets, and the handshake that begins each connection (layer T).

    worker                                          server
           <------  Reply DONE (text: challenge), or FAILED with the reason
    HELLO  magic, format, rank, proof  ---------->  checks proof and rank
           <------  Reply DONE (pid, slot bytes, parameter bytes), or FAILED with the reason
                    on one node with the descriptor of the shared memory, and where this worker's slot begins there
    Request + payload  -------------------------->
           <------  Reply + payload

The proof is a keyed hash of the challenge, so the secret of the run never travels. The network itself is trusted, as
with torch.distributed in general: nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
from array import array
from collections.abc import Callable
from datetime import timedelta

from lightning_hetero.transport.awake import BEAT_S, awake_s
from lightning_hetero.transport.base import Reply, Request, ServerLostError

FOREVER = timedelta(days=365)  # liveness is decided elsewhere; gloo ends a pair whose wait times out
PAYLOAD_LIMIT_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""Of a large body, what is sent or received at a time; each piece is a sign of life."""

_BACKLOG = 4096  # connections of strangers, whom a busy server is slow to refuse, must not keep workers out
_HELLO = struct.Struct("<8sIi32s")
HELLO_BYTES = _HELLO.size
_MAGIC, _FORMAT = b"lhstale\0", 4
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)  # a forked server may have the default SIGPIPE: death
_BEAT = struct.pack("ll", 0, round(1e6 * BEAT_S))
_NO_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)


class WireError(ValueError):
    """What came in is not of this protocol."""


def hello(rank: int, challenge: str, token: bytes) -> bytes:
    """Returns a worker's first words: its rank, and the proof that it knows the run's secret."""
    proof = hmac.digest(token, f"{challenge} {rank}".encode(), "sha256")
    return _HELLO.pack(_MAGIC, _FORMAT, rank, proof)


def check_hello(data: bytes, challenge: str, token: bytes) -> int:
    """Returns the rank that a greeting names; raises WireError if it is none, of another version or another run."""
    magic, version, rank, _ = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise WireError("the peer does not speak this protocol")
    if version != _FORMAT:
        raise WireError(f"the peer speaks format {version}, this side {_FORMAT}: two installed versions?")
    if not hmac.compare_digest(data, hello(rank, challenge, token)):
        raise WireError("the token is wrong: the peer is of another run")
    return rank


def payload_size(frame: type[Request] | type[Reply], head: bytes) -> int:
    """Returns the size of the payload that follows ``head``; raises WireError if it is refused."""
    if (size_bytes := frame.body_size(head)) > PAYLOAD_LIMIT_BYTES:
        raise WireError(
            f"a payload of {size_bytes} bytes was announced, the limit is {PAYLOAD_LIMIT_BYTES}: "
            "not of this protocol, or a list far too long"
        )
    return size_bytes


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns pid (0: unknown) and user id of the process at the other end of a unix socket.

    Where the system does not tell, the token alone keeps other users out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, os.getuid()
    credentials = struct.Struct("3i")
    pid, uid, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return pid, uid


def open_pidfd(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends; None where that is not supported."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def has_ended(pid: int, wait_s: float) -> bool:
    """Returns whether a process has ended, after giving it ``wait_s`` to do so; False if nothing is known."""
    if (descriptor := open_pidfd(pid)) is None:
        return pid > 0 and os.path.exists("/proc/self") and not os.path.exists(f"/proc/{pid}")
    try:
        return bool(select.select([descriptor], [], [], wait_s)[0])
    finally:
        os.close(descriptor)


def process_state(pid: int) -> bytes:
    """Returns the letter of the process's state, "T": stopped; empty if that is not known."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # of another user, no /proc
        return file.read().rpartition(b")")[2].split()[0]
    return b""


def unix_door() -> tuple[socket.socket, str]:
    """Listens for processes of this node; returns the socket and its name, for `connect_to_unix`.

    On Linux the name is no file's, and there is nothing to be removed. Elsewhere it is one in the temporary folder.
    """
    name = f"lightning-hetero-{secrets.token_hex(8)}"
    name = f"@{name}" if sys.platform == "linux" else os.path.join(tempfile.gettempdir(), name)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(_unix_address(name))
        door.listen(_BACKLOG)
        door.setblocking(False)
    except BaseException:
        door.close()
        raise
    return door, name


def accept_from(door: socket.socket) -> tuple[socket.socket, int, int]:
    """Returns a connection, non-blocking, and pid (0: unknown) and user of who has come.

    Raises:
        BlockingIOError, ConnectionAbortedError: nobody waits, or has gone again.
        OSError: no descriptors are left.
    """
    connection, _ = door.accept()
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return connection, *peer_credentials(connection)
    with contextlib.suppress(OSError):  # gone again already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection, 0, os.getuid()


def connect_to_unix(name: str, timeout_s: float) -> socket.socket:
    """Returns a connection to `unix_door`; raises OSError if nobody listens there."""
    connection, waits = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), Deadline(timeout_s)
    try:
        wait_in_turns(connection)
        while True:
            try:
                connection.connect(_unix_address(name))
                return connection
            except BlockingIOError:  # others wait there, too
                waits()
    except BaseException:
        connection.close()
        raise


def connect_to_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Returns a connection to `tcp_door`; raises OSError if nobody listens there."""
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _unix_address(name: str) -> str:
    return name.replace("@", "\0", 1) if name.startswith("@") else name


def tcp_door(host: str) -> socket.socket:
    """Listens where peers that know ``host`` arrive; on a loopback address nobody else can connect."""
    if host not in ("localhost", "127.0.0.1") and socket.has_dualstack_ipv6():
        door = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        door = socket.create_server(("127.0.0.1" if host in ("localhost", "127.0.0.1") else "", 0), backlog=_BACKLOG)
    door.setblocking(False)
    return door


def send_now(connection: socket.socket, data: bytes | bytearray | memoryview) -> int:
    """Sends what fits, and returns the number of bytes; raises BlockingIOError if nothing does."""
    return connection.send(data, _NO_SIGNAL | _NO_WAIT)


Waits = Callable[[], object]
"""Called whenever a beat has passed without a byte; raises to give up."""


def _patient() -> None:
    """Waits until somebody closes the connection."""


class Deadline:
    """Waits so long at most, by `awake_s`: raises TimeoutError then."""

    def __init__(self, seconds: float) -> None:
        self._end_s = awake_s() + seconds

    def __call__(self) -> None:
        if awake_s() >= self._end_s:
            raise TimeoutError


def wait_in_turns(connection: socket.socket) -> None:
    """Makes a socket blocking, for one beat at a time: behind it BlockingIOError is raised, see `Waits`."""
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _BEAT)


def send_all(
    connection: socket.socket, data: bytes | memoryview, waits: Waits = _patient, progress: Waits = _patient
) -> None:
    """Sends all of ``data``; raises OSError if the peer is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest[:PIECE_BYTES], _NO_SIGNAL) :]
        except BlockingIOError:
            waits()
        else:
            progress()


def receive_into(
    connection: socket.socket, target: memoryview, waits: Waits = _patient, progress: Waits = _patient
) -> None:
    """Fills ``target``; raises EOFError if the peer is gone."""
    while target:
        try:
            count = connection.recv_into(target[:PIECE_BYTES])
        except BlockingIOError:
            waits()
            continue
        if not count:
            raise EOFError("the connection was closed")
        target = target[count:]
        progress()


def receive_exactly(connection: socket.socket, size_bytes: int, waits: Waits) -> bytes:
    """Returns exactly ``size_bytes``; raises as `receive_into`."""
    data = bytearray(size_bytes)
    receive_into(connection, memoryview(data), waits)
    return bytes(data)


def receive_reply(connection: socket.socket, waits: Waits) -> Reply:
    """Returns the next reply; raises as `receive_into`, and ValueError if it is none."""
    head = receive_exactly(connection, Reply.SIZE, waits)
    return Reply.unpack(head, receive_exactly(connection, payload_size(Reply, head), waits))


def send_welcome(connection: socket.socket, reply: Reply, descriptor: int) -> None:
    """Sends a reply and a file descriptor, on a unix socket with nothing else to be sent; raises OSError."""
    handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    connection.sendmsg([reply.pack()], [handed], _NO_SIGNAL | _NO_WAIT)


def receive_welcome(connection: socket.socket, waits: Waits) -> tuple[Reply, list[int]]:
    """Returns the next reply of a handshake, and the file descriptors that come with it; raises as `receive_reply`."""
    head, descriptors = b"", list[int]()
    while True:
        try:
            head, descriptors, *_ = socket.recv_fds(connection, Reply.SIZE, 1)
        except BlockingIOError:
            waits()
        else:
            break
    head += receive_exactly(connection, Reply.SIZE - len(head), waits)
    return Reply.unpack(head, receive_exactly(connection, payload_size(Reply, head), waits)), descriptors


def lost(pid: int, doing: str) -> ServerLostError:
    """Returns the error for a connection that broke, with what is known of the server's process."""
    if has_ended(pid, wait_s=0.2):
        cause = (
            f"the parameter server (process {pid}) has ended: it failed, was killed, or ran out of memory; its own"
            " messages above may tell more. Training can be resumed from the last checkpoint"
        )
    else:
        cause = f"the parameter server (process {pid or 'unknown'}) has closed the connection"
    return ServerLostError(f"{cause} ({doing})")


def first_line(error: BaseException) -> str:
    """Returns gloo's or the store's message without its place in the source and its advice."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return text.partition("] ")[2] or text if text.startswith("[") else text
