"""A worker's end of `shared_memory` (layer T)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

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
from lightning_hetero.transport.shared_memory.directory import map_parameters, map_slot, remove_abandoned
from lightning_hetero.transport.sockets import (
    Hello,
    lost,
    peer_credentials,
    receive_reply,
    send_all,
    send_some,
)

__all__ = ["SharedMemoryLink"]


class SharedMemoryLink(WorkerLink):
    """A worker's end.

    Args:
        address: `SharedMemoryListener.address`.
        rank: this worker.
        connect_timeout_s: how long the server may take to answer.

    Raises:
        ConnectionRefusedError: the server does not want this worker; the message says why.
        ServerLostError: there is no server, or it does not answer.
    """

    def __init__(self, address: str, rank: int, *, connect_timeout_s: float = 60.0) -> None:
        folder, _, token = address.rpartition("#")
        if not folder or len(token) != 32:
            raise ValueError(f"address={address!r} must be a SharedMemoryListener's address, 'folder#token'")
        self.rank = rank
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sending = threading.Lock()
        self._lost: ServerLostError | None = None
        self._server_pid = 0
        try:
            sizes = self._greet(Path(folder), Hello(rank, bytes.fromhex(token)), connect_timeout_s)
            slot_bytes, parameter_bytes, self._server_pid = sizes
            self._slot = map_slot(Path(folder), rank, slot_bytes)
            self._parameters = map_parameters(Path(folder), parameter_bytes)
        except BaseException:
            self._connection.close()
            raise
        self.gradient = self._slot.data
        self._state = Path(folder) / "state"

    def _greet(self, folder: Path, hello: Hello, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.settimeout(timeout_s)
            self._connection.connect(str(folder / "control"))
            _, uid = peer_credentials(self._connection)
            if uid != os.getuid():
                raise ConnectionRefusedError(f"the server at {folder} is of user {uid}, not of {os.getuid()}")
            with contextlib.suppress(BrokenPipeError):  # refused already: the reason is waiting to be read
                send_all(self._connection, hello.pack(), deadline)
            reply = receive_reply(self._connection, deadline)
        except TimeoutError:
            raise ServerLostError(f"the server at {folder} did not answer within {timeout_s:g} s") from None
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, EOFError) as error:
            if isinstance(error, ConnectionRefusedError) and error.errno is None:
                raise
            raise ServerLostError(f"no server at {folder}: it has ended, or never was there") from error
        if reply.kind != Say.DONE:
            raise ConnectionRefusedError(f"the server refused rank {hello.rank}: {reply.text}")
        return list(reply.numbers)

    @property
    def shared(self) -> tuple[Tensor, ...]:
        return (self.gradient, self._parameters.data)

    def open_slot(self) -> None:
        self._slot.open()

    def ready(self, start: int, stop: int) -> None:
        self._check_inside(start, stop)

    def close_slot(self) -> int:
        return self._slot.close()

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        if self._lost is not None:
            raise self._lost
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        doing = f"rank {self.rank} asked for {request.kind.name}"
        try:
            # A server that fails may say so before it has read this: then the answer is there already.
            with contextlib.suppress(BrokenPipeError), self._sending:
                send_all(self._connection, request.pack(), deadline)
            reply = receive_reply(self._connection, deadline)
            if reply.kind is not Say.LEFT:
                return reply
            self.left_behind, error = True, LeftBehindError(reply.text)
        except TimeoutError:
            error = ServerLostError(
                f"no answer within {timeout_s:g} s ({doing}): the parameter server (process"
                f" {self._server_pid}) is stopped, overloaded or hangs"
            )
        except (EOFError, OSError):
            self.cut = True
            error = lost(self._server_pid, doing)
            remove_abandoned(self._state.parent)
        except BaseException:  # half a conversation cannot be taken up again
            self._end(ServerLostError("this link was interrupted in the middle of a call"))
            raise
        self._end(error)
        raise error

    def sign_of_life(self, after_s: float) -> None:
        del after_s
        rest = memoryview(Request(kind=Ask.ALIVE).pack())
        with contextlib.suppress(OSError), self._sending:
            while rest and self._lost is None:
                with contextlib.suppress(TimeoutError, BlockingIOError):  # of the other thread's: half would be wrong
                    rest = rest[send_some(self._connection, rest) :]

    def read_parameters(self, into: Tensor) -> int:
        return self._parameters.read(into)

    def newest_version(self) -> int:
        return self._parameters.newest()

    def read_state(self) -> bytes:
        return self._state.read_bytes()

    def close(self) -> None:
        self._end(ServerLostError("this link is closed"))

    def _end(self, reason: ServerLostError) -> None:
        if self._lost is None:
            self._lost = reason
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
