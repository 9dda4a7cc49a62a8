"""Workers as threads of one process: for tests of server and worker, and where one process is enough (layer T).

Same semantics as the other transports, including refusals, torn slots and the loss of either side.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from lightning_hetero.transport.base import (
    Arrived,
    Gone,
    Happened,
    Joined,
    Listener,
    Reply,
    Request,
    ServerLostError,
    WorkerLink,
)
from lightning_hetero.transport.seqlock import ParameterArea, Slot, check_sizes


class InProcess:
    """A listener and links to it, in one process.

    Args:
        workers: number of workers; their ranks are 0..workers-1.
        slot_bytes: size of a worker's slot.
        parameter_bytes: size of the parameters.

    Attributes:
        listener: the server's end.

    Raises:
        ValueError: a size or the number of workers is not positive.
    """

    def __init__(self, workers: int, slot_bytes: int, parameter_bytes: int) -> None:
        check_sizes(workers=workers, slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
        self._switchboard = _Switchboard(workers, slot_bytes, parameter_bytes)
        self.listener = InProcessListener(self._switchboard)

    def link(self, rank: int) -> InProcessLink:
        """Connects a worker; the server is told `Joined`.

        Raises:
            ConnectionRefusedError: the rank is connected already, or unknown.
            ServerLostError: the listener is closed.
        """
        if rank not in self.listener.ranks:
            raise ConnectionRefusedError(f"rank {rank} is unknown here, there are {sorted(self.listener.ranks)}")
        link = InProcessLink(self._switchboard, rank)
        self._switchboard.connect(rank, link)
        return link

    def kill(self, rank: int) -> None:
        """Ends a worker as SIGKILL would: its slot stays as it is, its thread gets ServerLostError at the next call.

        The server is told `Gone`. Without effect on a worker that is not connected.
        """
        self._switchboard.hang_up(rank, "killed")


class _Mailbox:
    """A queue of events. Every method may be called from any thread; `collect` is meant for one."""

    def __init__(self) -> None:
        self._filled = threading.Condition()
        self._events: list[Happened] = []
        self._woken = False

    def put(self, event: Happened) -> None:
        with self._filled:
            self._events.append(event)
            self._filled.notify_all()

    def wake(self) -> None:
        with self._filled:
            self._woken = True
            self._filled.notify_all()

    def collect(self, timeout_s: float | None) -> list[Happened]:
        with self._filled:
            self._filled.wait_for(lambda: self._events or self._woken, timeout_s)
            events, self._events, self._woken = self._events, [], False
            return events


class _Switchboard:
    """What both ends share: memory, the server's mailbox, and one desk per connected worker."""

    def __init__(self, workers: int, slot_bytes: int, parameter_bytes: int) -> None:
        self.slots = [Slot.empty(slot_bytes) for _ in range(workers)]
        self.parameters = ParameterArea(
            torch.zeros(ParameterArea.size(parameter_bytes), dtype=torch.uint8), parameter_bytes
        )
        self.state = b""
        self.mailbox = _Mailbox()
        self.open = True
        self.changed = threading.Condition()
        self._links: dict[int, InProcessLink] = {}

    def connect(self, rank: int, link: InProcessLink) -> None:
        with self.changed:
            if not self.open:
                raise ServerLostError("the server has closed its listener")
            if rank in self._links:
                raise ConnectionRefusedError(f"rank {rank} is connected already; close the other link first")
            self._links[rank] = link
            self.mailbox.put(Joined(rank))

    def send(self, link: InProcessLink, request: Request) -> None:
        with self.changed:
            self.require(link)
            link.answer = None
            # Through the packed form: what does not survive it must fail here, too.
            packed = request.pack()
            self.mailbox.put(Arrived(link.rank, Request.unpack(packed[: Request.SIZE], packed[Request.SIZE :])))

    def deliver(self, rank: int, reply: Reply) -> None:
        packed = reply.pack()
        with self.changed:
            if (link := self._links.get(rank)) is not None:
                link.answer = Reply.unpack(packed[: Reply.SIZE], packed[Reply.SIZE :])
                self.changed.notify_all()

    def require(self, link: InProcessLink) -> None:
        if self._links.get(link.rank) is not link:
            raise ServerLostError(link.lost or "this link is closed")

    def hang_up(self, rank: int, reason: str, link: InProcessLink | None = None) -> None:
        """Ends a worker's connection (only if it is ``link``, where given)."""
        with self.changed:
            found = self._links.get(rank)
            if found is None or (link is not None and found is not link):
                return
            del self._links[rank]
            found.lost = f"this worker's connection has ended: {reason}"
            self.mailbox.put(Gone(rank, reason))
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.open = False
            for rank in list(self._links):
                self.hang_up(rank, "the server has closed its listener")


class InProcessLink(WorkerLink):
    """A worker's end; made by `InProcess.link`."""

    def __init__(self, switchboard: _Switchboard, rank: int) -> None:
        self.rank = rank
        self.answer: Reply | None = None
        self.lost = ""
        self._switchboard = switchboard
        self._slot = switchboard.slots[rank]
        self.gradient = self._slot.data

    def open_slot(self) -> None:
        self._slot.open()

    def ready(self, start: int, stop: int) -> None:
        self._check_inside(start, stop)

    def close_slot(self) -> int:
        return self._slot.close()

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        board = self._switchboard
        board.send(self, request)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with board.changed:
            while self.answer is None:
                board.require(self)
                rest_s = None if deadline is None else deadline - time.monotonic()
                if rest_s is not None and rest_s <= 0:
                    board.hang_up(self.rank, "gave up waiting for a reply", self)
                    raise ServerLostError(f"no answer to {request.kind.name} within {timeout_s} s")
                board.changed.wait(rest_s)
            answer, self.answer = self.answer, None
            return answer

    def read_parameters(self, into: Tensor) -> int:
        return self._switchboard.parameters.read(into)

    def newest_version(self) -> int:
        return self._switchboard.parameters.newest()

    def read_state(self) -> bytes:
        return self._switchboard.state

    def close(self) -> None:
        self._switchboard.hang_up(self.rank, "closed the connection", self)


class InProcessListener(Listener):
    """The server's end; made by `InProcess`."""

    def __init__(self, switchboard: _Switchboard) -> None:
        self._switchboard = switchboard
        self.ranks = frozenset(range(len(switchboard.slots)))

    def events(self, timeout_s: float | None) -> list[Happened]:
        return self._switchboard.mailbox.collect(timeout_s)

    def wake(self) -> None:
        self._switchboard.mailbox.wake()

    def reply(self, rank: int, reply: Reply) -> None:
        self._switchboard.deliver(rank, reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        return self._switchboard.slots[rank].check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        self._switchboard.parameters.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        self._switchboard.state = bytes(data)

    def dismiss(self, rank: int, reason: str) -> None:
        self._switchboard.hang_up(rank, reason)

    def close(self) -> None:
        self._switchboard.close()
