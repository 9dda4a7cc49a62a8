"""The transport in memory: every message takes its time, and a connection may end at any of them.

It keeps the rules of `lightning_hetero.transport.base` and uses the real slots and the real area of parameters. What
one rank sends arrives in the order it was sent; of two ranks' messages either may be first. A process that dies leaves
its slot as it is; what it had sent arrives, or not (`Wires.end` says), and then the news of its death.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_hetero.transport.base import (
    Alive,
    Arrived,
    Gone,
    Happened,
    Joined,
    LeftBehindError,
    Reply,
    Request,
    ServerLostError,
)
from lightning_hetero.transport.link import RemoteLink
from lightning_hetero.transport.seqlock import ParameterArea, Slot
from tests.ranks.stale.simulated.cases import LIVENESS_S
from tests.ranks.stale.simulated.world import Process, World

_HANDSHAKE_S = 0.002
_ROUNDING_S = 1e-9  # the server's clock is a difference of two


class Delays:
    """How long messages take: mostly some tenths of a millisecond, at times much longer.

    Args:
        draw: generator.
        slow: part of the messages that take long.
        long_s: how long these take at most [s].
    """

    def __init__(self, draw: random.Random, slow: float, long_s: float) -> None:
        self._draw, self._slow, self._long_s = draw, slow, long_s

    def next_s(self) -> float:
        """Returns the time of one message [s]."""
        draw = self._draw.random
        return draw() * self._long_s if draw() < self._slow else 0.0001 + 0.0005 * draw()


class _Connection:
    """One worker's; ``None`` as answer: none has come."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank, self.process = rank, process
        self.open = True  # for the worker
        self.known = True  # to the server
        self.answer: Reply | None = None
        self.why = self.left = ""
        self.last_up_s = self.last_down_s = 0.0


class Wires:
    """What both ends share.

    Args:
        world: gives the time.
        delays: of messages.
        ranks: the workers.
        slot_bytes, parameter_bytes: sizes.
        note: called with every message: who, and what.
        point: called where a rank could be hit: rank and place.
        published: called with every version that is published, and its bytes.
    """

    def __init__(
        self, world: World, delays: Delays, *, ranks: Iterable[int], slot_bytes: int, parameter_bytes: int,
        note: Callable[[str, str], None], point: Callable[[int, str], None], published: Callable[[int, Tensor], None],
    ) -> None:  # fmt: skip
        self.world, self.delays = world, delays
        self.note, self.point, self.published = note, point, published
        self.slots = {rank: Slot.empty(slot_bytes) for rank in ranks}
        memory = torch.zeros(ParameterArea.size(parameter_bytes), dtype=torch.uint8)
        self.parameters = ParameterArea(memory, parameter_bytes)
        self.state = b""
        self.connections: dict[int, _Connection] = {}
        self.queue: list[Happened] = []
        self.server: Process | None = None
        self.open = True

    # ---- the worker's side ------------------------------------------------------------------------------------

    def connect(self, rank: int, process: Process) -> _Connection:
        """Connects a worker, which waits for the handshake.

        Raises:
            ServerLostError: there is no server.
            ConnectionRefusedError: the rank is connected, and its process lives.
        """
        process.sleep(_HANDSHAKE_S + self.delays.next_s())
        if not self._serves:
            raise ServerLostError("no server: it has ended")
        old = self.connections.get(rank)
        if old is not None and old.known:
            if old.process.alive and old.open:
                raise ConnectionRefusedError(f"rank {rank} is connected already")
            self._tell_gone(old)
        connection = self.connections[rank] = _Connection(rank, process)
        process.at_end.append(lambda: self.end(connection, "its process has ended"))
        self._happened(Joined(rank))
        return connection

    def send(self, connection: _Connection, request: Request) -> None:
        """Puts a request on its way."""
        packed = request.pack()  # what does not survive it must fail here, too
        copy = Request.unpack(packed[: Request.SIZE], packed[Request.SIZE :])
        connection.answer = None
        connection.last_up_s = at_s = max(connection.last_up_s, self.world.now_s + self.delays.next_s())

        def arrive() -> None:
            if connection.known:
                self._happened(Arrived(connection.rank, copy))

        self.world.at(at_s, arrive)

    def live(self, connection: _Connection, every_s: float) -> None:
        """Has a worker give signs of life while its process runs, as `Pulse` does."""
        process, world = connection.process, self.world

        def sign() -> None:
            if connection.open and process.alive and process.frozen_until_s < math.inf:
                if world.now_s >= process.frozen_until_s:
                    world.at(world.now_s + self.delays.next_s(), arrive)
                world.at(world.now_s + every_s, sign)

        def arrive() -> None:
            if connection.known:
                self._happened(Alive(connection.rank))

        world.at(world.now_s + every_s, sign)

    def end(self, connection: _Connection, why: str, *, lose: bool = False) -> None:
        """Ends a connection: the worker hears it at its next call, the server a while later.

        Args:
            lose: what is under way to the server is lost.
        """
        if not connection.open:
            return
        connection.open, connection.why = False, why
        connection.process.wake()
        now_s = self.world.now_s
        heard_s = now_s if lose else max(now_s, connection.last_up_s)
        self.world.at(heard_s + self.delays.next_s(), lambda: self._tell_gone(connection))

    @property
    def _serves(self) -> bool:
        return self.open and self.server is not None and self.server.alive

    # ---- the server's side ------------------------------------------------------------------------------------

    def _tell_gone(self, connection: _Connection) -> None:
        if connection.known:
            connection.known = False
            if self.connections.get(connection.rank) is connection:
                del self.connections[connection.rank]
            self._happened(Gone(connection.rank, connection.why))

    def _happened(self, event: Happened) -> None:
        self.note("server", f"{type(event).__name__} {event.rank}{_words(event)}")
        self.queue.append(event)
        if self.server is not None:
            self.server.wake()

    def deliver(self, rank: int, reply: Reply) -> None:
        """Puts an answer on its way; a worker that is gone is ignored."""
        connection = self.connections.get(rank)
        if connection is None:
            return
        packed = reply.pack()
        copy = Reply.unpack(packed[: Reply.SIZE], packed[Reply.SIZE :])
        connection.last_down_s = at_s = max(connection.last_down_s, self.world.now_s + self.delays.next_s())

        def arrive() -> None:
            if connection.open:
                connection.answer = copy
                connection.process.wake()

        self.world.at(at_s, arrive)

    def close(self, why: str) -> None:
        """The server ends, or is killed: all connections end."""
        self.open = False
        for connection in list(self.connections.values()):
            if connection.open:
                # What it had sent before is still read, as from a socket that was shut down.
                at_s = max(connection.last_down_s, self.world.now_s + self.delays.next_s())
                self.world.at(at_s, lambda c=connection: self.end(c, why))


def _words(event: Happened) -> str:
    if not isinstance(event, Arrived):
        return ""
    r = event.request
    where = f"epoch {r.epoch} global step {r.global_step} substep {r.substep}"
    return f" {r.kind.name} {where} assignment {r.assignment} samples {r.samples}"


class MemoryListener:
    """The server's end.

    Args:
        wires: shared with the links.
        lag_s: how long the server takes to look at what has come [s]; meanwhile more may come.
    """

    def __init__(self, wires: Wires, lag_s: Callable[[], float]) -> None:
        self._wires, self._lag_s = wires, lag_s
        self.ranks = frozenset(wires.slots)

    def events(self, timeout_s: float) -> list[Happened]:
        wires = self._wires
        process, world = wires.server, wires.world
        assert process is not None
        until_s = math.inf if timeout_s is None else world.now_s + timeout_s + (_ROUNDING_S if timeout_s else 0.0)
        process.sleep(self._lag_s())
        while not wires.queue:
            process.wait(until_s)
            if world.now_s >= until_s:
                break
        events, wires.queue = wires.queue, []
        return events

    def reply(self, rank: int, reply: Reply) -> None:
        where = f"global step {reply.global_step} version {reply.version} assignment {reply.assignment}"
        self._wires.note("server", f"-> {rank} {reply.kind.name} {where} {list(reply.numbers)}")
        self._wires.deliver(rank, reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        return self._wires.slots[rank].check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        self._wires.parameters.publish(version, parameters)
        self._wires.published(version, parameters)

    def share_state(self, data: bytes) -> None:
        self._wires.state = bytes(data)

    def dismiss(self, rank: int, reason: str) -> None:
        if (connection := self._wires.connections.get(rank)) is not None:
            connection.left = reason
            self._wires.end(connection, reason)

    def close(self) -> None:
        self._wires.close("the server has ended")


class MemoryLink(RemoteLink):
    """A worker's end; connects when it is made, see `Wires.connect`."""

    def __init__(self, wires: Wires, rank: int, process: Process) -> None:
        self.rank = rank
        self._wires, self._process = wires, process
        self._connection = wires.connect(rank, process)
        self._slot = wires.slots[rank]
        self.gradient = self._slot.data

    def open_slot(self) -> None:
        self._slot.open()
        self._wires.point(self.rank, "slot")

    def ready(self, start: int, stop: int) -> None:
        pass

    def close_slot(self) -> int:
        return self._slot.close()

    def call(self, request: Request) -> Reply:
        connection, wires = self._connection, self._wires
        if not self._process.alive:
            raise ServerLostError("this process is dead")
        wires.point(self.rank, f"before {request.kind.name}")
        self._check()
        wires.send(connection, request)
        wires.point(self.rank, f"behind {request.kind.name}")
        while connection.answer is None:
            self._check()
            self._process.wait()
        answer, connection.answer = connection.answer, None
        wires.point(self.rank, f"answered {request.kind.name}")
        return answer

    def _check(self) -> None:
        if self._connection.left:
            self.left_behind = True
            raise LeftBehindError(self._connection.left)
        if not self._connection.open:
            self.cut = True
            raise ServerLostError(f"the connection to the server is lost: {self._connection.why}")

    def sign_of_life(self) -> None:
        """From then on all by themselves, see `Wires.live`."""
        self._wires.live(self._connection, LIVENESS_S)

    def read_parameters(self, into: Tensor) -> int:
        return self._wires.parameters.read(into)

    def newest_version(self) -> int:
        return self._wires.parameters.newest()

    def read_state(self) -> bytes:
        return self._wires.state

    def close(self) -> None:
        self._wires.end(self._connection, "closed the connection")


class Store:
    """What `torch.distributed.Store` is to ranks that look for one another; it lives in the server's process.

    Args:
        wires: tell whether the server lives.
        asked: called when somebody says that he is here.

    Attributes:
        prefix: of all keys.
    """

    def __init__(
        self, wires: Wires, asked: Callable[[], object], prefix: str = "", kept: dict[str, str] | None = None
    ) -> None:
        self._wires, self._asked, self.prefix = wires, asked, prefix
        self._kept: dict[str, str] = {} if kept is None else kept

    def below(self, prefix: str) -> Store:
        """Returns the same store for keys of their own."""
        return Store(self._wires, self._asked, f"{self.prefix}{prefix}/", self._kept)

    def opened(self) -> Store:
        """Returns it to one who connects."""
        self._ask()
        return self

    def set(self, key: str, value: str) -> None:
        self._ask()[self.prefix + key] = value
        self._asked()

    def get(self, key: str) -> bytes:
        return self._ask()[self.prefix + key].encode()

    def add(self, key: str, more: int) -> int:
        kept = self._ask()
        kept[self.prefix + key] = str(int(kept.get(self.prefix + key, "0")) + more)
        return int(kept[self.prefix + key])

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        kept = self._ask()
        if kept.get(self.prefix + key, "") == expected:
            kept[self.prefix + key] = wanted
        return self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        kept = self._ask()
        return all(self.prefix + key in kept for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._ask().pop(self.prefix + key, None) is not None

    def _ask(self) -> dict[str, str]:
        if not self._wires._serves:
            raise RuntimeError("the store is gone with the server")
        return self._kept
