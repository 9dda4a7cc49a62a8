"""Packets between two processes of a node, and descriptors of memory that go with them (layer T)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from array import array
from collections import deque

__all__ = ["PACKET_BYTES", "Packets"]

PACKET_BYTES = 4096
"""The longest packet."""

_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array("i").itemsize)


class Packets:
    """One side of a connection. Used by one thread.

    Args:
        connection: of packets, see `Neighbours`; owned from here on.

    Attributes:
        broken: why nothing comes and goes any more; None as long as it does.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.broken: str | None = None
        self._connection = connection
        self._input, self._both = select.poll(), select.poll()
        self._input.register(connection, select.POLLIN)
        self._both.register(connection, select.POLLIN | select.POLLOUT)
        self._unsent: deque[tuple[bytes, int | None]] = deque()

    @property
    def unsent(self) -> bool:
        """Whether there are packets that the connection has not taken so far."""
        return bool(self._unsent)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Sends a packet as soon as the connection takes it, here or in a later `flush`.

        Args:
            packet: at most `PACKET_BYTES`, not empty.
            descriptor: goes with it, and is closed here.
        """
        self._unsent.append((packet, descriptor))
        self.flush()

    def flush(self) -> None:
        """Sends what the connection takes."""
        while self._unsent and self.broken is None:
            packet, descriptor = self._unsent[0]
            descriptors = [] if descriptor is None else [array("i", [descriptor])]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, one) for one in descriptors]
            try:
                self._connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self._break(error)
                return
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> tuple[bytes, int | None] | None:
        """Returns the next packet, and the descriptor that came with it, the caller's to close; None: none so far."""
        if self.broken is not None:
            return None
        try:
            packet, rights, *_ = self._connection.recvmsg(
                PACKET_BYTES, _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            self._break(error)
            return None
        if not packet:
            self._break(None)
            return None
        descriptors = array("i", b"".join(data for _, _, data in rights))
        return packet, descriptors[0] if descriptors else None

    def wait(self, timeout_s: float, *, unsent: bool = False) -> None:
        """Waits until something has come, or, if told so, until what is unsent can go; the timeout at most."""
        (self._both if unsent else self._input).poll(1e3 * timeout_s)

    def watch(self, poll: select.poll) -> None:
        """Lets ``poll`` return when a packet has come, or when one that is unsent can go."""
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _break(self, error: OSError | None) -> None:
        self.broken = "its connection is closed" + (f": {error.strerror}" if error is not None else "")

    def abort(self) -> None:
        """Closes it even where forked children hold it open; what the other side has not read yet may be lost."""
        self.broken = self.broken or "it was aborted"
        with contextlib.suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Closes it with the descriptors that are unsent. Idempotent."""
        self._connection.close()
        while self._unsent:
            _, descriptor = self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)
