"""Worker <-> server: fixed-size control messages, a gradient slot per worker, published parameters (layer T).

    worker r                                      server
    WorkerLink.gradient --(bytes of slot r)---->  Listener.gradient(r)
    WorkerLink.call(Request) ------------------>  Listener.events() -> Arrived(r, request)
                     <--(may come much later)---  Listener.reply(r, Reply)
    WorkerLink.read_parameters() <--------------  Listener.publish(version)

Rules of both ends: each byte has one writer; no message is unpickled; a worker has at most one request
under way; the death of one worker is reported as `Gone` and disturbs no other; a late or returning worker as `Joined`,
with its rank, at any time; signs of life come as `Alive`, also while the worker computes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, TypeVar

M = TypeVar("M", bound="_Message")


class Ask(IntEnum):
    """What a worker wants."""

    EPOCH = 1  # begin an epoch at `global step`; payload: how many ends, these (samples), spans that are applied, flat;
    # or -1 and what `Streams.numbers` returns
    CLAIM = 2  # work for `global step`; payload of a finite stream, also of a PUSH: samples read, and 1 if that is all
    PUSH = 3  # the slot holds the gradients of `assignment`; if FINAL also a claim for the same global step
    MEET = 5  # answered when every live worker has asked for it with the same `global step` (a meeting number) and text
    STATE = 6  # of optimizers and epoch; payload: the version it has, to get newer parameters, too; see share_state
    ABORT = 7  # this worker failed; text says why: everybody is told
    LEAVE = 8  # this worker is done
    METRICS = 9  # what the server has counted and predicts; answered DONE with a JSON object as text, and who lives
    ALIVE = 10  # a sign of life, at any time; answered over a wire only, and with ALIVE
    CHUNK = 11  # over a wire: bytes [start, stop) of the slot follow; no answer
    PARAMETERS = 12  # over a wire: answered with the newest


class Say(IntEnum):
    """What the server answers."""

    ASSIGNED = 1  # payload: spans, flat
    PASSED = 2  # `global step` is the server's; payload: one `Word` per global step gone by
    APPLIED = 3  # a sub-step was applied (or not: version tells); go on
    MET = 4  # payload: ranks alive
    DONE = 5
    STATE = 6  # the size of the state in `numbers`; it follows
    FAILED = 7  # text says why; the run cannot go on, or, after STATE and METRICS, the question has no answer
    LEFT = 8  # text says why; the others go on without this worker, whose connection ends with this
    ALIVE = 9
    PARAMETERS = 10  # their bytes follow; version -1: there are none yet


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """A header of ``SIZE`` bytes and a payload: numbers, then text.

    Attributes:
        kind: what it is.
        epoch, global_step: where the sender is; of a meeting, its number.
        lease: the grant it is about.
        flags: bits, see `PushFlag` and `ReplyFlag`; of a meeting 1: what was done since the last one has not worked.
        numbers: 64-bit integers, e.g. the ends of global steps, or flat spans.
        text: words for people, or JSON.
    """

    kind: IntEnum
    epoch: int = 0
    global_step: int = 0
    assignment: int = 0
    flags: int = 0
    numbers: Sequence[int] = ()
    text: str = ""

    SIZE: ClassVar[int]
    _FORM: ClassVar[struct.Struct]  # of the fields, of how many numbers there are, of the payload's size
    _KINDS: ClassVar[type[IntEnum]]

    def pack(self) -> bytes:
        """Returns header and payload; raises ValueError if a number does not fit its field."""
        body = array("q", self.numbers).tobytes() + self.text.encode()
        try:
            head = self._FORM.pack(*[getattr(self, n) for n in _fields(type(self))], len(self.numbers), len(body))
        except struct.error as error:
            raise ValueError(f"{error} (integers have 32 or 64 bits, substep and micro 16) in {self!r:.500}") from error
        return head + body

    @classmethod
    def unpack(cls: type[M], head: bytes, body: bytes) -> M:
        """Returns the message; raises ValueError if it is none."""
        try:
            kind, *values, count, size = cls._FORM.unpack(head)
            if size != len(body) or not 0 <= 8 * count <= size:
                raise ValueError(f"a payload of {len(body)} bytes was announced as {size} with {count} numbers")
            given: dict[str, Any] = dict(zip(_fields(cls)[1:], values, strict=True))
            numbers, text = tuple(array("q", body[: 8 * count])), body[8 * count :].decode()
            return cls(kind=cls._KINDS(kind), **given, numbers=numbers, text=text)
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"not a {cls.__name__.lower()}: {error}") from error

    @classmethod
    def body_size(cls, head: bytes) -> int:
        """Returns how many bytes of payload follow the header."""
        return cls._FORM.unpack(head)[-1]


@cache
def _fields(kind: type[_Message]) -> tuple[str, ...]:
    """Returns the names of what is in a header, in order."""
    return tuple(field.name for field in fields(kind) if field.name not in ("numbers", "text"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(_Message):
    """One control message of a worker.

    Attributes:
        kind: what is wanted.
        substep: number of the optimizer step inside the batch (manual optimization).
        samples: samples the slot's gradients are the mean of.
        weight: what they count in the mean over the update; usually ``samples``.
        compute_s: own time since the grant [s].
        steps, zeroes: bit i: optimizer i steps after this push / was zeroed before it.
        slot: sequence number of the slot's content.
    """

    kind: Ask
    substep: int = 0
    samples: int = 0
    weight: float = 0.0
    compute_s: float = 0.0
    steps: int = 0
    zeroes: int = 0
    slot: int = 0

    _FORM: ClassVar = struct.Struct("<BiiqIHiddIIQiI")
    _KINDS: ClassVar = Ask
    SIZE: ClassVar[int] = _FORM.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(_Message):
    """One answer of the server.

    Attributes:
        kind: what it is.
        version: of the parameters; with a grant, the one to compute with.
        micro: of a grant, see `Assigned` in `stale.decide.effects`; ``numbers`` are its spans, ``flags`` are what
            `Worker.wants_return` looks at.
        hint_start, hint_end: positions worth fetching ahead.
        wasted: the worker's last push counts nothing: another one computes, or has computed, its samples.
        total: samples of an epoch of finite streams, once they are known; else 0.
    """

    kind: Say
    version: int = 0
    micro: int = 0
    hint_start: int = 0
    hint_end: int = 0
    wasted: bool = False
    total: int = 0

    _FORM: ClassVar = struct.Struct("<BiiqIqHqq?qII")
    _KINDS: ClassVar = Say
    SIZE: ClassVar[int] = _FORM.size


class ServerLostError(ConnectionError):
    """The server does not answer any more; the message says what is known of the reason."""


class LeftBehindError(ServerLostError):
    """The others have gone on without this worker, which was silent for too long; the message says how long."""


class RemoteFailureError(RuntimeError):
    """The run cannot go on; the message is the server's reason, and names the worker it came from."""


class TornSlotError(RuntimeError):
    """A slot was being written when it was read, or not written at all: its worker died or is confused."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker connected."""

    rank: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker's connection ended; ``reason`` in words."""

    rank: int
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker's request."""

    rank: int
    request: Request


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life of a worker, whatever it is doing."""

    rank: int


Happened = Joined | Gone | Arrived | Alive
