"""What travels between the two ends of a pair of processes: fixed-size frames, each followed by its body (layer T).

    worker                                        server
    CHUNK(start, stop) + bytes  -------------->   straight into the slot, which is torn from now on
    REQUEST(sequence) + Request, payload  ---->   the slot has this number, odd = being written; Arrived
                      <------------------------   REPLY(newest version) + Reply, payload
    PARAMETERS  ------------------------------>
                      <------------------------   PARAMETERS(version) + bytes
    STATE  ----------------------------------->
                      <------------------------   STATE + bytes
    ALIVE, at any time  ---------------------->
                      <------------------------   a byte: so is the server

All tensors are uint8; nothing is unpickled. Gloo matches a receive with the next message of the same tag, whose size
must be the receive's: hence frames of one size, which announce the size of what follows. A small body travels inside,
a very large one in pieces: each that has come, or gone, is a sign of life.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from lightning_hetero.transport.sockets import WireError

__all__ = ["FOREVER", "PIECE_BYTES", "Frame", "Kind", "Wire"]

FOREVER = timedelta(days=365)  # liveness is decided elsewhere; gloo ends a pair whose wait times out
_FRAME = struct.Struct("<4sIqqQ")
_MAGIC = b"lhp1"
PIECE_BYTES = 16 << 20
_TAG, _TAG_OF_THE_END, _TAG_OF_LIFE = 0, 1, 2
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Kind(IntEnum):
    CHUNK = 1
    REQUEST = 2
    REPLY = 3
    PARAMETERS = 4
    STATE = 5
    ALIVE = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """A header; a small body travels inside.

    Attributes:
        kind: what it is.
        first, second: sequence number, byte range or version, by kind.
        size_bytes: size of the body; up to ``INLINE_BYTES`` it is in here, else it follows.
        inline: the small body.
    """

    kind: Kind
    first: int = 0
    second: int = 0
    size_bytes: int = 0
    inline: bytes = b""

    SIZE = 256
    INLINE_BYTES = SIZE - _FRAME.size

    def pack(self) -> bytes:
        """Returns ``SIZE`` bytes."""
        head = _FRAME.pack(_MAGIC, self.kind, self.first, self.second, self.size_bytes)
        return (head + self.inline).ljust(self.SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Returns the frame; raises WireError if it is none."""
        if len(data) != cls.SIZE:
            raise WireError(f"{len(data)} bytes are not a frame of {cls.SIZE}")
        magic, kind, first, second, size_bytes = _FRAME.unpack(data[: _FRAME.size])
        if magic != _MAGIC or kind not in Kind.__members__.values():
            raise WireError(f"not a frame of this protocol: magic {magic!r}, kind {kind}")
        inline = data[_FRAME.size :][:size_bytes] if size_bytes <= cls.INLINE_BYTES else b""
        return cls(Kind(kind), first, second, size_bytes, inline)


class Wire:
    """One end of a group of two processes. Sends may be in any thread, receives in one at a time.

    Args:
        group: of two ranks, for this pair alone.
        peer: the other one's rank in it.
        progress: called when a piece of a body has come, or has gone in a `send`, and more follow.

    Every wait raises RuntimeError when the peer is gone or the wire was cut.
    """

    def __init__(self, group: ProcessGroupGloo, peer: int, progress: Callable[[], None] = lambda: None) -> None:
        self._group: Any = group  # torch's stubs do not know of send and recv
        self._peer, self._progress = peer, progress
        self._posting = threading.Lock()  # what belongs together follows one another
        self._answered: list[Any] = []

    def post(
        self, kind: Kind, body: Tensor | bytes = b"", *, first: int = 0, second: int = 0
    ) -> list[Any]:
        """Sends without waiting; the works returned must be kept, and ``body`` unchanged, until they are done."""
        if isinstance(body, bytes):
            body = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else _NOTHING
        size_bytes = body.numel()
        inline = body.numpy().tobytes() if size_bytes <= Frame.INLINE_BYTES else b""
        frame = Frame(kind, first, second, size_bytes, inline)
        head = torch.frombuffer(bytearray(frame.pack()), dtype=torch.uint8)
        parts = [head, *body.split(PIECE_BYTES)] if size_bytes > Frame.INLINE_BYTES else [head]
        with self._posting:
            return [self._group.send([part], self._peer, _TAG) for part in parts]

    def send(self, kind: Kind, body: Tensor | bytes = b"", *, first: int = 0, second: int = 0) -> None:
        """Sends and waits until it is under way."""
        head, *parts = self.post(kind, body, first=first, second=second)
        head.wait(FOREVER)
        self._wait(parts)

    def _wait(self, parts: list[Any]) -> None:
        for left, work in zip(reversed(range(len(parts))), parts, strict=True):
            work.wait(FOREVER)
            if left:
                self._progress()

    def live(self) -> None:
        """Says that this end lives, and waits until the other one says so, too."""
        self.send(Kind.ALIVE)
        self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _TAG_OF_LIFE).wait(FOREVER)

    def answer_life(self) -> None:
        """Answers an ALIVE; the peer waits for it, so one is under way at a time."""
        self._answered = [self._group.send([torch.empty(1, dtype=torch.uint8)], self._peer, _TAG_OF_LIFE)]

    def receive(self, timeout: timedelta = FOREVER) -> Frame:
        """Waits for the next frame; after ``timeout`` the wire is cut (RuntimeError)."""
        head = torch.empty(Frame.SIZE, dtype=torch.uint8)
        self._group.recv([head], self._peer, _TAG).wait(timeout)
        return Frame.unpack(head.numpy().tobytes())

    def receive_into(self, frame: Frame, target: Tensor) -> None:
        """Takes in the body of ``frame``; raises WireError unless it has exactly ``target``'s size."""
        if frame.size_bytes != target.numel():
            raise WireError(f"{frame.kind.name} announced {frame.size_bytes} bytes, not {target.numel()}")
        if frame.size_bytes > Frame.INLINE_BYTES:
            self._wait([self._group.recv([part], self._peer, _TAG) for part in target.split(PIECE_BYTES)])
        elif frame.size_bytes:
            target.copy_(torch.frombuffer(bytearray(frame.inline), dtype=torch.uint8))

    def receive_body(self, frame: Frame, limit_bytes: int) -> bytes:
        """Returns the body of ``frame``; raises WireError if it is larger than ``limit_bytes``."""
        if frame.size_bytes <= Frame.INLINE_BYTES:
            return frame.inline
        if frame.size_bytes > limit_bytes:
            raise WireError(f"{frame.kind.name} announced {frame.size_bytes} bytes, the limit is {limit_bytes}")
        body = torch.empty(frame.size_bytes, dtype=torch.uint8)
        self.receive_into(frame, body)
        return body.numpy().tobytes()

    def cut(self) -> None:
        """Ends the connection: every wait on either side raises. Idempotent, from any thread.

        Gloo offers no abort for a receive under way, but ends the pair when any of its waits times out.
        """
        end = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self._group.recv([end], self._peer, _TAG_OF_THE_END).wait(timedelta(milliseconds=1))
