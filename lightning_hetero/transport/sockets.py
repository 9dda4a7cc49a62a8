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

import hmac
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from datetime import timedelta

from lightning_hetero.transport.base import Reply, Request, ServerLostError

FOREVER = timedelta(days=365)  # liveness is decided elsewhere; gloo ends a pair whose wait times out
PAYLOAD_LIMIT_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
"""Of a large body, what is sent or received at a time; each piece is a sign of life."""

_HELLO = struct.Struct("<8sIi32s")
HELLO_BYTES = _HELLO.size
_MAGIC, _FORMAT = b"lhstale\0", 3
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)  # a forked server may have the default SIGPIPE: death
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
    pid, uid, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return pid, uid


def open_pidfd(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends; None where there is none to be had."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def has_ended(pid: int, wait_s: float) -> bool:
    """Tells whether a process has ended, after giving it ``wait_s`` to do so; False if nothing is known."""
    if (descriptor := open_pidfd(pid)) is None:
        return pid > 0 and os.path.exists("/proc/self") and not os.path.exists(f"/proc/{pid}")
    try:
        return bool(select.select([descriptor], [], [], wait_s)[0])
    finally:
        os.close(descriptor)


def unix_door() -> tuple[socket.socket, str]:
    """Listens for processes of this node; returns the socket and its name, for `connect_to_unix`.

    On Linux the name is no file's, and there is nothing to be removed. Elsewhere it is one in the temporary folder.
    """
    name = f"lightning-hetero-{secrets.token_hex(8)}"
    name = f"@{name}" if sys.platform == "linux" else os.path.join(tempfile.gettempdir(), name)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(_unix_address(name))
        door.listen(128)
        door.setblocking(False)
    except BaseException:
        door.close()
        raise
    return door, name


def connect_to_unix(name: str, timeout_s: float) -> socket.socket:
    """Returns a connection to `unix_door`; raises OSError if nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_unix_address(name))
    except BaseException:
        connection.close()
        raise
    return connection


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
        door = socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    else:
        door = socket.create_server(("127.0.0.1" if host in ("localhost", "127.0.0.1") else "", 0), backlog=128)
    door.setblocking(False)
    return door


def send_now(connection: socket.socket, data: bytes | bytearray | memoryview) -> int:
    """Sends what fits, and returns the number of bytes; raises BlockingIOError if nothing does."""
    return connection.send(data, _NO_SIGNAL | _NO_WAIT)


def send_all(
    connection: socket.socket, data: bytes | memoryview, deadline: float | None = None,
    progress: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Sends all of ``data``; raises TimeoutError past ``deadline`` (time.monotonic), OSError if the peer is gone."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(_rest_s(deadline))
        rest = rest[connection.send(rest[:PIECE_BYTES], _NO_SIGNAL) :]
        progress()


def receive_into(
    connection: socket.socket, target: memoryview, deadline: float | None = None,
    progress: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Fills ``target``; raises TimeoutError past ``deadline``, EOFError if the peer is gone."""
    while target:
        connection.settimeout(_rest_s(deadline))
        if not (count := connection.recv_into(target[:PIECE_BYTES])):
            raise EOFError("the connection was closed")
        target = target[count:]
        progress()


def receive_exactly(connection: socket.socket, size_bytes: int, deadline: float | None) -> bytes:
    """Returns exactly ``size_bytes``; raises as `receive_into`."""
    if not size_bytes:
        return b""
    connection.settimeout(_rest_s(deadline))
    first = connection.recv(size_bytes)
    if len(first) == size_bytes:  # as a rule
        return first
    data = bytearray(size_bytes)
    data[: len(first)] = first
    receive_into(connection, memoryview(data)[len(first) :], deadline)
    return bytes(data)


def receive_reply(connection: socket.socket, deadline: float | None) -> Reply:
    """Returns the next reply; raises as `receive_into`, and ValueError if it is none."""
    head = receive_exactly(connection, Reply.SIZE, deadline)
    return Reply.unpack(head, receive_exactly(connection, payload_size(Reply, head), deadline))


def send_welcome(connection: socket.socket, reply: Reply, descriptor: int) -> None:
    """Sends a reply and a file descriptor, on a unix socket with nothing else to be sent; raises OSError."""
    handed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    connection.sendmsg([reply.pack()], [handed], _NO_SIGNAL | _NO_WAIT)


def receive_welcome(connection: socket.socket, deadline: float) -> tuple[Reply, list[int]]:
    """Returns the next reply of a handshake, and the file descriptors that come with it; raises as `receive_reply`."""
    connection.settimeout(_rest_s(deadline))
    head, descriptors, *_ = socket.recv_fds(connection, Reply.SIZE, 1)
    head += receive_exactly(connection, Reply.SIZE - len(head), deadline)
    return Reply.unpack(head, receive_exactly(connection, payload_size(Reply, head), deadline)), descriptors


def _rest_s(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (rest_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return rest_s


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
