"""Transports for the conformance suite: a listener here, workers as real processes.

    place.start(0, worker, *args)     worker(link, talk, *args) runs in a thread or a process of its own
    crew.talk.send(...), .recv()      a pipe to it; what it returns or raises comes as its last word
    place.serve(until=...)            plays the server with a small script
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lightning_hetero.transport.base import Arrived, Happened, Reply, Say
from lightning_hetero.transport.link import connect
from lightning_hetero.transport.listener import Listener
from tests import warm
from tests.ranks import harness

KINDS = ("shared_memory", "wire")
PATIENCE_S = 30.0  # for what must happen; a busy machine takes its time

DONE = Reply(kind=Say.DONE)
STOP, CONTINUE = getattr(signal, "SIGSTOP", 19), getattr(signal, "SIGCONT", 18)

Worker = Callable[..., Any]


@dataclass
class Crew:
    """A worker under way."""

    rank: int
    talk: Connection
    process: Any

    def says(self) -> Any:
        """Returns the next thing it said."""
        assert self.talk.poll(PATIENCE_S), f"worker {self.rank} said nothing for {PATIENCE_S} s"
        word = self.talk.recv()
        if isinstance(word, tuple) and word and word[0] == "raised":
            raise AssertionError(f"worker {self.rank}: {word[1]}")
        return word

    def result(self) -> Any:
        """Returns its last word, after its end."""
        kind, value = self.says()
        assert kind == "done"
        self.join()
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def join(self) -> None:
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()

    def end(self) -> None:
        self.kill()
        self.process.close()
        self.talk.close()


def _process(address: str, rank: int, worker: Worker, talk: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        link = connect(address, rank, PATIENCE_S)
        try:
            value = worker(link, talk, *args)
        finally:
            link.close()
        talk.send(("done", value))
    except BaseException as error:
        with contextlib.suppress(OSError):
            talk.send(("raised", repr(error)))


def spawn(target: Callable[..., None], *args: Any) -> Any:
    """Starts a process like the rank harness."""
    process = harness.process_context().Process(target=target, args=args, daemon=False)
    process.start()
    return process


class Place:
    """A listener with workers of one kind."""

    def __init__(self, kind: str, listener: Listener, address: str) -> None:
        self.kind, self.listener, self.address = kind, listener, address
        self.crews: list[Crew] = []

    def start(self, rank: int, worker: Worker, *args: Any) -> Crew:
        """Starts a worker, which connects; ``worker(link, talk, *args)`` must be at module level."""
        mine, its = mp.Pipe()
        crew = Crew(rank, mine, spawn(_process, self.address, rank, worker, its, args))
        its.close()
        self.crews.append(crew)
        return crew

    def until(
        self, *wanted: Happened | type[Arrived], answer: Callable[[Arrived], Reply | None] | None = None
    ) -> list[Happened]:
        """Returns what happened until all of ``wanted`` did; ``answer`` replies to requests meanwhile."""
        missing = list(wanted)
        seen: list[Happened] = []
        deadline = time.monotonic() + PATIENCE_S
        while missing:
            rest_s = deadline - time.monotonic()
            assert rest_s > 0, f"{missing} did not happen within {PATIENCE_S} s, but {seen[-10:]}"
            for event in self.listener.events(rest_s):
                seen.append(event)
                matching = [w for w in missing if w == event or w is type(event)]
                for one in matching[:1]:
                    missing.remove(one)
                reply = answer(event) if answer is not None and isinstance(event, Arrived) else None
                if reply is not None:
                    self.listener.reply(event.rank, reply)
        return seen

    def arrived(self) -> Arrived:
        """Returns the next request."""
        seen = self.until(Arrived)
        (request,) = [event for event in seen if isinstance(event, Arrived)]
        return request


@contextlib.contextmanager
def open_place(
    kind: str, workers: int = 3, slot_bytes: int = 1 << 16, parameter_bytes: int = 1 << 16
) -> Iterator[Place]:
    """Opens a listener for ranks 0..workers-1; ends what is left of them afterwards."""
    listener = make_listener(kind, workers, slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
    place = Place(kind, listener, listener.near_address or listener.far_address)
    try:
        yield place
    finally:
        place.listener.close()
        for crew in place.crews:
            crew.end()


def make_listener(kind: str, workers: int, **sizes: int) -> Listener:
    """Returns a listener for ranks 0..workers-1, all of this node or all of others."""
    ranks: dict[str, Any] = {"near" if kind == "shared_memory" else "far": range(workers)}
    return Listener(**ranks, **sizes)


def run_script(text: str, folder: Path, *said: str, within_s: float) -> None:
    """Runs a program that starts ranks of its own, in one process group, which is killed should it hang.

    Args:
        text: of the program.
        folder: to run in; what it prints is in ``said`` there.
        said: its arguments.
        within_s: how long it may take; it must end well.
    """
    (folder / "script.py").write_text(text)
    root = Path(__file__).resolve().parents[3]
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "said").open("w") as screen:
        script = warm.start(["script.py", *said], folder, environ, screen.fileno(), screen.fileno())
    try:
        assert script.wait(within_s) == 0, (folder / "said").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):  # usually nobody is left
            os.killpg(script.pid, signal.SIGKILL)
        script.kill()
        script.wait()
