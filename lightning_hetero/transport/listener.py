"""The server's end for all workers: one thread, one socket per worker, one protocol (layer T); see `sockets`.

    listener = Listener(near=..., far=..., ...)            # rank 0, before it forks the server
    server:  listener.events() ...                               # in the forked child, which keeps its descriptors
    rank 0:  listener.detach()                                   # files stay, descriptors go
    workers: connect(listener.near_address or listener.far_address, rank)

Slots and parameters of workers on this node are memory of both. To and from others they travel on the worker's
socket: a thread takes over the socket for as long as a large body lasts, each piece of which is a sign of life.
A worker's death is an EOF on its socket, or its pidfd where its own forked child still holds the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from lightning_hetero.transport import sockets
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.base import Alive, Arrived, Ask, Gone, Happened, Joined, Reply, Request, Say
from lightning_hetero.transport.peer import Peer
from lightning_hetero.transport.progress import work_of
from lightning_hetero.transport.seqlock import ServerMemory

_log = logging.getLogger(__name__)

_SILENT = 64  # connections that have not said who they are
_AT_ONCE = 64  # connections that are let in before the workers' requests are looked at
_LAST_WORDS_S = 2.0  # for bodies that are under way when the server ends
_READ_BYTES = 1 << 18


class Listener:
    """See the module; made in the process that forks the server or in the server itself. Workers may connect at once.

    Used by one thread.

    Args:
        near: the workers of this node, which share memory with the server.
        far: workers that do not.
        host: name by which those reach this machine.
        slot_bytes, parameter_bytes: size of each worker's slot, and of the parameters.

    Attributes:
        ranks: the workers it can serve, connected or not.
        near_address: what workers on this node need to `connect`; empty without such workers.
        far_address: what others need; empty without others.
        memory: what the server shares with workers of this node.

    Raises:
        OSError: no room for so much shared memory, or no socket.
    """

    def __init__(
        self, *, near: Iterable[int] = (), far: Iterable[int] = (), host: str = "127.0.0.1", slot_bytes: int,
        parameter_bytes: int,
    ) -> None:  # fmt: skip
        self._near, elsewhere = frozenset(near), frozenset(far)
        self.ranks = self._near | elsewhere
        self.memory = ServerMemory(self._near, slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
        self._token = secrets.token_bytes(16)
        self._doors: list[socket.socket] = []
        self.near_address = self.far_address = ""
        self._unix_name = ""
        if self._near:
            door, self._unix_name = sockets.unix_door()
            self._doors.append(door)
            self.near_address = f"unix:{self._unix_name}#{self._token.hex()}"
        if elsewhere:
            self._doors.append(sockets.tcp_door(host))
            self.far_address = f"{host}:{self._doors[-1].getsockname()[1]}#{self._token.hex()}"
        self._bell = os.pipe()
        for end in self._bell:
            os.set_blocking(end, False)
        self._selector: selectors.BaseSelector | None = None
        self._peers: dict[Peer, None] = {}  # in the order in which they have come
        self._workers: dict[int, Peer] = {}
        self._news: deque[tuple[Peer, str | None]] = deque()  # of threads; None: a piece has gone; else how it ended
        self._happened: list[Happened] = []
        self._refused = set[str]()  # reasons that were told
        self._open = True

    # ---- across the fork ----------------------------------------------------------------------------------

    def fileno_list(self) -> list[int]:
        """Returns the descriptors a forked server must keep open, before `events` was ever called."""
        memory = [] if self.memory.descriptor is None else [self.memory.descriptor]
        return [*memory, *(door.fileno() for door in self._doors), *self._bell]

    # ---- the server's thread ------------------------------------------------------------------------------

    def events(self, timeout_s: float) -> list[Happened]:
        """Waits until something happens, at most ``timeout_s`` (0: not at all)."""
        deadline = time.monotonic() + timeout_s
        selector = self._started()
        while True:
            rest_s = max(0.0, deadline - time.monotonic())
            for key, mask in selector.select(0.0 if self._happened else rest_s):
                if isinstance(key.data, Peer):
                    self._serve(key.data, mask, ended=key.fd == key.data.pidfd)
                else:
                    key.data()
            if self._happened or time.monotonic() >= deadline:
                happened, self._happened = self._happened, []
                return happened

    def reply(self, rank: int, reply: Reply) -> None:
        """Answers a worker's outstanding request; a worker that is gone meanwhile is ignored."""
        if (peer := self._workers.get(rank)) is None:
            return
        if reply.kind is not Say.STATE:
            self._send(peer, reply)
            return
        state = self.memory.state
        peer.send_body(lambda: (replace(reply, numbers=(len(state),)), memoryview(state)), len(state))
        self._flush(peer)

    def gradient(self, rank: int, slot: int) -> Tensor:
        """Returns a worker's slot (uint8), to be read before the next `reply` to it.

        Raises:
            TornSlotError: it does not hold the content numbered ``slot``.
        """
        return self.memory.slot(rank).check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        """Makes ``parameters`` (uint8, all of them) the newest version; readers never see half of it."""
        self.memory.parameters.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        """Keeps ``data`` to go out with each reply ``Say.STATE``, for `WorkerLink.read_state`."""
        self.memory.state = bytes(data)

    def hangs(self, for_s: float) -> str:
        """Tells all workers that the server's thread hangs, from another one, before the process ends; returns that."""
        work = work_of(self.memory.parameters.progress)
        text = f"the parameter server (process {os.getpid()}) has been {work} for {for_s:.0f} s: it hangs"
        for peer in list(self._workers.values()):
            if not peer.outbox and peer.busy != "sends":
                with contextlib.suppress(OSError):
                    sockets.send_now(peer.connection, Reply(kind=Say.FAILED, text=text).pack())
        return text

    def dismiss(self, rank: int, reason: str) -> None:
        """Ends a worker's connection; reported as `Gone`, and to the worker by a `LeftBehindError` when it looks."""
        if (peer := self._workers.get(rank)) is not None:
            self._send(peer, Reply(kind=Say.LEFT, text=reason))  # stays to be read when the connection is closed
            self._drop(peer, reason)

    def close(self) -> None:
        """Ends all connections; idempotent."""
        if self._open:
            end_s = awake_s() + _LAST_WORDS_S
            for peer in self._peers:
                peer.join(end_s - awake_s())  # the state for a last checkpoint above all
            self.detach()
            if os.path.isabs(self._unix_name):
                os.unlink(self._unix_name)

    # ---- connections --------------------------------------------------------------------------------------

    def _started(self) -> selectors.BaseSelector:
        if not self._open:
            raise RuntimeError("this listener is closed, or detached in favour of a forked server")
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._watch_doors(self._selector)
            self._selector.register(self._bell[0], selectors.EVENT_READ, self._answer_bell)
        return self._selector

    def _answer_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell[0], 4096)
        while self._news:
            peer, how = self._news.popleft()
            if peer not in self._peers:
                continue
            if how is None:
                self._happened += [] if peer.rank is None else [Alive(peer.rank)]
                continue
            peer.hand_back()
            if how:
                self._drop(peer, how)
            else:
                self._take_in(peer)
                self._flush(peer)

    def _watch_doors(self, selector: selectors.BaseSelector) -> None:
        for door in self._doors:
            if door.fileno() not in selector.get_map():
                selector.register(door, selectors.EVENT_READ, lambda door=door: self._accept(door))

    def _accept(self, door: socket.socket) -> None:
        """Lets in who has come, several at once: those of other users must not keep ours waiting."""
        for _ in range(_AT_ONCE):
            try:
                connection, pid, uid = sockets.accept_from(door)
            except (BlockingIOError, ConnectionAbortedError):  # nobody, or gone again already
                return
            except OSError:  # no descriptors are left: who has said nothing goes, or nobody comes until somebody goes
                if not self._make_room(0):
                    self._started().unregister(door)
                return
            near = connection.family == socket.AF_UNIX
            peer = Peer(connection, pid, self._near if near else self.ranks - self._near, self._tell)
            self._peers[peer] = None
            if uid != os.getuid():
                self._refuse(peer, f"user {uid} is not the user {os.getuid()} this server works for")
            else:
                self._make_room(_SILENT)
                self._send(peer, Reply(kind=Say.DONE, text=peer.challenge))

    def _make_room(self, most: int) -> bool:
        """Drops those that have not said who they are, the first ones first; returns whether there were any to drop."""
        silent = [peer for peer in self._peers if peer.rank is None]
        for peer in silent[: max(0, len(silent) - most)]:
            self._refuse(peer, "said nothing, and others have come")
        return len(silent) > most

    def _serve(self, peer: Peer, mask: int, *, ended: bool) -> None:
        """Does what a peer's socket or pidfd is ready for."""
        if peer not in self._peers:  # dropped earlier in this round
            return
        if ended:
            self._drain(peer)
            self._drop(peer, f"its process {peer.pid} has ended")
            return
        if peer.busy:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if mask & selectors.EVENT_READ and peer in self._peers:
            self._read(peer)

    def _drain(self, peer: Peer) -> None:
        """Reads all that a process sent before its end."""
        while peer in self._peers and not peer.busy and self._read(peer):
            pass

    def _read(self, peer: Peer) -> bool:
        """Reads once; returns whether there may be more."""
        try:
            data = peer.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(peer, f"its connection failed: {error}")
            return False
        if not data:
            self._drop(peer, "closed the connection, or its process ended")
            return False
        peer.inbox += data
        self._take_in(peer)
        return True

    def _take_in(self, peer: Peer) -> None:
        """Takes whole messages out of what was read, as long as no thread reads on."""
        try:
            while peer in self._peers and peer.fill() and not peer.busy:
                if peer.rank is None:
                    if len(peer.inbox) < sockets.HELLO_BYTES:
                        return
                    self._greet(peer, sockets.check_hello(peer.take(sockets.HELLO_BYTES), peer.challenge, self._token))
                    continue
                if (request := peer.next_request()) is None:
                    return
                self._request(peer, peer.rank, request)
            self._watch(peer)
        except ValueError as error:
            self._refuse(peer, str(error) if isinstance(error, sockets.WireError) else f"sent no request: {error}")

    def _request(self, peer: Peer, rank: int, request: Request) -> None:
        far = rank not in self._near
        if request.kind is Ask.ALIVE:
            self._happened.append(Alive(rank))
            if far:
                self._send(peer, Reply(kind=Say.ALIVE))
        elif request.kind is Ask.CHUNK and far:
            peer.expect(self.memory.slot(rank), request)
        elif request.kind is Ask.PARAMETERS and far:
            peer.send_parameters(self.memory.parameters, self.memory.parameter_bytes)
            self._flush(peer)
        else:
            self._happened.append(Arrived(rank, request))

    def _greet(self, peer: Peer, rank: int) -> None:
        if rank not in peer.welcome:
            raise sockets.WireError(f"rank {rank} is not one of {sorted(peer.welcome)}, who come this way")
        if (old := self._workers.get(rank)) is not None:
            self._drain(old)  # its end may wait to be noticed
            if old in self._peers and not sockets.has_ended(old.pid, wait_s=0.0):
                raise sockets.WireError(f"rank {rank} is connected already, from process {old.pid or 'elsewhere'}")
            self._drop(old, f"its process {old.pid} has ended")
        peer.rank = rank
        self._workers[rank] = peer
        if (descriptor := sockets.open_pidfd(peer.pid)) is not None:
            peer.pidfd = descriptor
            self._started().register(descriptor, selectors.EVENT_READ, peer)
        self._happened.append(Joined(rank))
        memory = self.memory
        numbers = os.getpid(), memory.slot_bytes, memory.parameter_bytes
        if memory.descriptor is None or rank not in self._near:
            self._send(peer, Reply(kind=Say.DONE, numbers=numbers))
            return
        with contextlib.suppress(OSError):  # it is gone: its end will be read
            reply = Reply(kind=Say.DONE, numbers=(*numbers, memory.slot_at[rank]))
            sockets.send_welcome(peer.connection, reply, memory.descriptor)

    def _send(self, peer: Peer, reply: Reply) -> None:
        peer.outbox += reply.pack()
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Sends what fits; a stopped worker's rest waits in memory, not in our way."""
        try:
            while peer.outbox and peer.busy != "sends":  # not into the middle of that
                sent = sockets.send_now(peer.connection, peer.outbox)
                del peer.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._drain(peer)
            self._drop(peer, f"its connection failed: {error}")
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        """Has the selector look at a peer for what it may do now."""
        if peer not in self._peers:
            return
        wanted = 0 if peer.busy else selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if wanted == peer.watched:
            return
        if not peer.watched:
            self._started().register(peer.connection, wanted, peer)
        elif not wanted:
            self._started().unregister(peer.connection)
        else:
            self._started().modify(peer.connection, wanted, peer)
        peer.watched = wanted

    def _tell(self, peer: Peer, how: str | None) -> None:
        """For a peer's threads."""
        self._news.append((peer, how))
        with contextlib.suppress(BlockingIOError):  # full: the server wakes anyway
            os.write(self._bell[1], b".")

    # ---- ends ---------------------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Says why, and ends the connection."""
        if reason not in self._refused:  # whoever comes again and again must not fill the log
            self._refused.add(reason)
            _log.warning("refused a connection from process %d, and others like it: %s", peer.pid, reason)
        with contextlib.suppress(OSError):
            sockets.send_now(peer.connection, Reply(kind=Say.FAILED, text=reason).pack())
        self._drop(peer, f"refused: {reason}")

    def _drop(self, peer: Peer, reason: str) -> None:
        if peer not in self._peers:
            return
        del self._peers[peer]
        if self._selector is not None:
            if peer.watched:
                self._selector.unregister(peer.connection)
            if peer.pidfd is not None:
                self._selector.unregister(peer.pidfd)
        peer.close()
        if self._selector is not None and self._open:
            self._watch_doors(self._selector)  # a descriptor has become free
        if peer.rank is not None:
            del self._workers[peer.rank]
            self.memory.forget(peer.rank)
            self._happened.append(Gone(peer.rank, reason))

    def detach(self) -> None:
        """Lets go of everything: for the parent, once the forked server has taken over."""
        if not self._open:
            return
        self._open = False
        for peer in list(self._peers):
            self._drop(peer, "the server has closed its listener")
        if self._selector is not None:
            self._selector.close()
        for door in self._doors:
            door.close()
        for end in self._bell:
            os.close(end)
        self.memory.close()
