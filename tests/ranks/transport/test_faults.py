"""Transports between real processes: forked servers and their death, strangers, two at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from lightning_hetero.transport import link as link_module
from lightning_hetero.transport import listener as listeners
from lightning_hetero.transport import peer as peers
from lightning_hetero.transport import sockets
from lightning_hetero.transport.base import Alive, Arrived, Ask, Gone, Joined, Reply, Request, Say, ServerLostError
from lightning_hetero.transport.link import WorkerLink, connect
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.pulse import Pulse
from tests.ranks.transport.kit import DONE, KINDS, PATIENCE_S, STOP, Crew, Place, make_listener, open_place, spawn

SIZES: dict[str, Any] = {"slot_bytes": 4096, "parameter_bytes": 4096}


# ---- servers: forked, killed ------------------------------------------------------------------------------


def serve(listener: Listener, ranks: int) -> None:
    """Answers every request, until all workers have come and gone."""
    listener.publish(0, torch.zeros(4096, dtype=torch.uint8))
    gone = 0
    while gone < ranks:
        for event in listener.events(PATIENCE_S):
            gone += isinstance(event, Gone)
            if isinstance(event, Arrived):
                listener.reply(event.rank, DONE)
    listener.close()


def forking_server(kind: str, talk: Connection) -> None:
    """Is rank 0: makes the listener, forks the server, closes nothing of the server's but its own copies."""
    listener = make_listener(kind, 2, **SIZES)
    address, keep = listener.near_address or listener.far_address, listener.fileno_list()
    pid = os.fork()
    if pid == 0:
        for descriptor in set(range(3, 256)) - set(keep):
            try:
                os.close(descriptor)
            except OSError:
                continue
        serve(listener, 2)
        os._exit(0)
    listener.detach()
    listener.close()
    talk.send((address, pid))
    _, status = os.waitpid(pid, 0)
    talk.send(os.waitstatus_to_exitcode(status))
    talk.recv()


def start_server(kind: str) -> tuple[Connection, Any, str, int]:
    mine, its = Pipe()
    process = spawn(forking_server, kind, its)
    assert mine.poll(PATIENCE_S)
    address, pid = mine.recv()
    return mine, process, address, pid


def end_server(talk: Connection, process: Any) -> int:
    assert talk.poll(PATIENCE_S)
    code = talk.recv()
    talk.send("end")
    process.join(PATIENCE_S)
    process.close()
    return code


@pytest.mark.parametrize("kind", KINDS)
def test_every_link_learns_of_the_servers_death(kind: str) -> None:
    talk, process, address, pid = start_server(kind)
    links = [connect(address, rank) for rank in (0, 1)]
    assert all(link.call(Request(kind=Ask.CLAIM)) == DONE for link in links)
    os.kill(pid, 9)
    assert end_server(talk, process) == -9
    for link in links:
        started = time.monotonic()
        with pytest.raises(ServerLostError, match=f"process {pid}. has ended" if kind != "wire" else "ended"):
            link.call(Request(kind=Ask.CLAIM))
        assert time.monotonic() - started < 2.0
        link.close()
    with pytest.raises(ServerLostError, match="ended"):
        connect(address, 0)


def test_a_server_on_another_node_that_gives_no_sign_is_lost(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has lost power: no connection ends, and no answer comes."""
    monkeypatch.setattr(link_module, "_LATER_S", 0.5)
    talk, process, address, pid = start_server("wire")
    links = [connect(address, rank, patience_s=0.5) for rank in (0, 1)]
    pulse = Pulse(links[0], 0.01)
    assert all(link.call(Request(kind=Ask.CLAIM)) == DONE for link in links)
    os.kill(pid, STOP)
    try:
        started_s = time.monotonic()
        with pytest.raises(ServerLostError, match=r"has answered nothing for \d s: .*the network failed"):
            links[0].call(Request(kind=Ask.CLAIM))
        assert time.monotonic() - started_s < 10.0 and not links[0].left_behind
    finally:
        os.kill(pid, 9)
        pulse.stop()
        links[1].close()
    assert end_server(talk, process) == -9


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_a_large_body_travels_in_pieces_each_of_which_is_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    size = 100_000
    monkeypatch.setattr(sockets, "PIECE_BYTES", 1000)
    monkeypatch.setattr(peers, "_INLINE_BYTES", inline)
    monkeypatch.setattr(listeners, "_READ_BYTES", 1000)
    listener = make_listener("wire", 1, slot_bytes=size, parameter_bytes=size)
    pattern = (torch.arange(size) % 251).to(torch.uint8)
    listener.publish(4, pattern)
    listener.share_state(pattern.numpy().tobytes())
    happened: list[Any] = []

    def answer() -> None:
        for reply in (DONE, Reply(kind=Say.STATE)):
            seen = len(happened)
            while not any(isinstance(event, Arrived) for event in happened[seen:]):
                happened.extend(listener.events(PATIENCE_S))
            if reply is DONE:
                assert torch.equal(listener.gradient(0, 2), pattern)
            listener.reply(0, reply)
        while Gone(0) not in happened:
            happened.extend(listener.events(PATIENCE_S))

    server = threading.Thread(target=answer)
    server.start()
    link = connect(listener.far_address, 0)
    into = torch.zeros(size, dtype=torch.uint8)
    assert link.read_parameters(into) == 4 and torch.equal(into, pattern) and link.newest_version() == 4
    link.open_slot()
    link.gradient.copy_(pattern)
    assert link.call(Request(kind=Ask.PUSH, slot=link.close_slot())) == DONE
    assert link.call(Request(kind=Ask.STATE)).kind is Say.STATE and link.read_state() == pattern.numpy().tobytes()
    link.close()
    server.join(PATIENCE_S)
    listener.close()
    assert not server.is_alive() and (happened.count(Alive(0)) > 200) == (inline == 0)


def test_whatever_goes_wrong_in_a_thread_of_the_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_INLINE_BYTES", 0)
    listener = make_listener("wire", 1, **SIZES)
    listener.publish(0, torch.zeros(4096, dtype=torch.uint8))
    link = None
    with ThreadPoolExecutor(1) as pool:
        try:
            linked = pool.submit(connect, listener.far_address, 0)
            while not linked.done():
                listener.events(0.01)
            link = linked.result()
            monkeypatch.setattr(listener.memory.parameters, "read", lambda into: 1 // 0)
            read = pool.submit(link.read_parameters, torch.zeros(4096, dtype=torch.uint8))
            happened: list[Any] = []
            while Gone(0) not in happened:
                happened += listener.events(PATIENCE_S)
            assert happened[-1].reason == (
                "its connection failed: ZeroDivisionError: integer division or modulo by zero"
            )
            with pytest.raises(ServerLostError):
                read.result(PATIENCE_S)
        finally:
            listener.close()
            if link is not None:
                link.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_answer_reaches_a_worker_that_is_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends when the last worker has left: it must not cut off its own answer, or that worker fails."""
    listener = make_listener(kind, 1, **SIZES)

    def answer_and_end() -> None:
        while not any(isinstance(event, Arrived) for event in listener.events(PATIENCE_S)):
            pass
        listener.reply(0, DONE)
        listener.close()

    server = threading.Thread(target=answer_and_end)
    server.start()
    link = connect(listener.near_address or listener.far_address, 0)
    receive = link._receive

    def late(*args: Any) -> Any:
        link.sign_of_life()  # unread when the server ends
        server.join()
        return receive(*args)

    monkeypatch.setattr(link, "_receive", late)
    assert link.call(Request(kind=Ask.LEAVE)) == DONE
    link.close()


# ---- strangers --------------------------------------------------------------------------------------------


def visit(place: Place, *parts: bytes | Callable[[str, bytes], bytes]) -> tuple[list[Reply], list[Any]]:
    """Sends ``parts`` as a stranger; returns the answers until the connection ends, and what the server saw."""
    events: list[Any] = []
    answers = bytearray()
    deadline = time.monotonic() + PATIENCE_S
    where = place.address.partition("#")[0]
    with socket.socket(socket.AF_UNIX if place.kind == "shared_memory" else socket.AF_INET) as stranger:
        host, _, port = where.rpartition(":")
        stranger.connect(port.replace("@", "\0") if host == "unix" else (host, int(port)))
        events += place.listener.events(0.02)
        answers += stranger.recv(1 << 16)
        for part in parts:
            if callable(part):
                part = part(challenge(answers), bytes.fromhex(place.address.partition("#")[2]))
            events += place.listener.events(0.02)
            with contextlib.suppress(BrokenPipeError):
                stranger.sendall(part)
        stranger.setblocking(False)
        while time.monotonic() < deadline:
            events += place.listener.events(0.02)
            with contextlib.suppress(BlockingIOError):
                if not (part := stranger.recv(1 << 16)):
                    break
                answers += part
    replies: list[Reply] = []
    while answers:
        end = Reply.SIZE + Reply.body_size(bytes(answers[: Reply.SIZE]))
        replies.append(Reply.unpack(bytes(answers[: Reply.SIZE]), bytes(answers[Reply.SIZE : end])))
        del answers[:end]
    return replies, events


def challenge(answers: bytearray) -> str:
    return Reply.unpack(bytes(answers[: Reply.SIZE]), bytes(answers[Reply.SIZE :])).text


def called_thrice(link: WorkerLink, talk: Connection) -> None:
    for _ in range(3):
        assert link.call(Request(kind=Ask.CLAIM)) == DONE


@contextlib.contextmanager
def undisturbed(place: Place) -> Iterator[None]:
    """Has a worker's call held meanwhile; afterwards it is answered and goes on."""
    crew = place.start(0, called_thrice)
    place.until(Joined(0), Arrived)
    yield
    place.listener.reply(0, DONE)
    place.until(Arrived, Arrived, Gone(0), answer=lambda _: DONE)
    crew.result()


HUGE = Request(kind=Ask.PUSH).pack()[:-4] + (65 << 20).to_bytes(4, "little")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (lambda challenge, token: b"GET / HTTP/1.1\r\n".ljust(80), "does not speak this protocol"),
        (lambda challenge, token: sockets._HELLO.pack(b"lhstale\0", 99, 0, bytes(32)), "speaks format 99"),
        (lambda challenge, token: sockets.hello(1, challenge, bytes(16)), "token is wrong"),
        (lambda challenge, token: sockets.hello(1, "another", token), "token is wrong"),
        (lambda challenge, token: sockets.hello(7, challenge, token), "rank 7 is not one of"),
    ],
    ids=["magic", "format", "token", "replayed", "rank"],
)
def test_a_stranger_is_refused_and_disturbs_nobody(
    kind: str, first: Callable[[str, bytes], bytes], reason: str
) -> None:
    with open_place(kind) as place, undisturbed(place):
        (welcome, answer), events = visit(place, first)
        assert welcome.kind == Say.DONE
        assert answer.kind == Say.FAILED and reason in answer.text and events == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("then", "reason"),
    [(HUGE, "68157440 bytes"), (bytes(Request.SIZE), "no request"),
     (Request(kind=Ask.CHUNK, numbers=(0, 1 << 40)).pack(), "not inside the slot")],
    ids=["payload", "kind", "chunk"],
)  # fmt: skip
def test_a_worker_gone_mad_is_shown_the_door(kind: str, then: bytes, reason: str) -> None:
    if kind == "shared_memory" and "inside" in reason:
        return  # its slot is its own
    with open_place(kind) as place, undisturbed(place):
        (_, welcome, answer), events = visit(place, lambda c, token: sockets.hello(1, c, token), then)
        assert welcome.kind == Say.DONE and answer.kind == Say.FAILED and reason in answer.text
        assert events == [Joined(1), Gone(1)] and reason in events[1].reason


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("shared_memory") as place, undisturbed(place):
        monkeypatch.setattr(sockets, "peer_credentials", lambda connection: (1, os.getuid() + 1))
        (answer,), events = visit(place, b"")
        monkeypatch.undo()
        assert f"user {os.getuid() + 1} is not the user" in answer.text and events == []


def reached(place: Place) -> socket.socket:
    """Returns a connection to the listener on which nothing has been said."""
    at, _, port = place.address.partition("#")[0].rpartition(":")
    if at == "unix":
        return sockets.connect_to_unix(port, 5.0)
    return sockets.connect_to_tcp(at, int(port), 5.0)


def said(silent: socket.socket) -> bytes:
    """Returns what the listener says until it ends the connection."""
    silent.settimeout(5.0)
    return b"".join(iter(lambda: silent.recv(1 << 16), b""))


@pytest.mark.parametrize("kind", KINDS)
def test_of_those_that_say_nothing_the_first_ones_go_when_others_come(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_SILENT", 2)
    with open_place(kind) as place, undisturbed(place), ExitStack() as stack:
        silent = [stack.enter_context(reached(place)) for _ in range(3)]
        assert place.listener.events(0.02) == []
        assert b"said nothing" in said(silent[0])
        assert len(place.listener._peers) == 2 + 1  # and the worker that is undisturbed
        visit(place, lambda challenge, token: sockets.hello(7, challenge, token))
        assert b"said nothing" in said(silent[1])


def test_connections_of_other_users_put_nobody_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "_SILENT", 1)
    with open_place("shared_memory") as place, undisturbed(place), ExitStack() as stack:
        ours = stack.enter_context(reached(place))
        assert place.listener.events(0.02) == []
        monkeypatch.setattr(sockets, "peer_credentials", lambda connection: (1, os.getuid() + 1))
        strangers = [stack.enter_context(reached(place)) for _ in range(5)]
        assert place.listener.events(0.02) == []
        assert all(b"is not the user" in said(stranger) for stranger in strangers)
        ours.setblocking(False)
        assert ours.recv(1 << 16)  # the challenge, and no end
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    assert len([record for record in caplog.records if "is not the user" in record.message]) == 1


@pytest.mark.parametrize("silent", [0, 1])
def test_without_descriptors_the_server_neither_spins_nor_dies(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("shared_memory") as place, undisturbed(place), ExitStack() as stack:
        worker = place.start(1, called_thrice)
        place.until(Joined(1), Arrived)
        kept = [stack.enter_context(reached(place)) for _ in range(silent)]
        assert place.listener.events(0.02) == []
        looks = list[int]()

        def accept_from(door: socket.socket) -> None:
            looks.append(1)
            raise OSError(errno.EMFILE, "too many open files")

        accepts = sockets.accept_from
        monkeypatch.setattr(sockets, "accept_from", accept_from)
        waits = stack.enter_context(reached(place))
        assert place.listener.events(0.1) == []
        assert len(looks) == 1 + silent, "it looks again when a descriptor has become free, and not before"
        assert all(b"said nothing" in said(connection) for connection in kept)
        monkeypatch.setattr(sockets, "accept_from", accepts)
        worker.kill()
        assert place.until(Gone(1)) == [Gone(1)]
        assert place.listener.events(0.02) == []
        assert waits.recv(1 << 16)  # a challenge


def test_a_server_of_another_user_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("shared_memory") as place:
        monkeypatch.setattr(link_module.sockets, "peer_credentials", lambda connection: (1, os.getuid() + 1))
        with pytest.raises(ConnectionRefusedError, match=f"of user {os.getuid() + 1}"):
            connect(place.address, 0)


def test_a_worker_whose_forked_child_holds_the_socket_is_told_as_gone() -> None:
    if not hasattr(os, "pidfd_open"):
        pytest.skip("no pidfd here")
    with open_place("shared_memory") as place:
        crew = place.start(1, forks_and_waits)
        place.until(Joined(1), Arrived, answer=lambda _: DONE)
        child = crew.says()
        crew.kill()
        try:
            place.until(Gone(1))
            os.kill(child, 0)  # still there, with the socket
        finally:
            os.kill(child, 9)


def forks_and_waits(link: WorkerLink, talk: Connection) -> None:
    link.call(Request(kind=Ask.CLAIM))
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE_S)
        os._exit(0)
    talk.send(child)
    talk.recv()


# ---- listeners and addresses ------------------------------------------------------------------------------


def test_a_closed_listener_is_gone() -> None:
    listener = make_listener("shared_memory", 2, **SIZES)
    listener.close()
    listener.close()
    with pytest.raises(RuntimeError, match="closed"):
        listener.events(0)
    with pytest.raises(ServerLostError, match="never was there"):
        connect(listener.near_address, 0)


@pytest.mark.parametrize("address", ["nowhere", "nowhere#" + 32 * "a", "unix:x#short", "host:port#" + 32 * "a"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be a Listener's") as caught:
        connect(address, 0)
    assert 32 * "a" not in str(caught.value)


# ---- two at once ------------------------------------------------------------------------------------------


def test_workers_of_this_node_and_of_others_are_served_alike() -> None:
    listener = Listener(near=(0,), far=(1,), **SIZES)
    places = [Place(kind, listener, address) for kind, address in
              (("shared_memory", listener.near_address), ("wire", listener.far_address))]  # fmt: skip
    crews: list[Crew] = []
    try:
        listener.publish(3, torch.full((4096,), 9, dtype=torch.uint8))
        crews = [place.start(rank, near_or_far) for rank, place in enumerate(places)]
        missing = {Joined(0), Joined(1), Gone(0), Gone(1)}
        while missing:
            for event in listener.events(PATIENCE_S):
                missing.discard(event)
                if isinstance(event, Arrived):
                    slot = listener.gradient(event.rank, event.request.slot)
                    listener.reply(event.rank, Reply(kind=Say.DONE, numbers=[int(slot.sum())]))
        assert [crew.result() for crew in crews] == [4096 * 1, 4096 * 2]
    finally:
        listener.close()
        for crew in crews:
            crew.end()


def near_or_far(link: WorkerLink, talk: Connection) -> int:
    link.open_slot()
    link.gradient.fill_(link.rank + 1)
    (total,) = link.call(Request(kind=Ask.PUSH, slot=link.close_slot())).numbers
    into = torch.zeros(4096, dtype=torch.uint8)
    assert link.read_parameters(into) == 3 and bool((into == 9).all())
    return total
