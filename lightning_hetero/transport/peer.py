"""A connection at the server, and the threads that move large bodies over it (layer T)."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_hetero.transport.base import Reply, Request, Say
from lightning_hetero.transport.seqlock import ParameterArea, Slot, bytes_of
from lightning_hetero.transport.sockets import WireError, payload_size, receive_into, send_all, wait_in_turns

_INLINE_BYTES = 1 << 18  # what is not larger is not worth a thread
_END_S = 10.0  # for a thread whose connection is closed


class Peer:
    """A connection; a worker once it has said which one it is.

    A thread takes over the socket for as long as a large body lasts; the server's keeps away from it meanwhile.

    Args:
        connection: non-blocking.
        pid: of the process at the other end; 0: unknown.
        welcome: the ranks that come by this door.
        tell: called by threads: with None when a piece has gone, at the end with "" or what went wrong.

    Attributes:
        challenge: what it has to prove that it knows the run's secret with.
        inbox, outbox: what was read and not understood yet; what is to be sent.
        busy: what a thread does with the socket: "sends", "receives"; empty: no thread.
        watched: events that the selector looks at the socket for.
    """

    def __init__(
        self, connection: socket.socket, pid: int, welcome: frozenset[int], tell: Callable[[Peer, str | None], None]
    ) -> None:
        self.connection, self.pid, self.welcome, self._tell = connection, pid, welcome, tell
        self.challenge = secrets.token_hex(16)
        self.rank: int | None = None
        self.pidfd: int | None = None
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.busy, self.watched = "", 0
        self._chunk: tuple[Slot, Request] | None = None  # its bytes come next
        self._thread: threading.Thread | None = None
        self._parameters: Tensor | None = None  # as they are sent

    def take(self, size_bytes: int) -> bytes:
        """Returns, and forgets, the first bytes of what was read."""
        data = bytes(self.inbox[:size_bytes])
        del self.inbox[:size_bytes]
        return data

    def next_request(self) -> Request | None:
        """Returns, and forgets, the next request that has come as a whole; raises ValueError if it is none."""
        if len(self.inbox) < Request.SIZE:
            return None
        size_bytes = payload_size(Request, bytes(self.inbox[: Request.SIZE]))
        if len(self.inbox) < Request.SIZE + size_bytes:
            return None
        return Request.unpack(self.take(Request.SIZE), self.take(size_bytes))

    # ---- bodies -------------------------------------------------------------------------------------------

    def expect(self, slot: Slot, chunk: Request) -> None:
        """The bytes of a slot come next; it is whole again behind them if the chunk's number is even."""
        start, stop = chunk.numbers if len(chunk.numbers) == 2 else (0, -1)
        if not 0 <= start <= stop <= slot.data.numel():
            raise WireError(f"bytes [{start}, {stop}) are not inside the slot's {slot.data.numel()}")
        slot.mark(chunk.slot | 1)
        self._chunk = (slot, chunk)

    def fill(self) -> bool:
        """Takes in the bytes that are expected; returns False while the next of a small body have to be read."""
        if self._chunk is None:
            return True
        slot, chunk = self._chunk
        target = bytes_of(slot.data[slice(*chunk.numbers)])
        here = min(len(target), len(self.inbox))
        if here < len(target) <= _INLINE_BYTES:
            return False
        self._chunk = None
        target[:here] = self.take(here)

        def receive() -> None:
            receive_into(self.connection, target[here:], progress=lambda: self._tell(self, None))
            slot.mark(chunk.slot)

        if here == len(target):
            slot.mark(chunk.slot)
        else:
            self._take_over("receives", receive)
        return True

    def send_parameters(self, area: ParameterArea, size_bytes: int) -> None:
        """Sends the newest parameters as a whole, however long that takes."""

        def newest() -> tuple[Reply, memoryview]:
            if area.newest() < 0:
                return Reply(kind=Say.PARAMETERS, version=-1), memoryview(b"")
            if self._parameters is None:
                self._parameters = torch.empty(size_bytes, dtype=torch.uint8)
            version = area.read(self._parameters)
            return Reply(kind=Say.PARAMETERS, version=version), bytes_of(self._parameters)

        self.send_body(newest, size_bytes)

    def send_body(self, make: Callable[[], tuple[Reply, memoryview]], size_bytes: int) -> None:
        """Sends a reply with a body behind it, or leaves a small one in the outbox."""
        if size_bytes <= _INLINE_BYTES:
            reply, body = make()
            self.outbox += reply.pack()
            self.outbox += body
            return
        before, self.outbox = bytes(self.outbox), bytearray()

        def send() -> None:
            reply, body = make()
            send_all(self.connection, before + reply.pack())
            send_all(self.connection, body, progress=lambda: self._tell(self, None))

        self._take_over("sends", send)

    def _take_over(self, busy: str, work: Callable[[], None]) -> None:
        def run() -> None:
            how = ""
            try:
                work()
            except Exception as error:  # whatever it is, the server's thread is told
                how = f"its connection failed: {type(error).__name__}: {error}"
            self._tell(self, how)

        self.busy = busy
        wait_in_turns(self.connection)
        self._thread = threading.Thread(target=run, name=f"worker-{self.rank}-{busy}", daemon=True)
        self._thread.start()

    def hand_back(self) -> None:
        """The thread has ended."""
        self.busy = ""
        self.connection.setblocking(False)

    def join(self, most_s: float) -> None:
        """Waits for the body that is under way."""
        if self._thread is not None:
            self._thread.join(max(0.0, most_s))

    # ---- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the connection, and the thread that works on it."""
        # A forked child of ours may hold the socket, too: closing alone would not tell the peer.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.join(_END_S)
        self.connection.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:  # closed once: the number may be somebody else's by the second time
            os.close(pidfd)
