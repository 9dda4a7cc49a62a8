"""Transports between real processes: forked servers and their death, strangers, files left by the dead, two at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch.distributed import TCPStore

from lightning_hetero.transport import sockets
from lightning_hetero.transport.base import (
    Alive,
    Arrived,
    Ask,
    Gone,
    Joined,
    Listener,
    Reply,
    Request,
    Say,
    ServerLostError,
    WorkerLink,
)
from lightning_hetero.transport.merged import Several
from lightning_hetero.transport.pairs import frames
from lightning_hetero.transport.pairs import handshake as rendezvous
from lightning_hetero.transport.pairs import link as pair_link
from lightning_hetero.transport.pairs.listener import PairLink, PairListener
from lightning_hetero.transport.pulse import Pulse
from lightning_hetero.transport.shared_memory import directory, state_file
from lightning_hetero.transport.shared_memory import link as shared_memory_link
from lightning_hetero.transport.shared_memory import listener as shared_memory
from lightning_hetero.transport.shared_memory.listener import SharedMemoryLink, SharedMemoryListener
from tests.ranks.transport.in_process import InProcess
from tests.ranks.transport.kit import DONE, PATIENCE_S, STOP, TOKEN, Crew, Place, open_place, spawn
from tests.ranks.transport.kit import KINDS as ALL_KINDS

KINDS = [kind for kind in ALL_KINDS if kind != "in_process"]
SIZES: dict[str, Any] = {"slot_bytes": 4096, "parameter_bytes": 4096}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For files and sockets: of the path of a socket, the system allows about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="lh-") as folder:
        yield Path(folder)


# ---- servers: forked, killed ------------------------------------------------------------------------------


def serve(listener: Listener, ranks: int) -> None:
    """Answers every request, until all workers have come and gone."""
    listener.publish(0, torch.zeros(4096, dtype=torch.uint8))
    gone = 0
    while gone < ranks:
        for event in listener.events(None):
            gone += isinstance(event, Gone)
            if isinstance(event, Arrived):
                listener.reply(event.rank, DONE)
    listener.close()


def forking_server(kind: str, folder: str, talk: Connection) -> None:
    """Is rank 0: makes the listener, forks the server, closes nothing of the server's but its own copies."""
    if kind == "pairs":  # its store and its threads live in the server
        ready, its = Pipe()
        pid = os.fork()
        if pid == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pairs = PairListener(store, ranks=range(2), token=TOKEN, **SIZES)
            its.send(pairs.address)
            serve(pairs, 2)
            os._exit(0)
        address = ready.recv()
    else:
        listener = SharedMemoryListener.create(folder, ranks=range(2), **SIZES)
        address, keep = listener.address, listener.fileno_list()
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
        listener.close()  # removes nothing any more
    talk.send((address, pid))
    _, status = os.waitpid(pid, 0)
    talk.send(os.waitstatus_to_exitcode(status))
    talk.recv()


def start_server(kind: str, folder: Path) -> tuple[Connection, Any, str, int]:
    mine, its = Pipe()
    process = spawn(forking_server, kind, str(folder), its)
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


def connect(kind: str, address: str, rank: int) -> WorkerLink:
    if kind == "pairs":
        return PairLink(address, rank, token=TOKEN)
    return SharedMemoryLink(address, rank)


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_server_serves_and_removes_its_files(kind: str, short_path: Path, loopback: None) -> None:
    talk, process, address, _ = start_server(kind, short_path)
    links = [connect(kind, address, rank) for rank in (0, 1)]
    assert all(link.call(Request(kind=Ask.CLAIM)) == DONE for link in links)
    assert len(list(short_path.glob("lightning-hetero-*"))) == (kind == "shared_memory")
    for link in links:
        link.close()
        link.close()
    assert end_server(talk, process) == 0
    assert list(short_path.glob("lightning-hetero-*")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_link_learns_of_the_servers_death(kind: str, short_path: Path, loopback: None) -> None:
    talk, process, address, pid = start_server(kind, short_path)
    links = [connect(kind, address, rank) for rank in (0, 1)]
    assert all(link.call(Request(kind=Ask.CLAIM)) == DONE for link in links)
    os.kill(pid, 9)
    assert end_server(talk, process) == -9
    for link in links:
        started = time.monotonic()
        with pytest.raises(ServerLostError, match=f"process {pid}. has ended" if kind != "pairs" else "ended"):
            link.call(Request(kind=Ask.CLAIM))
        assert time.monotonic() - started < 2.0
        link.close()
    assert list(short_path.glob("lightning-hetero-*")) == []  # it could not remove them itself
    if kind == "shared_memory":
        with pytest.raises(ServerLostError, match="ended"):
            SharedMemoryLink(address, 0)


def test_a_server_on_another_node_that_gives_no_sign_is_lost(
    short_path: Path, loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has lost power: no connection ends, and no answer comes."""
    monkeypatch.setattr(pair_link, "_SILENCE_S", 0.3)
    talk, process, address, pid = start_server("pairs", short_path)
    links = [connect("pairs", address, rank) for rank in (0, 1)]
    pulse = Pulse(links[0], 0.01)
    assert all(link.call(Request(kind=Ask.CLAIM)) == DONE for link in links)
    os.kill(pid, STOP)
    try:
        started_s = time.monotonic()
        with pytest.raises(ServerLostError, match=r"the network failed"):
            links[0].call(Request(kind=Ask.CLAIM))
        assert time.monotonic() - started_s < 10.0 and not links[0].left_behind
    finally:
        os.kill(pid, 9)
        pulse.stop()
        links[1].close()
    assert end_server(talk, process) == -9


def test_a_large_body_travels_in_pieces_each_of_which_is_a_sign_of_life(
    loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 100_000
    monkeypatch.setattr(frames, "PIECE_BYTES", 1000)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = PairListener(store, ranks=[0], slot_bytes=size, parameter_bytes=size, token=TOKEN)
    pattern = (torch.arange(size) % 251).to(torch.uint8)
    listener.publish(4, pattern)
    happened: list[Any] = []

    def answer() -> None:
        while not any(isinstance(event, Arrived) for event in happened):
            happened.extend(listener.events(None))
        assert torch.equal(listener.gradient(0, 2), pattern)
        listener.reply(0, DONE)

    server = threading.Thread(target=answer)
    server.start()
    link = PairLink(listener.address, 0, token=TOKEN)
    into = torch.zeros(size, dtype=torch.uint8)
    assert link.read_parameters(into) == 4 and torch.equal(into, pattern)
    link.open_slot()
    link.gradient.copy_(pattern)
    assert link.call(Request(kind=Ask.PUSH, slot=link.close_slot())) == DONE
    link.close()
    server.join(PATIENCE_S)
    listener.close()
    assert not server.is_alive() and happened.count(Alive(0)) == 2 * 99


# ---- strangers --------------------------------------------------------------------------------------------


def visit(place: Place, *parts: bytes) -> tuple[list[Reply], list[Any]]:
    """Sends ``parts`` as a stranger; returns the answers until the connection ends, and what the server saw."""
    events: list[Any] = []
    answers = bytearray()
    deadline = time.monotonic() + PATIENCE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(place.address.partition("#")[0] + "/control")
        for part in parts:
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


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak this protocol"),
        (lambda token: sockets.HELLO.pack(b"lhstale\0", 99, 0, token), "speaks format 99"),
        (lambda token: sockets.Hello(1, bytes(16)).pack(), "token is wrong"),
        (lambda token: sockets.Hello(7, token).pack(), "rank 7 is not of this node"),
    ],
    ids=["magic", "format", "token", "rank"],
)
def test_a_stranger_is_refused_and_disturbs_nobody(first: Callable[[bytes], bytes], reason: str) -> None:
    with open_place("shared_memory") as place, undisturbed(place):
        message = first(bytes.fromhex(place.address.partition("#")[2]))
        half = len(message) // 2
        (answer,), events = visit(place, message[:half], message[half:])
        assert answer.kind == Say.FAILED and reason in answer.text and events == []


@pytest.mark.parametrize(
    ("then", "reason"), [(HUGE, "68157440 bytes"), (bytes(Request.SIZE), "no request")], ids=["payload", "kind"]
)
def test_a_worker_gone_mad_is_shown_the_door(then: bytes, reason: str) -> None:
    with open_place("shared_memory") as place, undisturbed(place):
        token = bytes.fromhex(place.address.partition("#")[2])
        (welcome, answer), events = visit(place, sockets.Hello(1, token).pack(), then)
        assert welcome.kind == Say.DONE and answer.kind == Say.FAILED and reason in answer.text
        assert events == [Joined(1), Gone(1)] and reason in events[1].reason


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("shared_memory") as place, undisturbed(place):
        monkeypatch.setattr(shared_memory, "peer_credentials", lambda connection: (1, os.getuid() + 1))
        (answer,), events = visit(place, b"")
        monkeypatch.undo()
        assert f"user {os.getuid() + 1} is not the user" in answer.text and events == []


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "HELLO_TIMEOUT_S", 0.1)
    with open_place("shared_memory") as place:
        (answer,), events = visit(place)
        assert "said nothing" in answer.text and events == []


def test_a_server_of_another_user_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("shared_memory") as place:
        monkeypatch.setattr(shared_memory_link, "peer_credentials", lambda connection: (1, os.getuid() + 1))
        with pytest.raises(ConnectionRefusedError, match=f"of user {os.getuid() + 1}"):
            SharedMemoryLink(place.address, 0)


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


@pytest.mark.parametrize("wrong", ["token", "magic", "format"])
def test_a_stranger_gets_no_pair(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place("pairs") as place, undisturbed(place):
        if wrong == "token":
            expected = "token is wrong"
            link = PairLink
        else:
            expected = "does not speak" if wrong == "magic" else "speaks format 2"
            good = rendezvous.hello(1, 1, TOKEN)
            bad = b"GET / HTTP/1.1" if wrong == "magic" else good[:8] + b"\2" + good[9:]
            monkeypatch.setattr(pair_link, "hello", lambda *args: bad)
            link = PairLink
        with pytest.raises(ConnectionRefusedError, match=expected):
            link(place.address, 1, token=bytes(16) if wrong == "token" else TOKEN)
        assert place.listener.events(0.0) == []


# ---- folders ----------------------------------------------------------------------------------------------


def listener_in(folder: Path, **changed: Any) -> SharedMemoryListener:
    return SharedMemoryListener.create(folder, ranks=(0, 1), **{**SIZES, **changed})


def test_the_folder_is_ours_alone_and_goes_with_the_listener(short_path: Path) -> None:
    listener = listener_in(short_path)
    (folder,) = short_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} == {"lock", "control", "parameters", "slot-0", "slot-1"}
    listener.close()
    listener.close()
    assert list(short_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        listener.events(0)
    with pytest.raises(ServerLostError, match="never was there"):
        SharedMemoryLink(listener.address, 0)


def test_folders_of_the_dead_are_removed_and_of_the_living_kept(short_path: Path) -> None:
    talk, process, address, pid = start_server("shared_memory", short_path)
    living = listener_in(short_path)
    os.kill(pid, 9)
    end_server(talk, process)
    dead = Path(address.partition("#")[0])
    assert dead.exists()
    os.utime(dead, (0, 0))
    listener_in(short_path).close()
    assert list(short_path.iterdir()) == [Path(living.address.partition("#")[0])]
    living.close()


def test_without_room_the_error_says_what_to_do(short_path: Path) -> None:
    with pytest.raises(OSError, match="no room for the server's shared memory"):
        listener_in(short_path, slot_bytes=1 << 60)
    assert list(short_path.iterdir()) == []


def full(monkeypatch: pytest.MonkeyPatch, *fulls: Path) -> None:
    """No byte can be written in these folders any more."""
    write = directory.replace_file

    def replace_file(path: Path, data: bytes) -> None:
        if any(path.is_relative_to(one) for one in fulls):
            path.with_name(f"{path.name}.new").symlink_to("/dev/full")
        write(path, data)

    monkeypatch.setattr(state_file, "replace_file", replace_file)


def test_a_state_without_room_goes_elsewhere_and_is_removed_with_the_rest(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In docker /dev/shm has 64 MB."""
    here, there = short_path / "here", short_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.setattr(state_file, "places", lambda: iter([here, there]))
    with contextlib.closing(listener_in(here)) as listener:
        state = Path(listener.address.partition("#")[0]) / "state"
        listener.share_state(b"small")
        with monkeypatch.context() as patch:
            full(patch, here)
            for data in (b"large", b"larger"):
                listener.share_state(data)
                assert state.read_bytes() == data and state.resolve().is_relative_to(there)
            assert len(list(there.iterdir())) == 1
            full(patch, here, there)
            with pytest.raises(OSError, match=r"no room for the server's state, 0 MiB; tried .*here: No space left"):
                listener.share_state(b"no place at all")
        listener.share_state(b"small again")
        assert state.read_bytes() == b"small again" and list(there.iterdir()) == []
        full(monkeypatch, here)
        listener.share_state(b"large")
        listener.remove()  # as the parent of a server does that had to be killed
        assert list(here.iterdir()) == list(there.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused(short_path: Path) -> None:
    deep = short_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ValueError, match="shorter path"):
        listener_in(deep)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    "changed", [{"slot_bytes": 0}, {"parameter_bytes": -1}, {"ranks": ()}, {"ranks": (-1,)}, {"slot_bytes": 1.0}]
)
def test_bad_settings_are_refused(changed: dict[str, Any], short_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        SharedMemoryListener.create(short_path, **{"ranks": (0,), **SIZES, **changed})
    assert list(short_path.iterdir()) == []


@pytest.mark.parametrize("make", [lambda: SharedMemoryLink("nowhere", 0), lambda: PairLink("nowhere", 0, token=TOKEN)])
def test_what_is_no_address_is_refused(make: Callable[[], WorkerLink]) -> None:
    with pytest.raises(ValueError, match="address='nowhere'"):
        make()


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        PairLink("localhost:1", 0, token=b"short")


# ---- two at once ------------------------------------------------------------------------------------------


def test_several_listeners_are_one(loopback: None) -> None:
    near = SharedMemoryListener.create(None, ranks=(0,), **SIZES)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    far = PairListener(store, ranks=(1,), token=TOKEN, **SIZES)
    both = Several([far, near])
    places = [Place("shared_memory", both, near.address), Place("pairs", both, far.address)]
    crews: list[Crew] = []
    try:
        both.publish(3, torch.full((4096,), 9, dtype=torch.uint8))
        both.share_state(b"state")
        crews = [place.start(rank, near_or_far) for rank, place in enumerate(places)]
        missing = {Joined(0), Joined(1), Gone(0), Gone(1)}
        while missing:
            for event in both.events(PATIENCE_S):
                missing.discard(event)
                if isinstance(event, Arrived):
                    slot = both.gradient(event.rank, event.request.slot)
                    both.reply(event.rank, Reply(kind=Say.DONE, numbers=[int(slot.sum())]))
        assert [crew.result() for crew in crews] == [4096 * 1, 4096 * 2]
        with pytest.raises(ValueError, match="rank=2"):
            both.reply(2, DONE)
        both.disconnect(0)
        both.wake()
        assert both.events(None) == []
    finally:
        both.close()
        for crew in crews:
            crew.end()


def test_who_wakes_the_first_listener_is_closed_before_it() -> None:
    """Else a bell is rung whose file number is somebody else's by then."""
    closed: list[int] = []
    listeners = [create_autospec(kind, instance=True) for kind in (SharedMemoryListener, PairListener, PairListener)]
    for rank, listener in enumerate(listeners):
        listener.ranks = frozenset([rank])
        listener.close.side_effect = lambda rank=rank: closed.append(rank)
    Several(listeners).close()
    assert closed == [1, 2, 0]


def test_who_counts_up_at_will_keeps_nobody_out(loopback: None) -> None:
    """A worker says in the store that it is there; so can anybody who reaches the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = PairListener(store, ranks=(1,), token=TOKEN, **SIZES)
    store.add("pair/1", 10**7)
    store.add(rendezvous.COUNTER, 1)
    crew = Place("pairs", listener, listener.address).start(1, says_nothing)
    try:
        assert Joined(1) in listener.events(PATIENCE_S)
    finally:
        listener.close()
        crew.end()


def says_nothing(link: WorkerLink, talk: Connection) -> None:
    talk.poll(PATIENCE_S)


def near_or_far(link: WorkerLink, talk: Connection) -> int:
    link.open_slot()
    link.gradient.fill_(link.rank + 1)
    (total,) = link.call(Request(kind=Ask.PUSH, slot=link.close_slot())).numbers
    into = torch.zeros(4096, dtype=torch.uint8)
    assert link.read_parameters(into) == 3 and bool((into == 9).all()) and link.read_state() == b"state"
    return total


def test_listeners_that_do_not_fit_together_are_refused(short_path: Path) -> None:
    one, two = InProcess(2, 8, 8).listener, InProcess(1, 8, 8).listener
    for listeners, reason in (([], "at least one"), ([one, two], "a rank is in two")):
        with pytest.raises(ValueError, match=reason):
            Several(listeners)
    waiting = [SharedMemoryListener.create(short_path, ranks=(rank,), **SIZES) for rank in (4, 5)]
    with pytest.raises(ValueError, match="wait by themselves"):
        Several(waiting)
    for listener in waiting:
        listener.close()
