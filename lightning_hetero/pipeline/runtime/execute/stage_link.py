"""The link of one rank to one neighbour in a pipeline: first in, first out, during computation (layer T).

    training thread   send ──► copy to the host, during computation ──► sending thread ──► gloo
                      receive ◄── queue ◄── copy to the device, during it ◄── receiving thread ◄── gloo

A message goes as one block: a head of fixed size, with the header in it as a rule, and behind it the payload. For the
next messages the receiver has posted blocks, which gloo fills at once. What is larger than its block goes in
pieces; both sides know how large a block is, because they know what went before. Gloo lets less come than there is room
for.

Between devices that have a `DirectWay` the head alone goes over gloo, and the payload never leaves the devices; except
the first messages of a kind, during which the devices may still have to load what they are going to run.

Gloo can wait for a neighbour without end or not at all: a wait that times out closes its connections. So the threads
wait without end, the training thread looks at the failure board while it waits for them, and closes the connections
when there is a reason to.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.measure.device import HostDevice, Stamp, device_of, is_out_of_memory
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.messages import Message, pack, unpack
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import LOOK_S, FailureBoard
from lightning_hetero.transport.sockets import FOREVER, first_line

_HEAD_BYTES = 1024
_AHEAD = 2  # blocks that are posted: one fills while the message before is used
# When it was sent [s, time.monotonic]; what came back seems to have taken [s, LinkClock].
_STAMP = struct.Struct("<dd")
# Behind that: bytes of header and payload, whether that comes over the direct way.
_FRONT = struct.Struct("<ddQQQ")
_BEFORE_HEADER = _FRONT.size
_INLINE_BYTES = _HEAD_BYTES - _BEFORE_HEADER
_ROOM_BYTES = 64 * 2**20  # of a block, at most
_REMEMBERED = 8  # messages, whose largest determines the size of a block
_ARRIVED_S = 5e-5  # a wait that took less found the message there
_TAG, _TAG_CLEAR, _TAG_REST = 0x9A55, 0x9A57, 0x9A58
_CLOSED = "it has closed its links"


class _Rooms:
    """How large the blocks of the next messages are; the same on both sides.

    Attributes:
        next: of those that are posted [bytes].
    """

    def __init__(self) -> None:
        self.next = deque([_HEAD_BYTES] * _AHEAD, maxlen=_AHEAD)
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def add(self, payload_bytes: int) -> None:
        """Takes note of a message: of what size the block for the one is that comes `_AHEAD` behind it."""
        self._sizes.append(_HEAD_BYTES + payload_bytes)
        self.next.append(max([size for size in self._sizes if size <= _ROOM_BYTES], default=_HEAD_BYTES))


class _Job(NamedTuple):
    """A message on its way out.

    Attributes:
        parts: its head, with the payload or without, and what goes behind it.
        ready: after what on the device it can be sent.
        direct: payload for the direct way.
    """

    parts: Sequence[Tensor]
    ready: Stamp | None = None
    direct: Tensor | None = None


class _Come(NamedTuple):
    """A message that has come.

    Attributes:
        header: see `messages.pack`.
        payload: on the device of the layers.
        arrived: after what on the device it may be used; None: it is there.
    """

    header: bytes
    payload: Tensor
    arrived: Stamp | None


class StageLink:
    """This rank's end of the link to one neighbour. Used by one thread.

    Args:
        wire: gloo process group with both in it; carries nothing else between them. Several links may share it, of
            different neighbours or one after the other.
        peer: the neighbour, global rank.
        rank: this process, global.
        device: of this rank's layers.
        clock: times what comes.
        failures: looked at while waiting.
        timeout_s: how long a message is waited for at most.
        way: from device to device; None: payloads go over the wire.
    """

    def __init__(
        self, wire: Any, peer: int, *, rank: int, device: HostDevice, clock: LinkClock, failures: FailureBoard,
        timeout_s: float, way: DirectWay | None = None,
    ) -> None:  # fmt: skip
        self.peer, self.clock, self._device, self._way = peer, clock, device, way
        self._failures, self._timeout_s = failures, timeout_s
        self._wire, self._there = wire, dist.get_group_rank(wire, peer)
        self._broken: str | Exception | None = None  # why nothing can be sent or received any more
        self._rooms = _Rooms(), _Rooms()  # of what goes, and of what comes
        self._blocks: deque[tuple[Tensor, Any]] = deque()  # posted, and the works that fill them
        self._kinds: tuple[set[Any], set[Any]] = set(), set()  # of messages: in this step or before; that go directly
        self._streams = [device.side_stream() for _ in range(2)]
        # Messages to be let out; what is to be told when those before are out; None: the end.
        self._posted: SimpleQueue[_Job | threading.Event | None] = SimpleQueue()
        self._arrived: SimpleQueue[_Come | str | Exception] = SimpleQueue()
        for _ in range(_AHEAD):
            self._post_block(_HEAD_BYTES)
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"pipeline-{what}-{rank}-{peer}", daemon=True)
            for what, work in (("receive", self._take_in), ("send", self._send_on))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Any) -> None:
        """A thread; the training thread raises whatever goes wrong in it."""
        self._device.make_current()  # else pinned memory would belong to the first one
        try:
            work()
        except Exception as error:
            gloos = isinstance(error, RuntimeError) and not is_out_of_memory(error)
            self._broken = why = f"its connection is closed: {first_line(error)}" if gloos else error
            self._arrived.put(why)

    # ---- out ---------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Posts a message, does not wait for it to be out.

        Raises:
            RuntimeError: the peer is gone; names the cause.
            TypeError: a value that cannot travel.
        """
        device, (seen, direct) = self._device, self._kinds
        seen.add(message.kind)
        if self._way is not None and message.kind in direct:
            header, payload = pack(message)
            straight, ready = (payload.to(device.device), device.stamp()) if payload.numel() else (None, None)
            parts = self._parts(header, torch.empty(_HEAD_BYTES, dtype=torch.uint8), payload.numel())
            self._posted.put(_Job(parts, ready, straight))
        else:
            header, block = pack(message, front_bytes=_HEAD_BYTES)
            ready = None
            if device_of(block.device).asynchronous:
                block, ready = self._on_host(block)
            self._posted.put(_Job(self._parts(header, block), ready))
        if self._broken is not None:
            raise self._lost(self._broken)

    def _on_host(self, block: Tensor) -> tuple[Tensor, Stamp]:
        """Starts to copy a block to the host, during computation; returns where to, and after what it is there."""
        device = self._device
        room, packed = device.host_bytes(block.numel()), device.stamp()
        with device.on(self._streams[0]):
            packed.hold()
            device.keep_for_stream(block)
            room[_HEAD_BYTES:].copy_(block[_HEAD_BYTES:], non_blocking=True)
            return room, device.stamp()

    def _parts(self, header: bytes, block: Tensor, direct_bytes: int = 0) -> list[Tensor]:
        """Fills the head of a block; returns it in pieces for which there is room."""
        payload_bytes = block.numel() - _HEAD_BYTES
        head, sizes = block.numpy().data, (len(header), payload_bytes or direct_bytes)
        _FRONT.pack_into(head, 0, time.monotonic(), self.clock.least_s, *sizes, direct_bytes > 0)
        parts, rooms = [block], self._rooms[0]
        if block.numel() > rooms.next.popleft():
            parts = [block[:_HEAD_BYTES], block[_HEAD_BYTES:]]
        rooms.add(payload_bytes)
        if len(header) <= _INLINE_BYTES:
            head[_BEFORE_HEADER : _BEFORE_HEADER + len(header)] = header
        else:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return parts

    def settle(self) -> None:
        """Ends a step: all that goes directly is out, and messages of the kinds that it had go so from now on.

        Raises:
            RuntimeError: as `send`; or the peer took nothing in time.
        """
        if self._way is None:
            return
        all_out, deadline_s = threading.Event(), awake_s() + self._timeout_s
        self._posted.put(all_out)
        while not all_out.wait(LOOK_S):
            if self._broken is not None:
                raise self._lost(self._broken)
            self._look(deadline_s, "took nothing")
        self._kinds[1].update(self._kinds[0])

    def _send_on(self) -> None:
        while (posted := self._posted.get()) is not None:
            if isinstance(posted, threading.Event):
                posted.set()
            else:
                self._let_out(posted)
            del posted  # its memory must not live until the next one comes

    def _let_out(self, job: _Job) -> None:
        if job.ready is not None:
            job.ready.wait()
            _STAMP.pack_into(job.parts[0].numpy().data, 0, time.monotonic(), self.clock.least_s)
        if job.direct is not None and self._way is not None:
            self._way.send(job.direct, partial(self._announce, job.parts))
        else:
            self._go_out(job.parts)

    def _go_out(self, parts: Sequence[Tensor]) -> None:
        works = [self._wire.send([part], self._there, _TAG_REST if i else _TAG) for i, part in enumerate(parts)]
        for work in works:
            work.wait(FOREVER)

    def _announce(self, parts: Sequence[Tensor]) -> None:
        """Says that a payload comes over the direct way, and waits until there is room."""
        self._go_out(parts)
        self._wire.recv([torch.empty(1, dtype=torch.uint8)], self._there, _TAG_CLEAR).wait(FOREVER)

    # ---- in ----------------------------------------------------------------------------------------------------------

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            RuntimeError: a rank has failed, the peer is gone, or nothing came in time; names rank and cause.
        """
        deadline_s, come = awake_s() + self._timeout_s, None
        while come is None:
            try:
                come = self._arrived.get(timeout=LOOK_S)
            except Empty:
                self._look(deadline_s, "sent nothing")
        if not isinstance(come, _Come):
            raise self._lost(come)
        if come.arrived is not None:
            come.arrived.hold()
        self._device.keep_for_stream(come.payload)
        return unpack(come.header, come.payload)

    def _take_in(self) -> None:
        while (come := self._next()) is not None:
            self._arrived.put(come)
            del come  # its memory must not live until the next one comes
            self._post_block(self._rooms[1].next[-1])
        while self._blocks:
            self._blocks.popleft()[1].wait(FOREVER)
        self._arrived.put(_CLOSED)

    def _next(self) -> _Come | None:
        """Waits for the next message; None: no more messages."""
        device, (block, work) = self._device, self._blocks.popleft()
        began_s = time.monotonic()
        work.wait(FOREVER)
        arrived_s = time.monotonic()
        head = block.numpy().data
        sent_s, back_s, header_bytes, size_bytes, direct = _FRONT.unpack_from(head)
        if not header_bytes:
            return None
        stored_bytes = 0 if direct else size_bytes
        if _HEAD_BYTES + stored_bytes > block.numel():
            payload = self._rest(stored_bytes)
            arrived_s = time.monotonic()
        else:
            payload = block[_HEAD_BYTES : _HEAD_BYTES + stored_bytes]
            if 2 * (_HEAD_BYTES + stored_bytes) <= block.numel() and not device.asynchronous:
                payload = payload.clone()  # it would keep more memory than it has
        if header_bytes <= _INLINE_BYTES:
            header = bytes(head[_BEFORE_HEADER : _BEFORE_HEADER + header_bytes])
        else:
            header = self._rest(header_bytes).numpy().tobytes()
        self._rooms[1].add(stored_bytes)
        waited, arrived = not direct and arrived_s - began_s >= _ARRIVED_S, None
        if direct:
            assert self._way is not None
            payload = self._way.receive(size_bytes, self._clear)
            arrived_s = time.monotonic()
        self.clock.came(sent_s=sent_s, back_s=back_s, arrived_s=arrived_s, size_bytes=size_bytes, waited=waited)
        if not direct:
            with device.on(self._streams[1]):
                payload, arrived = payload.to(device.device, non_blocking=True), device.stamp()
        return _Come(header, payload, arrived)

    def _clear(self) -> None:
        self._wire.send([torch.empty(1, dtype=torch.uint8)], self._there, _TAG_CLEAR).wait(FOREVER)

    def _rest(self, size_bytes: int) -> Tensor:
        """Receives what goes behind a block."""
        room = self._device.host_bytes(size_bytes)
        if size_bytes:
            self._wire.recv([room], self._there, _TAG_REST).wait(FOREVER)
        return room

    def _post_block(self, size_bytes: int) -> None:
        """Posts a block for a message that is still to be sent."""
        block = self._device.host_bytes(size_bytes)
        self._blocks.append((block, self._wire.recv([block], self._there, _TAG)))

    # ---- while the training thread waits -----------------------------------------------------------------------------

    def _look(self, deadline_s: float, what: str) -> None:
        """Looks once; ``what`` the peer has done, or not, e.g. "sent nothing", if that takes until the deadline.

        Raises:
            RuntimeError: a rank has failed, or the deadline has passed; names rank and cause.
        """
        self._failures.check()
        if awake_s() >= deadline_s:
            raise self._failures.lost(self.peer, f"it {what} for {self._timeout_s:g} s, the timeout")

    def _lost(self, why: str | Exception) -> Exception:
        """Returns the error to raise: what went wrong here, or that the peer is gone."""
        return why if isinstance(why, Exception) else self._failures.lost(self.peer, why)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def say_last(self) -> None:
        """Says that nothing more will be sent: by one empty message for each block that the peer has posted."""
        for _ in range(_AHEAD):
            self._posted.put(_Job([torch.zeros(_HEAD_BYTES, dtype=torch.uint8)]))
        self._posted.put(None)

    def wait_closed(self) -> None:
        """Waits until both sides have said their last, and it is out.

        Raises:
            RuntimeError: the peer is gone, or does not close its links in time.
        """
        for thread in self._threads:
            deadline_s = awake_s() + self._timeout_s
            while thread.is_alive():
                thread.join(LOOK_S)
                if thread.is_alive():
                    self._look(deadline_s, "did not close its links")
            if self._broken is not None:
                raise self._lost(self._broken)

    def abort(self) -> None:
        """Ends the link at once; the wire's connections are closed behind it."""
        self._posted.put(None)
        if self._way is not None:
            self._way.abort()

    def forget(self, deadline_s: float) -> None:
        """Waits at most so long [s, awake_s] until all has ended, when the connections have been closed."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - awake_s()))
        while self._blocks:
            with contextlib.suppress(RuntimeError):
                self._blocks.popleft()[1].wait(timedelta(milliseconds=1))
