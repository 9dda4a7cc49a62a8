"""The links of one rank to its neighbours in a pipeline, over gloo: first in, first out, during computation (layer T).

    training thread   send ──► gloo ───────────► gloo, into a block that was posted ahead ──► receive   training thread

A message goes as one block: a head of fixed size, with the header in it as a rule, and behind it the payload. For the
next messages the receiver has posted blocks: gloo takes them in during computation, and the thread that needs one
waits for it, so that no message is handed from thread to thread. What is larger than its block goes in
pieces; both sides know how large a block is, because they know what went before. Gloo lets less come than there is room
for.

Gloo can wait for a neighbour without end or not at all: a wait that times out closes its connections. So a thread
looks at the failure board while the training thread waits, and closes the connections when there is a reason to.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.measure.device import HostDevice, Stamp, is_out_of_memory
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.runtime.execute.messages import Message, pack, unpack
from lightning_hetero.pipeline.runtime.execute.watch import NeighbourWatch
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import LOOK_S
from lightning_hetero.transport.sockets import FOREVER, first_line

HEAD_BYTES = 1024
_AHEAD = 2  # blocks that are posted: one fills while the message before is used
# When it was sent [s, time.monotonic]; what came back seems to have taken [s, LinkClock].
STAMP = struct.Struct("<dd")
# Behind that: bytes of header and payload, whether that comes over the direct way, messages that have come back.
_FRONT = struct.Struct("<ddQQQQ")
_BEFORE_HEADER = _FRONT.size
_INLINE_BYTES = HEAD_BYTES - _BEFORE_HEADER
_ROOM_BYTES = 64 * 2**20  # of a block, at most
_REMEMBERED = 8  # messages, whose largest determines the size of a block
_HELD, _HELD_BYTES = 32, 16 * 2**20  # messages, and their bytes, that may wait together to be freed
_ARRIVED_S = 5e-5  # a wait that took less found the message there
_TAG, _TAG_REST = 0x9A55, 0x9A58
CLOSED = "it has closed its links"


class _Rooms:
    """How large the blocks of the next messages are; the same on both sides.

    Attributes:
        next: of those that are posted [bytes].
    """

    def __init__(self) -> None:
        self.next = deque([HEAD_BYTES] * _AHEAD, maxlen=_AHEAD)
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)

    def went(self, payload_bytes: int) -> int:
        """Takes note of a message; returns the size of the block for the one that is `_AHEAD` behind it [bytes]."""
        self._sizes.append(HEAD_BYTES + payload_bytes)
        self.next.append(max([size for size in self._sizes if size <= _ROOM_BYTES], default=HEAD_BYTES))
        return self.next[-1]


class Block(NamedTuple):
    """What has come of a message.

    Attributes:
        header: see `messages.pack`.
        payload: in host memory; empty if it comes over the direct way.
        size_bytes: of the payload.
        direct: whether it comes over the direct way.
        times: when it was sent, and what the sender's `LinkClock` says of the way back.
    """

    header: bytes
    payload: Tensor
    size_bytes: int
    direct: bool
    times: list[float]


class Job(NamedTuple):
    """A message on its way out.

    Attributes:
        parts: its head, with the payload or without, and what goes behind it.
        works: gloo's, one for each part; empty: the sending thread begins them.
        ready: after what on the device it can be sent.
        direct: payload for the direct way.
    """

    parts: list[Tensor]
    works: list[Any]
    ready: Stamp | None = None
    direct: Tensor | None = None


class _Held:
    """Messages on their way that have not been given to the thread that waits until they are out."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._before = 0  # messages before the first of these
        self._size_bytes = 0

    def add(self, job: Job) -> bool:
        """Takes in the next message; returns whether these are many."""
        self._jobs.append(job)
        self._size_bytes += sum(part.numel() for part in job.parts)
        return len(self._jobs) >= _HELD or self._size_bytes >= _HELD_BYTES

    def taken(self, had: int | None = None) -> list[Job]:
        """Lets go of those among the ``had`` first messages of the link; None: of all."""
        count = len(self._jobs) if had is None else max(0, had - self._before)
        jobs, self._jobs = self._jobs[:count], self._jobs[count:]
        self._before += len(jobs)
        self._size_bytes -= sum(part.numel() for job in jobs for part in job.parts)
        return jobs


class StageLink:
    """This rank's end of the link to one neighbour, for layers in host memory. Used by one thread.

    Args:
        wire: gloo process group with both in it; carries nothing else between them. Several links may share it, of
            different neighbours or one after the other.
        peer: the neighbour, global rank.
        rank: this process, global.
        device: of this rank's layers.
        clock: times what comes.
        watch: of this rank's links.
    """

    def __init__(
        self, wire: Any, peer: int, *, rank: int, device: HostDevice, clock: LinkClock, watch: NeighbourWatch
    ) -> None:
        self.peer, self.clock, self._device, self._watch = peer, clock, device, watch
        self._wire, self._there = wire, dist.get_group_rank(wire, peer)
        self._broken: str | Exception | None = None  # why nothing can be sent any more
        self._went, self._came = _Rooms(), _Rooms()
        self._blocks: deque[tuple[Tensor, Any]] = deque()  # posted, and the works that fill them
        self._due_bytes = 0  # size of the block that is to be posted next; 0: none
        self._ended = False  # nothing comes any more
        # Messages to be let out; what is to be told when those before are out; None: the end.
        self._posted: SimpleQueue[list[Job] | threading.Event | None] = SimpleQueue()
        self._held = _Held()
        self._received = 0  # messages, so far
        for _ in range(_AHEAD):
            self._post_block(HEAD_BYTES)
        self._sender = threading.Thread(target=self._send_on, name=f"pipeline-send-{rank}-{peer}", daemon=True)
        self._sender.start()

    _at_once = True  # gloo is given a message by the thread that posts it

    # ---- out ---------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Posts a message, does not wait for it to be out.

        Raises:
            RuntimeError: the peer is gone; names the cause.
            TypeError: a value that cannot travel.
        """
        self._post(message)
        if self._broken is not None:
            raise self._watch.lost(self.peer, self._broken)

    def _post(self, message: Message) -> None:
        header, block = pack(message, front_bytes=HEAD_BYTES)
        self._put(Job(self._parts(header, block), []))

    def _parts(self, header: bytes, block: Tensor, direct_bytes: int = 0) -> list[Tensor]:
        """Fills the head of a block; returns it in pieces for which there is room."""
        payload_bytes = block.numel() - HEAD_BYTES
        head, sizes = block.numpy().data, (len(header), payload_bytes or direct_bytes)
        _FRONT.pack_into(head, 0, time.monotonic(), self.clock.least_s, *sizes, direct_bytes > 0, self._received)
        parts = [block]
        if block.numel() > self._went.next.popleft():
            parts = [block[:HEAD_BYTES], block[HEAD_BYTES:]]
        self._went.went(payload_bytes)
        if len(header) <= _INLINE_BYTES:
            head[_BEFORE_HEADER : _BEFORE_HEADER + len(header)] = header
        else:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return parts

    def _put(self, job: Job) -> None:
        """Sends a message, or lets the thread do so.

        It is freed when the peer says that it has it; the thread, whose waking costs as much as a small message, does
        so with what comes together until then.
        """
        if self._at_once:
            try:
                job.works.extend(self._begun(job.parts))
            except RuntimeError as error:
                self._broken = first_line(error)
        if self._held.add(job) or not self._at_once:
            self._hand_over()

    def _begun(self, parts: Iterable[Tensor]) -> list[Any]:
        tags = iter((_TAG,))
        return [self._wire.send([part], self._there, next(tags, _TAG_REST)) for part in parts]

    def _hand_over(self) -> None:
        if jobs := self._held.taken():
            self._posted.put(jobs)

    def settle(self) -> None:
        """Ends a step."""

    def _send_on(self) -> None:
        """The thread: lets go of each message when it is out."""
        try:
            while (posted := self._posted.get()) is not None:
                if isinstance(posted, threading.Event):
                    posted.set()
                    continue
                while posted:
                    self._let_out(posted.pop(0))
        except Exception as error:  # whatever it is, the training thread is told
            gloos = isinstance(error, RuntimeError) and not is_out_of_memory(error)
            self._broken = first_line(error) if gloos else error

    def _let_out(self, job: Job) -> None:
        while job.works:
            job.works.pop(0).wait(FOREVER)

    # ---- in ----------------------------------------------------------------------------------------------------------

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            RuntimeError: a rank has failed, the peer is gone, or nothing came in time; names rank and cause.
        """
        came = None if self._ended else self._next("sent nothing")
        if came is None:
            raise self._watch.lost(self.peer, CLOSED)
        return unpack(came.header, came.payload)

    def _lost(self, error: RuntimeError) -> Exception:
        """Returns the error to raise where gloo has raised one."""
        return self._watch.lost(self.peer, f"its connection is closed: {first_line(error)}")

    def _wait(self, work: Any, what: str) -> None:
        self._watch.wait(work, self.peer, what)

    def _next(self, what: str) -> Block | None:
        """Waits for the next message; None: no more messages."""
        if self._due_bytes:  # not before: it wakes the peer, which is better done when this rank waits anyway
            self._post_block(self._due_bytes)
        block, work = self._blocks.popleft()
        began_s = time.monotonic()
        self._wait(work, what)
        arrived_s = time.monotonic()
        head = block.numpy().data
        *times, header_bytes, size_bytes, direct, had = _FRONT.unpack_from(head)
        self._received += 1
        for job in self._held.taken(had):
            for work in job.works:
                work.wait(FOREVER)  # does not wait: the peer has it
        if not header_bytes:
            self._ended, self._due_bytes = True, 0
            return None
        stored_bytes = 0 if direct else size_bytes
        self._due_bytes = self._came.went(stored_bytes)
        if HEAD_BYTES + stored_bytes > block.numel():
            payload = self._rest(stored_bytes, what)
            arrived_s = time.monotonic()
        else:
            payload = block[HEAD_BYTES : HEAD_BYTES + stored_bytes]
            if 2 * (HEAD_BYTES + stored_bytes) <= block.numel() and not self._device.asynchronous:
                payload = payload.clone()  # it would keep more memory than it has
        if header_bytes <= _INLINE_BYTES:
            header = bytes(head[_BEFORE_HEADER : _BEFORE_HEADER + header_bytes])
        else:
            header = self._rest(header_bytes, what).numpy().tobytes()
        if not direct:
            self._time(times, size_bytes, arrived_s, waited=arrived_s - began_s >= _ARRIVED_S)
        return Block(header, payload, size_bytes, bool(direct), times)

    def _time(self, times: list[float], size_bytes: int, arrived_s: float, *, waited: bool) -> None:
        sent_s, back_s = times
        self.clock.came(sent_s=sent_s, back_s=back_s, arrived_s=arrived_s, size_bytes=size_bytes, waited=waited)

    def _rest(self, size_bytes: int, what: str) -> Tensor:
        """Receives what goes behind a block."""
        room = self._device.host_bytes(size_bytes)
        if size_bytes:
            self._wait(self._begun_to_receive(room, _TAG_REST), what)
        return room

    def _begun_to_receive(self, room: Tensor, tag: int) -> Any:
        try:
            return self._wire.recv([room], self._there, tag)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _post_block(self, size_bytes: int) -> None:
        """Posts a block for a message that is still to be sent."""
        block = self._device.host_bytes(size_bytes)
        self._blocks.append((block, self._begun_to_receive(block, _TAG)))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def say_last(self) -> None:
        """Says that nothing more will be sent: by one empty message for each block that the peer has posted."""
        for _ in range(_AHEAD):
            self._put(Job([torch.zeros(HEAD_BYTES, dtype=torch.uint8)], []))
        self.give_up()

    def give_up(self) -> None:
        """Lets the sending thread end after what it is at."""
        self._hand_over()
        self._posted.put(None)

    def wait_closed(self) -> None:
        """Waits until both sides have said their last, and it is out.

        Raises:
            RuntimeError: the peer is gone, or does not close its links in time.
        """
        what = "did not close its links"
        while not self._ended:
            self._next(what)
        while self._blocks:
            self._wait(self._blocks.popleft()[1], what)
        self._join(self._sender, what)

    def _join(self, thread: threading.Thread, what: str) -> None:
        deadline_s = self._watch.deadline_s()
        while thread.is_alive():
            thread.join(LOOK_S)
            if thread.is_alive():
                self._watch.look(self.peer, deadline_s, what)

    def abort(self) -> None:
        """Ends the link at once; the wire's connections are closed behind it."""
        self.give_up()

    def forget(self, deadline_s: float) -> None:
        """Waits at most so long [s, awake_s] until all has ended, when the connections have been closed."""
        while self._blocks:
            with contextlib.suppress(RuntimeError):
                self._blocks.popleft()[1].wait(timedelta(milliseconds=1))
        self._sender.join(max(0.0, deadline_s - awake_s()))
