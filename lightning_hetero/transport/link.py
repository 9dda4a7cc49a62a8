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
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_hetero.transport import sockets
from lightning_hetero.transport.awake import BEAT_S, awake_s
from lightning_hetero.transport.base import Ask, LeftBehindError, Reply, Request, Say, ServerLostError
from lightning_hetero.transport.progress import work_of
from lightning_hetero.transport.seqlock import ParameterArea, Slot, bytes_of, map_parts

_LOOK_S = 1.0  # for what is there to be read
_LATER_S = 5.0  # after the patience, for a server that can itself say that it hangs


def connect(address: str, rank: int, timeout_s: float = 60.0, patience_s: float = 1800.0) -> LocalLink | RemoteLink:
    """Returns a worker's end.

    Args:
        address: one of `Listener`'s, ``unix:name#token`` or ``host:port#token``.
        rank: this worker.
        timeout_s: how long the server may take to greet.
        patience_s: how long it may show no progress afterwards, while this worker waits.

    Raises:
        ConnectionRefusedError: the server does not want this worker; the message says why.
        ServerLostError: there is no server, or it does not answer.
        ValueError: the address is none.
    """
    place, _, token = address.rpartition("#")
    host, _, port = place.rpartition(":")
    near = host == "unix"
    if len(token) != 32 or not (near or (host and port.isdigit())):
        raise ValueError(f"the address of {place!r} must be a Listener's, 'unix:name#token' or 'host:port#token'")
    with contextlib.ExitStack() as undo:
        try:
            reach = partial(sockets.connect_to_unix, port) if near else partial(sockets.connect_to_tcp, host, int(port))
            connection = undo.enter_context(reach(timeout_s))
            if near and (uid := sockets.peer_credentials(connection)[1]) != os.getuid():
                raise _RefusedError(f"the server at {place} is of user {uid}, not of {os.getuid()}")
            sockets.wait_in_turns(connection)
            (pid, *sizes), handed = _greet(connection, rank, bytes.fromhex(token), sockets.Deadline(timeout_s))
            if near:
                link = LocalLink(connection, rank, pid, patience_s, *map_parts(*handed, *sizes))
            else:
                link = RemoteLink(connection, rank, pid, patience_s, place, sizes[0])
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


def _greet(connection: socket.socket, rank: int, token: bytes, waits: sockets.Waits) -> tuple[Sequence[int], list[int]]:
    """Returns the numbers and the file descriptors that a server hands to a worker which it lets in."""

    def welcome() -> tuple[Reply, list[int]]:
        reply, handed = sockets.receive_welcome(connection, waits)
        if reply.kind != Say.DONE:
            raise _RefusedError(f"the server refused rank {rank}: {reply.text}")
        return reply, handed

    challenge = welcome()[0].text
    with contextlib.suppress(BrokenPipeError):  # refused already: the reason is waiting to be read
        sockets.send_all(connection, sockets.hello(rank, challenge, token), waits)
    reply, handed = welcome()
    return reply.numbers, handed


class _SocketLink:
    """What both ends have: one conversation at a time, and signs of life from another thread.

    Args:
        connection: behind the handshake.
        rank: this worker.
        slot: its gradients.
        server_pid: the server's process.
        patience_s: see `connect`.

    Attributes:
        rank: as given.
        gradient: uint8, the slot this worker writes; anything may be written between `open_slot` and `close_slot`.
        left_behind: the connection has ended with a `LeftBehindError`: the server serves the others.
        cut: the connection has ended, and this side has not closed it.
        waits: called once per beat while a call waits, with how long it has [s]; may raise to end it.
    """

    left_behind = cut = False
    waits: Callable[[float], object] = staticmethod(lambda waited_s: None)

    def __init__(self, connection: socket.socket, rank: int, slot: Slot, server_pid: int, patience_s: float) -> None:
        self.rank = rank
        self._connection, self._slot, self._server_pid = connection, slot, server_pid
        self.gradient = slot.data
        self._sending = threading.Lock()
        self._unsent: bytes | memoryview = b""  # the rest of a sign of life; nothing else goes before it
        self._lost: ServerLostError | None = None
        self._state, self._patience_s = b"", patience_s
        self._heard_of = 0  # how often
        # In this conversation: since when this worker waits, the server's progress, and since when it has shown that.
        self._wait: tuple[float, int, float] | None = None

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """Memory of this process (uint8) that is copied to and from a device: page-locked, that is faster."""
        return (self.gradient,)

    def open_slot(self) -> None:
        """Begins to write the slot: until `close_slot` the server sees it as torn."""
        self._slot.open()

    def close_slot(self) -> int:
        """Ends writing; returns the sequence number for `Request.slot`. Bytes that are not `ready` yet become ready."""
        return self._slot.close()

    def call(self, request: Request) -> Reply:
        """Sends a request and waits for its reply.

        Raises:
            ServerLostError: the server is gone, or hangs; the connection is over then.
        """
        with self._talking(f"rank {self.rank} asked for {request.kind.name}"):
            # A server that fails may say so before it has read this: then the answer is there already.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._send(request.pack())
            return self._receive(self._waited)

    def read_state(self) -> bytes:
        """Returns what came with the last reply ``Say.STATE``."""
        return self._state

    def close(self) -> None:
        """Ends the connection; idempotent, waits for nobody."""
        self._end(ServerLostError("this link is closed"))

    def sign_of_life(self) -> None:
        """Tells the server that this process is alive; from another thread, at any time. Never raises."""
        if not self._sending.acquire(blocking=False):
            return  # what is being sent is one
        try:
            sign = self._unsent or Request(kind=Ask.ALIVE).pack()
            with contextlib.suppress(OSError):
                self._unsent = memoryview(sign)[sockets.send_now(self._connection, sign) :]
        finally:
            self._sending.release()

    # ---- the conversation -----------------------------------------------------------------------------------

    def _heard(self) -> None:
        """The server has answered, or taken something in."""
        self._heard_of += 1

    def _progress(self) -> int:
        """Returns what changes when the server's main thread goes on, which answers signs of life."""
        self.sign_of_life()
        return self._heard_of

    def _waited(self) -> None:
        """A beat has passed without a byte."""
        now_s, progress = awake_s(), self._progress()
        begun_s, seen, since_s = self._wait or (now_s - BEAT_S, progress, now_s)
        self._wait = (begun_s, progress, since_s if progress == seen else now_s)
        self.waits(now_s - begun_s)
        if (silent_s := now_s - self._wait[2]) > self._patience_s + _LATER_S:
            raise ServerLostError(self._why_silent(silent_s))

    def _why_silent(self, silent_s: float) -> str:
        """Returns words for a server that shows no progress."""
        return (
            f"the parameter server (process {self._server_pid}) has answered nothing for {silent_s:.0f} s: it hangs or"
            " is stopped, or its machine or the network failed"
        )

    def _why_lost(self, doing: str) -> ServerLostError:
        """Returns the error for a connection that broke."""
        return sockets.lost(self._server_pid, doing)

    def _last_words(self) -> ServerLostError | None:
        """Returns what the server has said before the connection broke: that it hangs, or goes on without this one."""
        try:
            while (reply := self._receive(sockets.Deadline(_LOOK_S))).kind is not Say.FAILED:
                pass
            return ServerLostError(reply.text)
        except LeftBehindError as left:
            return left
        except (OSError, EOFError, ValueError):
            return None

    def _send(self, *parts: bytes | memoryview) -> None:
        with self._sending:
            unsent, self._unsent = self._unsent, b""
            for part in (unsent, *parts):
                sockets.send_all(self._connection, part, self._waited, self._heard)

    def _receive(self, waits: sockets.Waits) -> Reply:
        while (reply := sockets.receive_reply(self._connection, waits)).kind is Say.ALIVE:
            self._heard()
        if reply.kind is Say.LEFT:
            raise LeftBehindError(reply.text)
        if reply.kind is Say.STATE:
            self._state = sockets.receive_exactly(self._connection, reply.numbers[0], waits)
        return reply

    @contextlib.contextmanager
    def _talking(self, doing: str) -> Iterator[None]:
        """Turns a broken connection into ServerLostError; half a conversation cannot be taken up again."""
        if self._lost is not None:
            raise self._lost
        self._wait = None
        try:
            yield
            return
        except LeftBehindError as left:
            self.left_behind, error = True, left
        except ServerLostError as hangs:
            error = ServerLostError(f"{hangs} ({doing})")
        except (EOFError, OSError):
            self.cut = True
            error = self._last_words() or self._why_lost(doing)
            self.left_behind = isinstance(error, LeftBehindError)
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
        self, connection: socket.socket, rank: int, server_pid: int, patience_s: float, slot: Slot,
        parameters: ParameterArea,
    ) -> None:  # fmt: skip
        super().__init__(connection, rank, slot, server_pid, patience_s)
        self._parameters = parameters

    def _progress(self) -> int:
        return self._parameters.progress

    def _why_silent(self, silent_s: float) -> str:
        pid, work = self._server_pid, work_of(self._parameters.progress)
        how = "its process is stopped" if sockets.process_state(pid) in (b"T", b"t") else "it hangs"
        return f"the parameter server (process {pid}) has been {work} for {silent_s:.0f} s: {how}"

    @property
    def shared(self) -> tuple[Tensor, ...]:
        return (self.gradient, self._parameters.data)

    def ready(self, start: int, stop: int) -> None:
        """Says that bytes ``[start, stop)`` of the slot are final; a transport over a wire may send them now.

        If they change after all, say it again: the last content counts.
        """

    def read_parameters(self, into: Tensor) -> int:
        """Copies the newest published parameters into ``into`` (uint8, all of them, any device); returns their version.

        Never torn: what is copied is one version as a whole.

        Raises:
            RuntimeError: nothing was published yet.
            ServerLostError: the server is gone (where it is asked for them).
        """
        return self._parameters.read(into)

    def newest_version(self) -> int:
        """Returns the newest published version without a message, as far as this worker can know (a lower bound).

        -1: none is known.
        """
        return self._parameters.newest()


class RemoteLink(_SocketLink):
    """Elsewhere: the server has a copy of the slot, and parameters are asked for; see `connect`."""

    def __init__(
        self, connection: socket.socket, rank: int, server_pid: int, patience_s: float, place: str, slot_bytes: int
    ) -> None:
        super().__init__(connection, rank, Slot.empty(slot_bytes), server_pid, patience_s)
        self._address, self._newest = place, -1
        self._sent: list[tuple[int, int]] = []

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
            if (reply := self._receive(self._waited)).kind is Say.FAILED:
                raise ServerLostError(reply.text)
            if reply.kind is not Say.PARAMETERS:
                raise sockets.WireError(f"{reply.kind.name} came instead of the parameters")
            if reply.version >= 0:
                target = into if into.is_cpu else torch.empty_like(into, device="cpu")
                sockets.receive_into(self._connection, bytes_of(target), self._waited, self._heard)
                into.copy_(target)  # nothing, if it is the same
                return reply.version
        raise RuntimeError("no parameters were published yet: the server publishes before it answers a worker")

    def newest_version(self) -> int:
        return self._newest

    def _receive(self, waits: sockets.Waits) -> Reply:
        reply = super()._receive(waits)
        self._newest = max(self._newest, reply.version)
        return reply

    def _why_lost(self, doing: str) -> ServerLostError:
        return ServerLostError(
            f"the connection to the parameter server at {self._address} is lost ({doing}): it has ended, or the network"
            " failed"
        )


WorkerLink = LocalLink | RemoteLink
"""A worker's end, wherever the server is."""


def _gaps(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Returns what ``spans`` leave of ``[0, size)``."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, stop in [*sorted(spans), (size, size)]:
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    return gaps
