"""Strangers: what somebody who is no rank does to a job that trains, on the same machine and perhaps as another user.

    doors(pids)                              where these processes and their children listen: ports and unix sockets
    with attacking(pids, "silence", uid=NOBODY) as attack:
        attack.begun()                       returns when every door has been tried once; raises if none was open
        ...                                  the job trains on; a stranger's open connections stay until the block ends

Kinds, for every door each:

    noise         random bytes, more than a greeting has, and the end of the connection; again and again
    silence       `CONNECTIONS` connections that say nothing and stay
    half hello    reads what comes, sends the first half of a worker's greeting of the stale engine, and stays
    knock         connects and goes, as fast as it can: the queue of connections is never empty
    flood         `FLOOD` connections that stay, or as many as the system lets a process have
    store keys    as a client of a torch store: overwrites every key that is there, writes every key that our engines
                  use or used (`KEYS`), again and again. What is no store gets half of a question

A stranger is a process of its own, this file run as a program: it can be stopped and killed, and takes another user's
id if it may (`can_be`), and ends with whoever has started it. It never reads or writes files of the job.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (resolving a host loads it, when another user may not read it)
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

KINDS = ("noise", "silence", "half hello", "knock", "flood", "store keys")
NOBODY = 65534
CONNECTIONS, FLOOD = 60, 10_000
RANKS = 4  # keys are written for so many
WORDS = "INJECTED BY A STRANGER"

_HALF_HELLO = struct.pack("<8sI", b"lhstale\0", 3) + bytes(12)
_LISTENS = 0x10000  # a flag in /proc/net/unix


@dataclass(frozen=True)
class Door:
    """Where a process listens.

    Attributes:
        pid: of the process; of one that has inherited it from another, too.
        host, port: of a port; empty and 0 for a unix socket.
        name: of a unix socket, ``@`` for an abstract one; empty for a port.
    """

    pid: int
    host: str = ""
    port: int = 0
    name: str = ""

    @property
    def local(self) -> bool:
        """Whether nobody on another machine can connect."""
        return bool(self.name) or self.host in ("127.0.0.1", "::1", "::ffff:127.0.0.1")

    def connect(self, timeout_s: float = 2.0) -> socket.socket:
        """Returns a connection; raises OSError."""
        if self.name:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(timeout_s)
                connection.connect(self.name.replace("@", "\0", 1))
            except BaseException:
                connection.close()
                raise
            return connection
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return socket.create_connection((host, self.port), timeout_s)


def doors(pids: Iterable[int]) -> list[Door]:
    """Returns where these processes and their children listen, each door once."""
    import psutil

    found: dict[tuple[str, int, str], Door] = {}
    for pid in _with_children(pids):
        with suppress(psutil.Error, OSError):
            for at in psutil.Process(pid).net_connections("tcp"):
                if at.status == psutil.CONN_LISTEN:
                    found.setdefault((at.laddr.ip, at.laddr.port, ""), Door(pid, at.laddr.ip, at.laddr.port))
            for name in _unix_names(pid):
                found.setdefault(("", 0, name), Door(pid, name=name))
    return list(found.values())


def _with_children(pids: Iterable[int]) -> list[int]:
    import psutil

    found: dict[int, None] = {}
    for pid in pids:
        with suppress(psutil.Error):
            found |= dict.fromkeys([pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))])
    return list(found)


def _unix_names(pid: int) -> list[str]:
    held = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            held.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    with open(f"/proc/{pid}/net/unix") as file:
        lines = [line.split() for line in file][1:]
    listening = [line for line in lines if len(line) == 8 and int(line[3], 16) & _LISTENS]
    return [line[7] for line in listening if f"socket:[{line[6]}]" in held]


# ---- whoever attacks ------------------------------------------------------------------------------------------------


def can_be(uid: int) -> bool:
    """Whether this process may start one of another user."""
    return uid == os.getuid() or os.getuid() == 0


class Attack:
    """A stranger at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begun(self, within_s: float = 60.0) -> dict[str, int]:
        """Returns how many connections each kind of door has let in, once all have been tried.

        Raises:
            RuntimeError: nobody could be attacked.
        """
        timer = threading.Timer(within_s, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            said = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not said:
            raise RuntimeError(f"the stranger has ended with code {self._process.wait()}")
        return json.loads(said)

    def end(self) -> None:
        """Ends all its connections; idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def attacking(
    pids: Iterable[int], kind: str, *, uid: int | None = None, at: Sequence[Door] | None = None
) -> Iterator[Attack]:
    """Attacks processes and their children while the block lasts.

    Args:
        pids: of the ranks, or of what has started them.
        kind: one of `KINDS`.
        uid: whose process the stranger is; None: this user's.
        at: which doors; default all of these processes now.
    """
    attack = start(pids, kind, uid=uid, at=at)
    try:
        yield attack
    finally:
        attack.end()


def start(
    pids: Iterable[int], kind: str, *, uid: int | None = None, at: Sequence[Door] | None = None
) -> Attack:
    """As `attacking`; whoever calls this ends it."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {KINDS}")
    chosen = doors(pids) if at is None else list(at)
    said = json.dumps({"kind": kind, "uid": uid, "doors": [asdict(door) for door in chosen]})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return Attack(
        subprocess.Popen(
            [sys.executable, __file__, said], text=True, cwd="/", env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
    )  # fmt: skip


# ---- what it does ---------------------------------------------------------------------------------------------------


def _ours() -> list[str]:
    """Returns keys that our engines use or used, for `RANKS` ranks."""
    ranks = range(RANKS)
    keys = ["failures/first", "failures/count", "failures/left", "failed", "first", "finished", "left", "gone"]
    keys += [f"{name}/{rank}" for name in ("out", "failures/met-", "here", "bye", "finished", "gone") for rank in ranks]
    keys += [f"failures/met-{rank}" for rank in ranks]
    keys += [f"{name}/{rank}.{since}" for name in ("out", "pulse", "bye") for rank in ranks for since in range(3)]
    keys += [f"met/{number}" for number in range(64)]
    keys += [f"come/{number}/{rank}" for number in range(64) for rank in ranks]
    keys += ["lightning_hetero/run"]
    names = ("asks", "called", "invited", "beats")
    keys += [f"lightning_hetero/{name}/{rank}" for name in names for rank in ranks]
    for generation in ((1 << 40) + 1, (1 << 40) + 2):
        keys += [f"coming/{generation}/decision"]
        keys += [f"coming/{generation}/{name}{rank}" for name in ("", "ready/", "waits/") for rank in ranks]
    return [*keys, *(f"run/{key}" for key in keys)]


KEYS = tuple(_ours())
VALUES = (
    WORDS,
    "",
    "1",
    json.dumps({"rank": 0, "cause": WORDS, "trace": ""}),
    json.dumps({"ended": WORDS, "lost": [[rank, WORDS] for rank in range(RANKS)], "present": [], "sound": False}),
    "0" * 64 + json.dumps({"rank": 0, "cause": WORDS}),  # as long as a signature
)


class RawStore:
    """A client of a torch store that speaks its protocol by itself, without torch.

    Args:
        connection: to what may be a store.

    Raises (all methods):
        OSError: it is none, or it does not answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.sendall(bytes([_VALIDATE]) + struct.pack("<I", _MAGIC))
        self.keys = self._number(_COUNT_KEYS)

    def set(self, key: str, value: bytes) -> None:
        name = b"/" + key.encode()
        parts = [struct.pack("<Q", len(part)) + part for part in (name, value)]
        self._connection.sendall(bytes([_SET]) + b"".join(parts))

    def list(self) -> list[str]:
        """Returns all keys that are there."""
        return [self._bytes(self._number()).decode()[1:] for _ in range(self._number(_LIST_KEYS))]

    def get(self, key: str) -> bytes:
        name = b"/" + key.encode()
        self._connection.sendall(bytes([_GET]) + struct.pack("<Q", len(name)) + name)
        return self._bytes(self._number())

    def _number(self, question: int | None = None) -> int:
        if question is not None:
            self._connection.sendall(bytes([question]))
        return struct.unpack("<Q", self._bytes(8))[0]

    def _bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := self._connection.recv(size - len(data))):
                raise OSError("this is no store")
            data += more
        return data


_VALIDATE, _SET, _GET, _COUNT_KEYS, _LIST_KEYS, _MAGIC = 0, 1, 3, 7, 17, 0x3C85F7CE


def raw_store(door: Door, patience_s: float = 1.0) -> RawStore | None:
    """Returns a client of the store behind a door; None: there is none."""
    if door.name:
        return None
    try:
        return RawStore(door.connect(patience_s))
    except OSError:
        return None


def write_keys(store: RawStore) -> int:
    """Writes over every key that is there, and `KEYS`; returns how many."""
    try:
        there = store.list()
    except OSError:
        there = []
    for number, key in enumerate([*there, *KEYS]):
        store.set(key, VALUES[number % len(VALUES)].encode())
    return len(there) + len(KEYS)


def _noise(door: Door, kept: list[socket.socket]) -> int:
    with door.connect() as connection:
        for size in (1, 7, 48, 4096):
            connection.sendall(random.randbytes(size))
    return 1


def _silence(door: Door, kept: list[socket.socket]) -> int:
    kept.append(door.connect())
    return 1


def _half_hello(door: Door, kept: list[socket.socket]) -> int:
    kept.append(connection := door.connect(0.2))
    with suppress(TimeoutError):
        connection.recv(4096)
    connection.sendall(_HALF_HELLO)
    return 1


def _knock(door: Door, kept: list[socket.socket]) -> int:
    door.connect().close()
    return 1


def _store_keys(door: Door, kept: list[socket.socket]) -> int:
    store = raw_store(door)
    return 0 if store is None else int(write_keys(store) > 0)


_DO = {"noise": _noise, "silence": _silence, "half hello": _half_hello, "knock": _knock, "flood": _silence,
       "store keys": _store_keys}  # fmt: skip
_AGAIN = {"noise": 0.01, "knock": 0.0, "store keys": 0.3}  # how often [s]


def _main(said: dict) -> None:
    kind, where = said["kind"], [Door(**door) for door in said["doors"]]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if said["uid"] is not None and said["uid"] != os.getuid():
        os.setgroups([])
        os.setgid(said["uid"])
        os.setuid(said["uid"])
    times = {"silence": CONNECTIONS, "half hello": CONNECTIONS, "flood": FLOOD}.get(kind, 1)
    let_in = {"port": 0, "unix": 0}
    kept: list[socket.socket] = []
    counting = threading.Lock()

    def attack(door: Door) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError):
                done = _DO[kind](door, kept)
                with counting:
                    let_in["unix" if door.name else "port"] += done

    def all_at_once() -> None:
        threads = [threading.Thread(target=attack, args=(door,)) for door in where]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def end_with_whoever_started_this() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_whoever_started_this, daemon=True).start()
    begun_s = time.monotonic()
    all_at_once()
    print(json.dumps(let_in), flush=True)
    while kind in _AGAIN:
        time.sleep(0.01)
        if time.monotonic() - begun_s > _AGAIN[kind]:
            begun_s = time.monotonic()
            all_at_once()
    threading.Event().wait()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
