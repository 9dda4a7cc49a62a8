"""Workers on other nodes: one gloo group of two processes each, so that one death never poisons another (layer T).

    worker and server: meet in a store, see `handshake`
    server: an acceptor's thread looks for newcomers; one thread per worker receives, see `frames`, into a slot of
            that worker's own and queues what arrived

The rendezvous is a TCPStore which the server's process hosts. Nobody gets a gloo connection before the proof, because
gloo ends the process that receives a message of the wrong size. As with torch.distributed in general, the network
itself is trusted: nothing is encrypted, and who can write the store can disturb the start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from lightning_hetero.transport.base import (
    Alive,
    Arrived,
    Gone,
    Happened,
    Joined,
    QueuedListener,
    Reply,
    Request,
    Say,
)
from lightning_hetero.transport.mailbox import Mailbox
from lightning_hetero.transport.pairs.frames import Frame, Kind, Wire
from lightning_hetero.transport.pairs.handshake import (
    CONNECT_S,
    COUNTER,
    check_hello,
    check_token,
    client,
    group,
    put,
)
from lightning_hetero.transport.pairs.link import PairLink
from lightning_hetero.transport.pairs.snapshots import Snapshots
from lightning_hetero.transport.seqlock import Slot, check_sizes
from lightning_hetero.transport.sockets import PAYLOAD_LIMIT_BYTES, WireError, first_line

__all__ = ["PairLink", "PairListener"]

_log = logging.getLogger(__name__)

POLL_S = 0.05  # how often the server looks for newcomers
LAST_WORDS_S = 2.0  # for the last answers to reach workers: gloo sends only to who is already receiving
MOST_WAITING = 64  # announcements of one rank that are looked for; who may write to the store may count up at will
GRACE_S = 1.0  # how long the news of a worker's end may be on their way when it is back already


class PairListener(QueuedListener):
    """The server's end.

    Args:
        store: hosted by the server's process; its host must be a name by which workers reach it.
        ranks: the workers of other nodes.
        slot_bytes: size of each worker's slot.
        parameter_bytes: size of the parameters.
        token: shared secret of the run.

    Attributes:
        address: ``host:port``, for `PairLink`.

    Raises:
        ValueError: a size is not positive, or the token too short.
    """

    def __init__(
        self, store: TCPStore, *, ranks: Iterable[int], slot_bytes: int, parameter_bytes: int, token: bytes
    ) -> None:
        check_sizes(slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
        self.ranks = frozenset(ranks)
        self.address = f"{store.host}:{store.port}"
        self.slot_bytes, self.parameter_bytes = slot_bytes, parameter_bytes
        self.mailbox = Mailbox()
        self.snapshots = Snapshots(parameter_bytes)
        self.state = b""
        self._store_at = store.host, store.port
        self._token = check_token(token)
        self._changed = threading.Condition()
        self._workers: dict[int, _Connection] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="pairs-acceptor", daemon=True)
        self._acceptor.start()

    # ---- the server's thread ------------------------------------------------------------------------------

    def events(self, timeout_s: float | None) -> list[Happened]:
        return self.mailbox.collect(timeout_s)

    def wake(self) -> None:
        self.mailbox.wake()

    def subscribe(self, notify: Callable[[], None]) -> None:
        self.mailbox.subscribe(notify)

    def reply(self, rank: int, reply: Reply) -> None:
        if (worker := self._workers.get(rank)) is not None:
            worker.reply(reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        if (worker := self._workers.get(rank)) is not None:
            return worker.slot.check(slot)
        # Its last words may be queued while its connection is gone already; its slot went with it.
        return Slot.empty(self.slot_bytes).check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        self.snapshots.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        self.state = bytes(data)

    def disconnect(self, rank: int) -> None:
        if (worker := self._workers.get(rank)) is not None:
            worker.cut("disconnected by the server")

    def dismiss(self, rank: int, reason: str) -> None:
        if (worker := self._workers.get(rank)) is not None:
            # Not over the wire: gloo sends only to who is receiving.
            with contextlib.suppress(RuntimeError):
                put(client(*self._store_at, timeout_s=CONNECT_S), f"{worker.name}/left", reason.encode())
            worker.cut(reason)

    def close(self) -> None:
        self._closing.set()
        self._acceptor.join()
        with self._changed:
            workers, threads = list(self._workers.values()), list(self._threads)
        deadline_s = time.monotonic() + LAST_WORDS_S
        for worker in workers:
            worker.flush(deadline_s)
            worker.cut("the server has closed its listener")
        for thread in threads:
            thread.join()

    # ---- newcomers: the acceptor's thread -----------------------------------------------------------------

    def _accept(self) -> None:
        try:
            store = client(*self._store_at, timeout_s=CONNECT_S)
            newest = dict.fromkeys(self.ranks, 0)
            waiting: dict[tuple[int, int], float] = {}  # (rank, generation) that was counted, and since when
            announced = 0
            while not self._closing.wait(POLL_S):
                if (now := store.add(COUNTER, 0)) != announced:
                    announced = now
                    for rank in sorted(self.ranks):
                        old, newest[rank] = newest[rank], store.add(f"pair/{rank}", 0)
                        first = max(old, newest[rank] - MOST_WAITING) + 1
                        waiting |= {(rank, g): time.monotonic() for g in range(first, newest[rank] + 1)}
                        for too_many in [key for key in waiting if key[0] == rank][:-MOST_WAITING]:
                            del waiting[too_many]
                for (rank, generation), since in list(waiting.items()):
                    name = f"pair/{rank}/{generation}"
                    # Between counting and greeting a worker may die, or just not be there yet.
                    if store.check([f"{name}/hello"]):
                        del waiting[rank, generation]
                        if not store.check([f"{name}/answer"]):  # else a listener before this one gave it
                            self._consider(store, rank, generation)
                    elif time.monotonic() - since > CONNECT_S:
                        del waiting[rank, generation]
        except RuntimeError as error:
            if not self._closing.is_set():
                _log.error("no worker of another node can join any more: the store failed: %s", error)

    def _consider(self, store: TCPStore, rank: int, generation: int) -> None:
        """Answers one announcement; starts a thread for a worker of ours."""
        name = f"pair/{rank}/{generation}"
        try:
            check_hello(store.get(f"{name}/hello"), rank, generation, self._token)
            with self._changed:
                if not self._changed.wait_for(lambda: rank not in self._workers, GRACE_S):
                    raise WireError(f"rank {rank} is connected already")
        except WireError as error:
            _log.warning("refused a connection of rank %d: %s", rank, error)
            put(store, f"{name}/answer", Reply(kind=Say.FAILED, text=str(error)).pack())
            return
        thread = threading.Thread(
            target=self._work, args=(rank, generation), name=f"pair-{rank}.{generation}", daemon=True
        )
        with self._changed:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
        thread.start()
        numbers = (self.slot_bytes, self.parameter_bytes, os.getpid())
        put(store, f"{name}/answer", Reply(kind=Say.DONE, numbers=numbers).pack())

    # ---- one thread per worker ----------------------------------------------------------------------------

    def _work(self, rank: int, generation: int) -> None:
        try:
            pair = group(client(*self._store_at, timeout_s=CONNECT_S), rank, generation, own=0)
        except RuntimeError as error:
            _log.warning("rank %d announced itself, but did not connect: %s", rank, error)
            return
        worker = _Connection(self, rank, f"pair/{rank}/{generation}", pair)
        with self._changed:
            if self._closing.is_set() or not self._changed.wait_for(
                lambda: rank not in self._workers, GRACE_S
            ):
                worker.cut("too late")
                return
            self._workers[rank] = worker
            self.mailbox.put(Joined(rank))
        reason = worker.run()
        with self._changed:
            del self._workers[rank]
            self.mailbox.put(Gone(rank, reason))
            self._changed.notify_all()


class _Connection:
    """The server's end of one pair."""

    def __init__(self, listener: PairListener, rank: int, name: str, pair: ProcessGroupGloo) -> None:
        self.rank, self.name = rank, name
        self.slot = Slot.empty(listener.slot_bytes)
        self._listener = listener
        self._wire = Wire(pair, peer=1, progress=lambda: listener.mailbox.put(Alive(rank)))
        self._reason = ""
        self._under_way: list[Any] = []  # the last reply's; the worker has it when it asks again

    def run(self) -> str:
        """Serves until the connection ends; returns why."""
        try:
            while True:
                self._serve(self._wire.receive())
        except ValueError as error:  # WireError included
            self._wire.cut()
            return self._reason or f"sent what is not of this protocol: {error}"
        except RuntimeError as error:
            return self._reason or f"its connection ended: {first_line(error)}"

    def reply(self, reply: Reply) -> None:
        with contextlib.suppress(RuntimeError):  # the receiving thread notices, too
            self._under_way = self._wire.post(
                Kind.REPLY, reply.pack(), first=self._listener.snapshots.version
            )

    def flush(self, deadline_s: float) -> None:
        """Waits for the last reply to be sent, until ``deadline_s`` of the monotonic clock."""
        with contextlib.suppress(RuntimeError):  # nobody there to receive it
            for work in self._under_way:
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))

    def cut(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._wire.cut()

    def _serve(self, frame: Frame) -> None:
        listener, wire = self._listener, self._wire
        if frame.kind == Kind.CHUNK:
            start, stop = frame.first, frame.second
            if not 0 <= start <= stop <= listener.slot_bytes:
                raise WireError(f"bytes [{start}, {stop}) are not inside the slot's {listener.slot_bytes}")
            self.slot.mark(self.slot.sequence | 1)  # being written, until the next request tells its number
            wire.receive_into(frame, self.slot.data[start:stop])
        elif frame.kind == Kind.REQUEST:
            body = wire.receive_body(frame, Request.SIZE + PAYLOAD_LIMIT_BYTES)
            request = Request.unpack(body[: Request.SIZE], body[Request.SIZE :])
            self.slot.mark(frame.first)
            listener.mailbox.put(Arrived(self.rank, request))
        elif frame.kind == Kind.PARAMETERS:
            with listener.snapshots.borrow() as (version, data):
                wire.send(Kind.PARAMETERS, b"" if data is None else data, first=version)
        elif frame.kind == Kind.STATE:
            wire.send(Kind.STATE, listener.state)
        elif frame.kind == Kind.ALIVE:
            listener.mailbox.put(Alive(self.rank))
            wire.answer_life()
        else:
            raise WireError(f"{frame.kind.name} is not for a server")
