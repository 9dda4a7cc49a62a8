"""One end of a link over gloo, with its two threads: what is posted goes out, what comes is taken in at once (layer T).

    main thread      post ──► gloo ──► sender thread, waits until it is out and frees it
                     take ◄── queue ◄── receiver thread ◄── gloo

Both threads wait without holding the interpreter. The receiver takes in what comes at once, so a transfer overlaps
computation on both sides.

A message goes as one block: a head of fixed size, with the header in it as a rule, and behind it the payload. What is
larger than the receiver has made room for goes as two, head and payload; both sides know the room, because they know
what went before. Gloo lets less come than there is room for. So a message wakes the receiver once, as a rule, and the
sender, who only has to free it, once in a while.

Between devices that have a `DirectWay` the head alone goes over gloo, and the payload never leaves the devices.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.runtime.execute.links.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.links.end import Arrivals, Come, LinkEnd
from lightning_hetero.pipeline.runtime.execute.links.messages import Message, pack
from lightning_hetero.transport.pairs.frames import FOREVER
from lightning_hetero.transport.sockets import first_line

__all__ = ["WireEnd"]

_HEAD_BYTES = 1024
_SIZES = struct.Struct("<QQ")  # bytes of header and payload
_STAMP = struct.Struct("<dd")  # when it was sent [s, time.monotonic], what came back seems to have taken [s, LinkClock]
_BEFORE_HEADER = _SIZES.size + _STAMP.size
_INLINE_BYTES = _HEAD_BYTES - _BEFORE_HEADER
_ROOM_BYTES = 4 * 2**20  # at most; the larger a message, the less an extra block matters
_REMEMBERED = 8  # messages, whose largest determines the room
_HELD, _HELD_BYTES = 8, 2**20  # messages, and their bytes, that may wait together to be freed
# Parts, gloo's works that send them, event after which they or the payload can be sent, payload for the direct way.
_Job = tuple[list[Tensor], list[Any], Any, Tensor | None]
_TAG, _TAG_OF_THE_END, _TAG_CLEAR = 0x9A55, 0x9A56, 0x9A57


class _Room:
    """How many bytes of the next message the receiver takes as one block; the same on both sides."""

    def __init__(self) -> None:
        self.size_bytes = _HEAD_BYTES
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def went(self, payload_bytes: int) -> None:
        """Takes note of a message."""
        self._sizes.append(_HEAD_BYTES + payload_bytes)
        self.size_bytes = max([size for size in self._sizes if size <= _ROOM_BYTES], default=_HEAD_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """What both threads of an end are given; see `WireEnd`."""

    wire: Any
    peer: int
    names: tuple[str, str]
    device: torch.device
    way: DirectWay | None
    arrivals: Arrivals


class WireEnd(LinkEnd):
    """This rank's end.

    Args:
        wire: gloo process group; untyped, because torch's stubs do not know of its ``send`` and ``recv``.
        peer: the neighbour's rank in that group.
        names: of the threads, of the one that sends and of the one that receives.
        device: of this rank's layers.
        way: from device to device; None: payloads go over the wire.
        arrivals: of what comes.
    """

    def __init__(
        self,
        wire: Any,
        peer: int,
        *,
        names: tuple[str, str],
        device: torch.device,
        way: DirectWay | None,
        arrivals: Arrivals,
    ) -> None:
        self._given = given = _Given(wire=wire, peer=peer, names=names, device=device, way=way, arrivals=arrivals)
        self._sender, self._receiver = _Sender(given), _Receiver(given)

    @property
    def broken(self) -> str | None:
        return self._sender.broken or self._receiver.broken

    def post(self, message: Message | None) -> None:
        self._sender.post(message)

    def wait_out(self, timeout_s: float) -> bool:
        return self._sender.wait_out(timeout_s)

    def take(self, timeout_s: float) -> Come | str | None:
        return self._receiver.take(timeout_s)

    def ended(self, timeout_s: float) -> bool:
        return self._receiver.join(timeout_s) and self._sender.join(timeout_s)

    def abort(self) -> None:
        """Ends all links that share the wire, too."""
        self._sender.give_up()
        if self._given.way is not None:
            self._given.way.abort()
        # Gloo offers no abort for a receive under way, but closes its connections when any of its waits times out.
        with contextlib.suppress(RuntimeError):  # always; and some are closed already
            end = torch.empty(1, dtype=torch.uint8)
            self._given.wire.recv([end], self._given.peer, _TAG_OF_THE_END).wait(timedelta(milliseconds=1))


class _LinkThread:
    """A thread for one direction of one link. A daemon: what it waits for may never come."""

    def __init__(self, given: _Given, name: str) -> None:
        self.given = given
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        if self.given.device.type == "cuda":  # else pinned memory would belong to the first one [CUDA, untested]
            torch.cuda.set_device(self.given.device)
        self._work()

    def _work(self) -> None:
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        """Returns whether the thread has ended, after at most ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _Sender(_LinkThread):
    """Sends what is posted.

    Attributes:
        broken: why nothing can be sent any more; None as long as it can.
    """

    def __init__(self, given: _Given) -> None:
        super().__init__(given, given.names[0])
        self.broken: str | None = None
        self._room = _Room()
        self._posted: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._held: list[_Job] = []  # on their way, not yet given to the thread
        self._held_bytes = 0
        self._sent = 0  # posted; counted by the thread that posts
        self._gone = 0  # of these, out; counted by the other
        self._out = threading.Condition()
        self._thread.start()

    def post(self, message: Message | None) -> None:
        """Posts a message; None: the last, without a header."""
        device, way = self.given.device, self.given.way
        at_once = device.type == "cpu" or way is not None  # else when it has been copied to the host
        header, direct, ready = b"", None, None
        block = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        if message is not None and way is not None:
            header, payload = pack(message)
            if payload.numel():
                direct = payload.to(device)
                ready = _event_on(device)
        elif message is not None:
            header, block = pack(message, front_bytes=_HEAD_BYTES)
        if block.device.type != "cpu":  # [CUDA, untested]
            on_host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
            on_host[_HEAD_BYTES:].copy_(block[_HEAD_BYTES:], non_blocking=True)
            ready = _event_on(block.device)
            block = on_host
        payload_bytes = block.numel() - _HEAD_BYTES
        announced_bytes = payload_bytes if direct is None else direct.numel()
        inline = len(header) <= _INLINE_BYTES
        head = block[:_HEAD_BYTES].numpy().data
        _SIZES.pack_into(head, 0, len(header), announced_bytes)
        self._stamp(block)
        if inline:
            head[_BEFORE_HEADER : _BEFORE_HEADER + len(header)] = header
        parts = [block]
        if block.numel() > self._room.size_bytes:
            parts = [block[:_HEAD_BYTES], block[_HEAD_BYTES:]]
        self._room.went(payload_bytes)
        if not inline:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._sent += 1
        works: list[Any] = []
        if at_once:
            try:
                works = self._send(parts)
            except RuntimeError as error:
                self.broken = first_line(error)
        self._held.append((parts, works, ready, direct))
        self._held_bytes += block.numel()
        thread_sends = direct is not None or not at_once
        if thread_sends or len(self._held) >= _HELD or self._held_bytes >= _HELD_BYTES:
            self._hand_over()
        if message is None:
            self.give_up()

    def _hand_over(self) -> None:
        """Lets the thread wait for all that is held: each time it wakes costs as much as a small message."""
        if self._held:
            self._posted.put(self._held)
            self._held, self._held_bytes = [], 0

    def give_up(self) -> None:
        """Lets the thread end after what it is at."""
        self._hand_over()
        self._posted.put(None)

    def wait_out(self, timeout_s: float) -> bool:
        """Returns whether all is out, after at most ``timeout_s``."""
        self._hand_over()
        with self._out:
            return self._out.wait_for(lambda: self._gone == self._sent, timeout_s)

    def _work(self) -> None:
        try:
            while (jobs := self._posted.get()) is not None:
                while jobs:
                    parts, works, ready, direct = jobs.pop(0)
                    if ready is not None and direct is None:
                        ready.synchronize()
                        self._stamp(parts[0])  # [CUDA, untested]
                    works = works or self._send(parts)
                    while works:
                        works.pop(0).wait(FOREVER)
                    if direct is not None and self.given.way is not None:
                        clear = torch.empty(1, dtype=torch.uint8)
                        self.given.wire.recv([clear], self.given.peer, _TAG_CLEAR).wait(FOREVER)
                        self.given.way.send(direct, ready)
                    del parts, direct  # their memory must not live until the next one comes
                    self._gone += 1
                with self._out:
                    self._out.notify_all()
        except RuntimeError as error:
            self.broken = first_line(error)

    def _stamp(self, head: Tensor) -> None:
        """Notes that a message is ready to go."""
        front = head[:_BEFORE_HEADER].numpy().data
        _STAMP.pack_into(front, _SIZES.size, time.monotonic(), self.given.arrivals.clock.least_s)

    def _send(self, parts: list[Tensor]) -> list[Any]:
        return [self.given.wire.send([part], self.given.peer, _TAG) for part in parts]


def _event_on(device: torch.device) -> Any:
    """Returns an event after what the current stream does now; None where nothing is waited for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _Receiver(_LinkThread):
    """Takes in what comes.

    Attributes:
        broken: why nothing can come any more; None as long as it can.
    """

    def __init__(self, given: _Given) -> None:
        super().__init__(given, given.names[1])
        self.broken: str | None = None
        self._room = _Room()
        self._come: SimpleQueue[Come | str] = SimpleQueue()
        self._thread.start()

    def take(self, timeout_s: float) -> Come | str | None:
        """Returns what comes next, why none will come, or None after the timeout."""
        try:
            return self._come.get(timeout=timeout_s)
        except Empty:
            return None

    def _work(self) -> None:
        try:
            while (came := self._next()) is not None:
                self._come.put(came)
                del came  # its memory must not live until the next one comes
            self._come.put("it has closed its links")
        except RuntimeError as error:
            self.broken = f"its connection is closed: {first_line(error)}"
            self._come.put(self.broken)

    def _next(self) -> Come | None:
        """Returns the next message; None after the last."""
        pinned = self.given.device.type == "cuda"
        block = self._receive(self._room.size_bytes, pinned=pinned)
        head = block[:_HEAD_BYTES].numpy().tobytes()
        header_bytes, payload_bytes = _SIZES.unpack_from(head)
        sent_s, back_s = _STAMP.unpack_from(head, _SIZES.size)
        if not header_bytes:
            return None
        size_bytes = _HEAD_BYTES + payload_bytes
        if self.given.way is not None:
            header = self._header(head, header_bytes)
            payload, work = self._directly(self.given.way, payload_bytes)
            return header, payload, self.given.arrivals.usable_s(sent_s, payload_bytes), work
        if size_bytes > block.numel():
            payload = self._receive(payload_bytes, pinned=pinned)
        elif 2 * size_bytes > block.numel():
            payload = block[_HEAD_BYTES:size_bytes]
        else:  # it would keep more memory than it has
            payload = block[_HEAD_BYTES:size_bytes].clone()
        self._room.went(payload_bytes)
        header, usable_s = self._header(head, header_bytes), self.given.arrivals.usable_s(sent_s, payload_bytes)
        self.given.arrivals.came(
            sent_s=sent_s, back_s=back_s, arrived_s=time.monotonic(), usable_s=usable_s, size_bytes=payload_bytes
        )
        return header, payload, usable_s, None

    def _header(self, head: bytes, size_bytes: int) -> bytes:
        if size_bytes <= _INLINE_BYTES:
            return head[_BEFORE_HEADER : _BEFORE_HEADER + size_bytes]
        return self._receive(size_bytes).numpy().tobytes()

    def _directly(self, way: DirectWay, size_bytes: int) -> tuple[Tensor, Any]:
        """Returns room for a payload, cleared for the sender, and what brings it; None: it has come."""
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self.given.device), None
        payload, work = way.post_receive(size_bytes)
        self.given.wire.send([torch.empty(1, dtype=torch.uint8)], self.given.peer, _TAG_CLEAR).wait(FOREVER)
        return payload, way.settled(work)

    def _receive(self, size_bytes: int, *, pinned: bool = False) -> Tensor:
        target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        if size_bytes:
            self.given.wire.recv([target], self.given.peer, _TAG).wait(FOREVER)
        return target
