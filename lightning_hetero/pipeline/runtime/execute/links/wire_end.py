"""One end of a link over gloo, with its two threads: what is posted goes out, what comes is taken in at once (layer T).

    main thread      post ──► gloo ──► sender thread, waits until it is out and frees it
                     take ◄── queue ◄── receiver thread ◄── gloo
    on a device      post ──► copy to the host, beside computation ──► sender thread ──► gloo
                     take ◄── queue ◄── copy to the device, beside it ◄── receiver thread ◄── gloo

Both threads wait without holding the interpreter. The receiver takes in what comes at once, so a transfer overlaps
computation on both sides.

A message goes as one block: a head of fixed size, with the header in it as a rule, and behind it the payload. What is
larger than the receiver has made room for goes as two, head and payload; both sides know the room, because they know
what went before. Gloo lets less come than there is room for. So a message wakes the receiver once, as a rule, and the
sender, who only has to free it, once in a while.

Between devices that have a `DirectWay` the head alone goes over gloo, and the payload never leaves the devices; but for
the first messages of a kind, beside which the devices may still have to load what they are going to run.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.measure.device import Device, Stamp, device_of, is_out_of_memory
from lightning_hetero.pipeline.runtime.execute.links.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.links.end import Arrivals, Come, LinkEnd
from lightning_hetero.pipeline.runtime.execute.links.messages import Message, pack
from lightning_hetero.transport.sockets import FOREVER, first_line

__all__ = ["WireEnd"]

_HEAD_BYTES = 1024
_SIZES = struct.Struct("<QQQ")  # bytes of header and payload, whether that comes over the direct way
_STAMP = struct.Struct("<dd")  # when it was sent [s, time.monotonic], what came back seems to have taken [s, LinkClock]
_BEFORE_HEADER = _SIZES.size + _STAMP.size
_INLINE_BYTES = _HEAD_BYTES - _BEFORE_HEADER
_ROOM_BYTES = 4 * 2**20  # at most; the larger a message, the less an extra block matters
_REMEMBERED = 8  # messages, whose largest determines the room
_HELD, _HELD_BYTES = 8, 2**20  # messages, and their bytes, that may wait together to be freed
# Parts, gloo's works that send them, after what they or the payload can be sent, payload for the direct way.
_Job = tuple[list[Tensor], list[Any], Stamp | None, Tensor | None]
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
    device: Device
    way: DirectWay | None
    direct: Container[Any]
    arrivals: Arrivals


class WireEnd(LinkEnd):
    """This rank's end.

    Args:
        wire: gloo process group; untyped, because torch's stubs do not know of its ``send`` and ``recv``.
        peer: the neighbour's rank in that group.
        names: of the threads, of the one that sends and of the one that receives.
        device: of this rank's layers.
        way: from device to device; None: payloads go over the wire.
        direct: kinds of messages whose payloads take the way.
        arrivals: of what comes.
    """

    def __init__(
        self,
        wire: Any,
        peer: int,
        *,
        names: tuple[str, str],
        device: Device,
        way: DirectWay | None,
        direct: Container[Any],
        arrivals: Arrivals,
    ) -> None:
        self._given = given = _Given(
            wire=wire, peer=peer, names=names, device=device, way=way, direct=direct, arrivals=arrivals
        )
        self._sender, self._receiver = _Sender(given), _Receiver(given)

    @property
    def broken(self) -> str | Exception | None:
        return self._sender.broken or self._receiver.broken

    def post(self, message: Message | None) -> None:
        self._sender.post(message)

    def wait_out(self, timeout_s: float) -> bool:
        return self._sender.wait_out(timeout_s)

    def take(self, timeout_s: float) -> Come | str | Exception | None:
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
        self.stream = given.device.side_stream()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.given.device.make_current()  # else pinned memory would belong to the first one
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
        self.broken: str | Exception | None = None
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
        header, direct, ready = b"", None, None
        block = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        if message is not None and way is not None and message.kind in self.given.direct:
            header, payload = pack(message)
            if payload.numel():
                direct, ready = payload.to(device.device), device.stamp()
        elif message is not None:
            header, block = pack(message, front_bytes=_HEAD_BYTES)
            if device_of(block.device).asynchronous:
                block, ready = self._on_host(block)
        at_once = way is None and ready is None  # else the thread sends, one after the other
        payload_bytes = block.numel() - _HEAD_BYTES
        announced_bytes = payload_bytes if direct is None else direct.numel()
        inline = len(header) <= _INLINE_BYTES
        head = block[:_HEAD_BYTES].numpy().data
        _SIZES.pack_into(head, 0, len(header), announced_bytes, direct is not None)
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
        if not at_once or len(self._held) >= _HELD or self._held_bytes >= _HELD_BYTES:
            self._hand_over()
        if message is None:
            self.give_up()

    def _on_host(self, block: Tensor) -> tuple[Tensor, Stamp]:
        """Starts to copy a block to the host, beside what is computed; returns where to, and after what it is there."""
        device = self.given.device
        room, packed = device.host_bytes(block.numel()), device.stamp()
        with device.on(self.stream):
            packed.hold()
            device.keep_for_stream(block)
            room[_HEAD_BYTES:].copy_(block[_HEAD_BYTES:], non_blocking=True)
            return room, device.stamp()

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
                    if ready is not None:
                        ready.wait()
                        self._stamp(parts[0])
                    if direct is None or self.given.way is None:
                        self._let_out(works or self._send(parts))
                    else:
                        self.given.way.send(direct, partial(self._announce, parts))
                    del parts, direct  # their memory must not live until the next one comes
                    self._gone += 1
                with self._out:
                    self._out.notify_all()
        except RuntimeError as error:
            self.broken = error if is_out_of_memory(error) else first_line(error)

    def _announce(self, parts: list[Tensor]) -> None:
        """Says that a payload comes over the direct way, and waits until there is room."""
        self._let_out(self._send(parts))
        clear = torch.empty(1, dtype=torch.uint8)
        self.given.wire.recv([clear], self.given.peer, _TAG_CLEAR).wait(FOREVER)

    def _let_out(self, works: list[Any]) -> None:
        while works:
            works.pop(0).wait(FOREVER)

    def _stamp(self, head: Tensor) -> None:
        """Notes that a message is ready to go."""
        front = head[:_BEFORE_HEADER].numpy().data
        _STAMP.pack_into(front, _SIZES.size, time.monotonic(), self.given.arrivals.clock.least_s)

    def _send(self, parts: list[Tensor]) -> list[Any]:
        return [self.given.wire.send([part], self.given.peer, _TAG) for part in parts]


class _Receiver(_LinkThread):
    """Takes in what comes.

    Attributes:
        broken: why nothing can come any more; None as long as it can.
    """

    def __init__(self, given: _Given) -> None:
        super().__init__(given, given.names[1])
        self.broken: str | Exception | None = None
        self._room = _Room()
        self._come: SimpleQueue[Come | str | Exception] = SimpleQueue()
        self._thread.start()

    def take(self, timeout_s: float) -> Come | str | Exception | None:
        """Returns what comes next, why none will come, what went wrong on this side, or None after the timeout."""
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
            closed = f"its connection is closed: {first_line(error)}"
            self.broken = why = error if is_out_of_memory(error) else closed
            self._come.put(why)

    def _next(self) -> Come | None:
        """Returns the next message; None after the last."""
        device, way = self.given.device, self.given.way
        block = self._receive(self._room.size_bytes, device.host_bytes)
        head = block[:_HEAD_BYTES].numpy().tobytes()
        header_bytes, payload_bytes, direct = _SIZES.unpack_from(head)
        sent_s, back_s = _STAMP.unpack_from(head, _SIZES.size)
        if not header_bytes:
            return None
        arrivals = self.given.arrivals
        if direct:
            assert way is not None
            self._room.went(0)
            header = self._header(head, header_bytes)
            payload = way.receive(payload_bytes, self._clear)
            return header, payload, arrivals.usable_s(sent_s, payload_bytes), None
        size_bytes = _HEAD_BYTES + payload_bytes
        if size_bytes > block.numel():
            payload = self._receive(payload_bytes, device.host_bytes)
        else:
            payload = block[_HEAD_BYTES:size_bytes]
            if 2 * size_bytes <= block.numel() and not device.asynchronous:  # it would keep more memory than it has
                payload = payload.clone()
        self._room.went(payload_bytes)
        header, usable_s = self._header(head, header_bytes), arrivals.usable_s(sent_s, payload_bytes)
        arrivals.came(
            sent_s=sent_s, back_s=back_s, arrived_s=time.monotonic(), usable_s=usable_s, size_bytes=payload_bytes
        )
        with device.on(self.stream):
            payload = payload.to(device.device, non_blocking=True)
            return header, payload, usable_s, device.stamp()

    def _header(self, head: bytes, size_bytes: int) -> bytes:
        if size_bytes <= _INLINE_BYTES:
            return head[_BEFORE_HEADER : _BEFORE_HEADER + size_bytes]
        return self._receive(size_bytes, _plain).numpy().tobytes()

    def _clear(self) -> None:
        self.given.wire.send([torch.empty(1, dtype=torch.uint8)], self.given.peer, _TAG_CLEAR).wait(FOREVER)

    def _receive(self, size_bytes: int, room: Callable[[int], Tensor]) -> Tensor:
        target = room(size_bytes)
        if size_bytes:
            self.given.wire.recv([target], self.given.peer, _TAG).wait(FOREVER)
        return target


def _plain(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)
