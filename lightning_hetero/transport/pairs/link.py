"""A worker's end of `pairs` (layer T)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.transport.base import (
    LeftBehindError,
    Reply,
    Request,
    Say,
    ServerLostError,
    WorkerLink,
)
from lightning_hetero.transport.pairs.frames import FOREVER, Frame, Kind, Wire
from lightning_hetero.transport.pairs.handshake import (
    COUNTER,
    check_token,
    client,
    group,
    hello,
    put,
)
from lightning_hetero.transport.seqlock import Slot, check_flat
from lightning_hetero.transport.sockets import PAYLOAD_LIMIT_BYTES, WireError, first_line

__all__ = ["PairLink"]

_SILENCE_S = 60.0  # without an answer to a sign of life, and ...
_SLOWEST = 1e6  # ... as long as all that may be on its way takes [bytes/s]: the server is lost
_LOOK_S = 1.0  # for the server to say why it has ended the connection


class PairLink(WorkerLink):
    """A worker's end.

    Args:
        address: `PairListener.address`.
        rank: this worker.
        token: shared secret of the run.
        connect_timeout_s: how long the server may take to answer.

    Raises:
        ConnectionRefusedError: the server does not want this worker; the message says why.
        ServerLostError: there is no server, or it does not answer.
        ValueError: the address is none, or the token too short.
    """

    def __init__(self, address: str, rank: int, *, token: bytes, connect_timeout_s: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address={address!r} must be a PairListener's address, 'host:port'")
        check_token(token)
        self.rank = rank
        try:
            store = client(host, int(port), connect_timeout_s)
            generation = store.add(f"pair/{rank}", 1)
            name = f"pair/{rank}/{generation}"
            put(store, f"{name}/hello", hello(rank, generation, token))
            store.add(COUNTER, 1)
            answer = store.get(f"{name}/answer")
            reply = Reply.unpack(answer[: Reply.SIZE], answer[Reply.SIZE :])
            if reply.kind != Say.DONE:
                raise ConnectionRefusedError(f"the server refused rank {rank}: {reply.text}")
            self._name, self._store_at = name, (host, int(port))
            self._wire = Wire(group(store, rank, generation, own=1), peer=0)
        except RuntimeError as error:
            raise ServerLostError(f"no parameter server answers at {address}: {first_line(error)}") from error
        slot_bytes, self._parameter_bytes, _ = reply.numbers
        self._address = address
        self._silence_s = _SILENCE_S + (slot_bytes + self._parameter_bytes) / _SLOWEST
        self._silent_s = 0.0
        self._asking: threading.Thread | None = None  # the server, whether it lives
        self._slot = Slot.empty(slot_bytes)
        self.gradient = self._slot.data
        self._newest = -1
        self._sent: list[tuple[int, int]] = []
        self._under_way: list[Any] = []
        self._lost: ServerLostError | None = None

    def open_slot(self) -> None:
        with self._talking("opened its slot"):
            self._wait_sent()
        self._slot.open()
        self._sent = []

    def ready(self, start: int, stop: int) -> None:
        self._check_inside(start, stop)
        if start < stop:
            with self._talking("sent gradients"):
                self._sent.append((start, stop))
                self._post(Kind.CHUNK, self.gradient[start:stop], first=start, second=stop)

    def close_slot(self) -> int:
        for start, stop in _gaps(self._sent, self.gradient.numel()):
            self.ready(start, stop)
        return self._slot.close()

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        with self._talking(f"asked for {request.kind.name}", timeout_s):
            self._post(Kind.REQUEST, request.pack(), first=self._slot.sequence)
            # gloo takes 0 for its default
            limit = FOREVER if timeout_s is None else timedelta(seconds=max(timeout_s, 0.001))
            frame = self._expect(Kind.REPLY, limit)
            self._newest = max(self._newest, frame.first)
            data = self._wire.receive_body(frame, Reply.SIZE + PAYLOAD_LIMIT_BYTES)
            self._wait_sent()
            return Reply.unpack(data[: Reply.SIZE], data[Reply.SIZE :])

    def sign_of_life(self, after_s: float) -> None:
        if self._lost is not None:
            return
        if self._asking is None or not self._asking.is_alive():
            self._silent_s = 0.0
            self._asking = threading.Thread(target=self._ask, name=f"pulse-{self.rank}-answer", daemon=True)
            self._asking.start()
            return
        self._silent_s += after_s
        if self._silent_s > self._silence_s:
            self._wire.cut()

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):  # the wire is cut, which the other thread notices, too
            self._wire.live()

    def read_parameters(self, into: Tensor) -> int:
        check_flat("into", into, self._parameter_bytes)
        with self._talking("asked for the parameters"):
            self._post(Kind.PARAMETERS)
            frame = self._expect(Kind.PARAMETERS)
            if frame.first >= 0:
                target = into if into.is_cpu else torch.empty_like(into, device="cpu")
                self._wire.receive_into(frame, target)
                if target is not into:
                    into.copy_(target)
                self._newest = max(self._newest, frame.first)
                return frame.first
        raise RuntimeError("no parameters were published yet: the server publishes before it answers a worker")

    def newest_version(self) -> int:
        return self._newest

    def read_state(self) -> bytes:
        with self._talking("asked for the state"):
            self._post(Kind.STATE)
            frame = self._expect(Kind.STATE)
            return self._wire.receive_body(frame, limit_bytes=1 << 62)

    def close(self) -> None:
        if self._lost is None:
            self._lost = ServerLostError("this link is closed")
            self._wire.cut()
            if self._asking is not None:
                self._asking.join(_LOOK_S)

    def _post(self, kind: Kind, body: Tensor | bytes = b"", *, first: int = 0, second: int = 0) -> None:
        self._under_way += self._wire.post(kind, body, first=first, second=second)

    def _wait_sent(self) -> None:
        for work in self._under_way:
            work.wait(FOREVER)
        self._under_way = []

    def _expect(self, kind: Kind, timeout: timedelta = FOREVER) -> Frame:
        if (frame := self._wire.receive(timeout)).kind != kind:
            raise WireError(f"{frame.kind.name} came instead of {kind.name}")
        return frame

    @contextlib.contextmanager
    def _talking(self, doing: str, timeout_s: float | None = None) -> Iterator[None]:
        """Turns a broken wire into ServerLostError; half a conversation cannot be taken up again."""
        if self._lost is not None:
            raise self._lost
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            late = timeout_s is not None and time.monotonic() - start >= timeout_s
            what = f"rank {self.rank} {doing}"
            if late:
                text = f"no answer within {timeout_s:g} s ({what}): the parameter server hangs or is overloaded"
            else:
                text = (
                    f"the connection to the parameter server at {self._address} is lost ({what}): it has ended, or"
                    f" the network failed: {first_line(error)}"
                )
            left = "" if late else self._left()
            lost = LeftBehindError(left) if left else ServerLostError(text)
            self.left_behind, self.cut = bool(left), isinstance(error, RuntimeError) and not late
            self.close()
            self._lost = lost
            if isinstance(error, RuntimeError | ValueError):
                raise lost from error
            raise


    def _left(self) -> str:
        """Returns why the others go on without this worker, if the server still serves them; else "" ."""
        found: list[str] = []

        def look() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                socket.create_connection(self._store_at, _LOOK_S).close()  # a store would try again and again
                store, name = client(*self._store_at, timeout_s=_LOOK_S), f"{self._name}/left"
                if store.check([name]):
                    found.append(store.get(name).decode())

        looks = threading.Thread(target=look, name=f"pair-{self.rank}-left", daemon=True)
        looks.start()
        looks.join(2 * _LOOK_S)  # a store whose process is stopped lets its clients wait for ever
        return found[0] if found else ""


def _gaps(spans: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Returns what ``spans`` leave of ``[0, size)``."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, stop in sorted(spans):
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    return [*gaps, (at, size)] if at < size else gaps
