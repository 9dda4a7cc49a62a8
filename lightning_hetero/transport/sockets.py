"""Framing of control messages on unix sockets, and who is at the other end (layer T).

    worker                                     server
    HELLO  magic, format, rank, token  ------>  checks the peer's user, then these
           <------  Reply DONE (slot bytes, parameter bytes, pid), or FAILED with the reason
    Request + payload  ------>
           <------  Reply + payload
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from lightning_hetero.transport.base import Reply, Request, ServerLostError

__all__ = [
    "HELLO",
    "PAYLOAD_LIMIT_BYTES",
    "Hello",
    "WireError",
    "first_line",
    "has_ended",
    "open_pidfd",
    "peer_credentials",
    "receive_exactly",
    "send_all",
]

PAYLOAD_LIMIT_BYTES = 64 << 20

HELLO = struct.Struct("<8sIi16s")
_MAGIC = b"lhstale\0"
_FORMAT = 1
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)  # a forked server may have the default SIGPIPE: death


class WireError(ValueError):
    """What came in is not of this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first words.

    Attributes:
        rank: who it says it is.
        token: 16 bytes which only those know who were given the address.
    """

    rank: int
    token: bytes

    def pack(self) -> bytes:
        return HELLO.pack(_MAGIC, _FORMAT, self.rank, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Returns the greeting; raises WireError if it is none, or of another version."""
        magic, version, rank, token = HELLO.unpack(data)
        if magic != _MAGIC:
            raise WireError("the peer does not speak this protocol")
        if version != _FORMAT:
            raise WireError(f"the peer speaks format {version}, this side {_FORMAT}: two installed versions?")
        return cls(rank, token)


def payload_size(frame: type[Request] | type[Reply], head: bytes) -> int:
    """Returns the size of the payload that follows ``head``; raises WireError if it is refused."""
    if (size_bytes := frame.body_size(head)) > PAYLOAD_LIMIT_BYTES:
        raise WireError(
            f"a payload of {size_bytes} bytes was announced, the limit is {PAYLOAD_LIMIT_BYTES}: "
            "not of this protocol, or a list far too long"
        )
    return size_bytes


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns pid (0: unknown) and user id of the process that connected.

    Where the system does not tell, the folder's mode (0700) alone keeps other users out.
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


def send_some(connection: socket.socket, data: bytes | bytearray | memoryview) -> int:
    """Sends what fits, without ever raising SIGPIPE; returns the number of bytes."""
    return connection.send(data, _NO_SIGNAL)


def send_all(connection: socket.socket, data: bytes, deadline: float | None) -> None:
    """Sends all of ``data``; raises TimeoutError past ``deadline`` (time.monotonic), OSError if the peer is gone."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(_rest_s(deadline))
        rest = rest[send_some(connection, rest) :]


def receive_exactly(connection: socket.socket, size_bytes: int, deadline: float | None) -> bytes:
    """Returns exactly ``size_bytes``; raises TimeoutError past ``deadline``, EOFError if the peer is gone."""
    data = bytearray()
    while len(data) < size_bytes:
        connection.settimeout(_rest_s(deadline))
        if not (part := connection.recv(size_bytes - len(data))):
            raise EOFError
        data += part
    return bytes(data)


def receive_reply(connection: socket.socket, deadline: float | None) -> Reply:
    """Returns the next reply; raises as `receive_exactly`, and ValueError if it is none."""
    head = receive_exactly(connection, Reply.SIZE, deadline)
    return Reply.unpack(head, receive_exactly(connection, payload_size(Reply, head), deadline))


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
