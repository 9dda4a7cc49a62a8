"""A worker's ends: on the server's node with slot and parameters in shared memory, elsewhere over TCP (layer T).

Both speak one protocol on one socket, see `sockets`. What a wire carries besides:

    CHUNK(start, stop) + bytes  -------------->   straight into the server's copy of the slot
    PARAMETERS  ------------------------------>
                      <------------------------   PARAMETERS(version) + bytes
    ALIVE, at any time  ---------------------->
                      <------------------------   ALIVE: so is the server
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_hetero.transport.base import (
    Ask,
    LeftBehindError,
    Reply,
    Request,
    Say,
    ServerLostError,
    WorkerLink,
)
from lightning_hetero.transport.memory import map_parts
from lightning_hetero.transport.seqlock import ParameterArea, Slot, bytes_of
from lightning_hetero.transport.sockets import (
    WireError,
    connect_to_tcp,
    connect_to_unix,
    hello,
    lost,
    peer_credentials,
    receive_exactly,
    receive_into,
    receive_reply,
    receive_welcome,
    send_all,
    send_now,
)

_LOOK_S = 1.0  # for what is there to be read
_SILENCE_S = 60.0  # a server elsewhere that answers nothing for so long, and ...
_SLOWEST = 1e6  # ... for as long as all that may be on its way takes [bytes/s], is lost


def connect(address: str, rank: int, timeout_s: float = 60.0) -> LocalLink | RemoteLink:
    """Returns a worker's end.

    Args:
        address: one of `Listener`'s, ``unix:name#token`` or ``host:port#token``.
        rank: this worker.
        timeout_s: how long the server may take to answer.

    Raises:
        ConnectionRefusedError: the server does not want this worker; the message says why.
        ServerLostError: there is no server, or it does not answer.
        ValueError: the address is none.
    """
    place, _, token = address.rpartition("#")
    host, _, port = place.rpartition(":")
    near = host == "unix"
    if len(token) != 32 or not (near or (host and port.isdigit())):
        raise ValueError(f"address={address!r} must be a Listener's, 'unix:name#token' or 'host:port#token'")
    with contextlib.ExitStack() as undo:
        try:
            connection = connect_to_unix(port, timeout_s) if near else connect_to_tcp(host, int(port), timeout_s)
            undo.enter_context(connection)
            if near and (uid := peer_credentials(connection)[1]) != os.getuid():
                raise _RefusedError(f"the server at {place} is of user {uid}, not of {os.getuid()}")
            (pid, *sizes), handed = _greet(connection, rank, bytes.fromhex(token), time.monotonic() + timeout_s)
            if near:
                link = LocalLink(connection, rank, pid, *map_parts(*handed, *sizes))
            else:
                link = RemoteLink(connection, rank, pid, place, *sizes)
        except _RefusedError as refused:
            raise ConnectionRefusedError(str(refused)) from None
        except TimeoutError:
            raise ServerLostError(f"the server at {place} did not answer within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise ServerLostError(f"no server at {place}: it has ended, or never was there ({error})") from error
        undo.pop_all()
    return link


class _RefusedError(Exception):
    """One side does not want the other."""


def _greet(connection: socket.socket, rank: int, token: bytes, deadline: float) -> tuple[Sequence[int], list[int]]:
    """Returns the numbers and the file descriptors that a server hands to a worker which it lets in."""

    def welcome() -> tuple[Reply, list[int]]:
        reply, handed = receive_welcome(connection, deadline)
        if reply.kind != Say.DONE:
            raise _RefusedError(f"the server refused rank {rank}: {reply.text}")
        return reply, handed

    challenge = welcome()[0].text
    with contextlib.suppress(BrokenPipeError):  # refused already: the reason is waiting to be read
        send_all(connection, hello(rank, challenge, token), deadline)
    reply, handed = welcome()
    return reply.numbers, handed


class _SocketLink(WorkerLink):
    """What both ends have: one conversation at a time, and signs of life beside it from another thread.

    Args:
        connection: behind the handshake.
        rank: this worker.
        slot: its gradients.
        server_pid: the server's process.
    """

    def __init__(self, connection: socket.socket, rank: int, slot: Slot, server_pid: int) -> None:
        self.rank = rank
        self._connection, self._slot, self._server_pid = connection, slot, server_pid
        self.gradient = slot.data
        self._sending = threading.Lock()
        self._lost: ServerLostError | None = None
        self._state = b""

    def open_slot(self) -> None:
        self._slot.open()

    def close_slot(self) -> int:
        return self._slot.close()

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        with self._talking(f"rank {self.rank} asked for {request.kind.name}", timeout_s) as deadline:
            # A server that fails may say so before it has read this: then the answer is there already.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._send(request.pack(), deadline=deadline)
            return self._receive(deadline)

    def read_state(self) -> bytes:
        return self._state

    def close(self) -> None:
        self._end(ServerLostError("this link is closed"))

    def sign_of_life(self, after_s: float) -> None:
        if not self._sending.acquire(blocking=False):
            return  # what is being sent is one
        try:
            rest = sign = memoryview(Request(kind=Ask.ALIVE).pack())
            with contextlib.suppress(OSError):
                while rest and self._lost is None:
                    try:
                        rest = rest[send_now(self._connection, rest) :]
                    except (TimeoutError, BlockingIOError):
                        if len(rest) == len(sign):  # else no half of it
                            return
        finally:
            self._sending.release()

    # ---- the conversation -----------------------------------------------------------------------------------

    def _heard(self) -> None:
        """The server has answered, or taken something in."""

    def _why_lost(self, doing: str) -> ServerLostError:
        """Returns the error for a connection that broke."""
        return lost(self._server_pid, doing)

    def _last_words(self) -> LeftBehindError | None:
        """Returns what the server has said before the connection broke, if the others go on without this worker."""
        try:
            while True:
                self._receive(time.monotonic() + _LOOK_S)
        except LeftBehindError as left:
            return left
        except (OSError, EOFError, ValueError):
            return None

    def _send(self, *parts: bytes | memoryview, deadline: float | None = None) -> None:
        with self._sending:
            for part in parts:
                send_all(self._connection, part, deadline, self._heard)

    def _receive(self, deadline: float | None = None) -> Reply:
        while (reply := receive_reply(self._connection, deadline)).kind is Say.ALIVE:
            self._heard()
        if reply.kind is Say.LEFT:
            raise LeftBehindError(reply.text)
        if reply.kind is Say.STATE:
            self._state = receive_exactly(self._connection, reply.numbers[0], deadline)
        return reply

    @contextlib.contextmanager
    def _talking(self, doing: str, timeout_s: float | None = None) -> Iterator[float | None]:
        """Turns a broken connection into ServerLostError; half a conversation cannot be taken up again."""
        if self._lost is not None:
            raise self._lost
        try:
            yield None if timeout_s is None else time.monotonic() + timeout_s
            return
        except LeftBehindError as left:
            self.left_behind, error = True, left
        except (EOFError, OSError) as broken:
            self.cut = timeout_s is None or not isinstance(broken, TimeoutError)
            if not self.cut:
                error = ServerLostError(
                    f"no answer within {timeout_s:g} s ({doing}): the parameter server (process {self._server_pid}) is"
                    " stopped, overloaded or hangs"
                )
            elif (left := self._last_words()) is not None:
                self.left_behind, error = True, left
            else:
                error = self._why_lost(doing)
        except BaseException:
            self._end(ServerLostError("this link was interrupted in the middle of a call"))
            raise
        self._end(error)
        raise error

    def _end(self, reason: ServerLostError) -> None:
        if self._lost is None:
            self._lost = reason
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()


class LocalLink(_SocketLink):
    """On the server's node: slot and parameters are memory of both; see `connect`."""

    def __init__(
        self, connection: socket.socket, rank: int, server_pid: int, slot: Slot, parameters: ParameterArea
    ) -> None:
        super().__init__(connection, rank, slot, server_pid)
        self._parameters = parameters

    @property
    def shared(self) -> tuple[Tensor, ...]:
        return (self.gradient, self._parameters.data)

    def ready(self, start: int, stop: int) -> None:
        pass

    def read_parameters(self, into: Tensor) -> int:
        return self._parameters.read(into)

    def newest_version(self) -> int:
        return self._parameters.newest()


class RemoteLink(_SocketLink):
    """Elsewhere: the server has a copy of the slot, and parameters are asked for; see `connect`."""

    def __init__(
        self, connection: socket.socket, rank: int, server_pid: int, place: str, slot_bytes: int, parameter_bytes: int
    ) -> None:
        super().__init__(connection, rank, Slot.empty(slot_bytes), server_pid)
        self._address = place
        self._newest = -1
        self._sent: list[tuple[int, int]] = []
        self._silence_s = _SILENCE_S + (slot_bytes + parameter_bytes) / _SLOWEST
        self._silent_s: float | None = None  # how long the server has been silent while this worker waits

    def open_slot(self) -> None:
        super().open_slot()
        self._sent = []
        self._send_chunk(0, 0)  # it is being written, from now on

    def ready(self, start: int, stop: int) -> None:
        if start < stop:
            self._sent.append((start, stop))
            self._send_chunk(start, stop)

    def close_slot(self) -> int:
        *gaps, last = _gaps(self._sent, self.gradient.numel()) or [(0, 0)]
        for start, stop in gaps:
            self._send_chunk(start, stop)
        number = super().close_slot()
        self._send_chunk(*last)  # the last one has the number of the whole
        return number

    def _send_chunk(self, start: int, stop: int) -> None:
        request = Request(kind=Ask.CHUNK, slot=self._slot.sequence, numbers=(start, stop))
        with self._talking(f"rank {self.rank} sent gradients"):
            self._send(request.pack(), bytes_of(self.gradient[start:stop]))

    def read_parameters(self, into: Tensor) -> int:
        with self._talking(f"rank {self.rank} asked for the parameters"):
            self._send(Request(kind=Ask.PARAMETERS).pack())
            if (reply := self._receive()).kind is not Say.PARAMETERS:
                raise WireError(f"{reply.kind.name} came instead of the parameters")
            if reply.version >= 0:
                target = into if into.is_cpu else torch.empty_like(into, device="cpu")
                receive_into(self._connection, bytes_of(target), progress=self._heard)
                if target is not into:
                    into.copy_(target)
                return reply.version
        raise RuntimeError("no parameters were published yet: the server publishes before it answers a worker")

    def newest_version(self) -> int:
        return self._newest

    def sign_of_life(self, after_s: float) -> None:
        super().sign_of_life(after_s)
        if (silent_s := self._silent_s) is not None:
            self._silent_s = silent_s + after_s
            if self._silent_s > self._silence_s:
                with contextlib.suppress(OSError):  # which the other thread notices
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _heard(self) -> None:
        self._silent_s = 0.0

    def _receive(self, deadline: float | None = None) -> Reply:
        reply = super()._receive(deadline)
        self._newest = max(self._newest, reply.version)
        return reply

    @contextlib.contextmanager
    def _talking(self, doing: str, timeout_s: float | None = None) -> Iterator[float | None]:
        self._silent_s = 0.0
        try:
            with super()._talking(doing, timeout_s) as deadline:
                yield deadline
        finally:
            self._silent_s = None

    def _why_lost(self, doing: str) -> ServerLostError:
        return ServerLostError(
            f"the connection to the parameter server at {self._address} is lost ({doing}): it has ended, or the network"
            " failed"
        )


def _gaps(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Returns what ``spans`` leave of ``[0, size)``."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, stop in sorted(spans):
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    return [*gaps, (at, size)] if at < size else gaps


class Pulse:
    """Gives signs of life on a link until `stop`: a long batch is no death, a stopped process is.

    Args:
        link: open; may be used by its own thread meanwhile.
        every_s: time between two signs [s].
    """

    def __init__(self, link: WorkerLink, every_s: float) -> None:
        self._link, self._every_s = link, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"pulse-{link.rank}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            self._link.sign_of_life(self._every_s)

    def stop(self) -> None:
        """Ends the link, and the thread with it; idempotent."""
        self._over.set()
        self._link.close()
        self._thread.join()
