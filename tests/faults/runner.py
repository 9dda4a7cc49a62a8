"""Runs one cell and says what came of it, and what of that is not as the table says."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults import namespaces, observe, strangers
from tests.faults.cells import Cell
from tests.faults.job import Job
from tests.faults.judge import Outcome, judge, samples_of, what
from tests.faults.launchers import start
from tests.faults.outcomes import Expected, expected
from tests.ports import free_port

LIMIT_S = 100.0  # of a run, beyond what the table says of the fault
_TRIES = 3
WATCH_S = 60.0  # so long nothing may be written


def run(cell: Cell, folder: Path) -> Outcome:
    """Runs a cell in folders of its own below ``folder``, to its end, and judges it.

    Again, if it did not happen: the rank that was to be hit may have been too slow to be given so many batches.
    """
    attempt = 0
    while True:
        place = folder / f"run{attempt}"
        place.mkdir()
        outcome = _run(cell, place, expected(cell))
        attempt += 1
        if outcome.outcome != "did not happen" or attempt == _TRIES:
            return outcome


def _run(cell: Cell, folder: Path, wanted: Expected) -> Outcome:
    with ExitStack() as stack:
        mounts = cell.fault.needs == "mount"
        disks = stack.enter_context(namespaces.small_disks(folder) if mounts else _no_disks())
        cable = stack.enter_context(namespaces.network()) if cell.fault.needs == "network" else None
        temporary = stack.enter_context(_temporary())
        asked, others = dict(cell.asked), []
        if asked.pop("resumed", False):
            asked["resume"] = _first_epoch(cell, folder, temporary)
        if cell.fault.jobs > 1:
            asked["root"] = str(folder)
            others = [stack.enter_context(_other(cell, asked, folder, n, temporary)) for n in range(1, cell.fault.jobs)]
        port, began_s = free_port(), time.time()
        began = start(
            cell.launcher, asked, folder, port=port, temporary=temporary, namespaces=disks.namespaces, cable=cable
        )
        watch = _Watch(cell, wanted, Job(folder, began), cable)
        try:
            watch.to_the_end()
        finally:
            watch.close()
        for other in others:
            other.to_the_end()
        outcome = _seen(cell, wanted, folder, watch, began_s)
        memory = disks.at("/dev/shm") if mounts else None
        outcome.violations += [
            *(found for other in others for found in _seen(cell, wanted, other.folder, other, began_s).violations),
            *(observe.not_requeued(folder) if asked.get("kind") == "SIGUSR1 to all" else []),
            *(observe.not_told_apart(folder, cell.fault.jobs, cell.engine) if cell.fault.jobs > 1 else []),
            *(observe.unreadable(disks.at(folder / asked["trace"]), cell) if asked.get("trace") else []),
            *observe.outlived(folder, port),
            *observe.files_left(cell, disks.at(folder), temporary, memory, watch.held),
            *observe.broken_checkpoints(folder, cell),
        ]
    return outcome


def _seen(cell: Cell, wanted: Expected, folder: Path, watch: _Watch, began_s: float) -> Outcome:
    screens = [one.screen.read_text(errors="replace") for one in watch.job.started]
    happened = observe.lines(folder / "happened.jsonl")
    finished = sorted(observe.reports(folder))
    seconds = watch.ended_s - (happened[0]["at_s"] if happened else began_s)
    outcome = Outcome(cell.name, "", seconds, watch.codes, finished, screens=screens)
    trained = any(folder.glob("issued-*"))
    outcome.outcome = what(cell, wanted, outcome, happened=bool(happened), trained=trained, hung=bool(watch.hung))
    outcome.violations = [
        *watch.hung,
        *judge(cell, wanted, outcome, [one.ranks for one in watch.job.started], happened=bool(happened)),
        *samples_of(cell, outcome, folder),
    ]
    return outcome


@contextmanager
def _no_disks() -> Iterator[namespaces.Disks]:
    yield namespaces.Disks([])


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder with a short name, because sockets may be put there."""
    folder = Path(tempfile.mkdtemp(prefix="lh-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_epoch(cell: Cell, folder: Path, temporary: Path) -> str:
    """Trains the first epoch in a run of its own; returns its checkpoint."""
    place = folder / "before"
    place.mkdir()
    asked = {**cell.asked, "kind": "", "last_epoch": 1, "save_every": 1}
    asked.pop("resumed")
    began = start(cell.launcher, asked, place, port=free_port(), temporary=temporary, namespaces=[])
    watch = _Watch(cell, Expected("survived"), Job(place, began), None)
    try:
        watch.to_the_end()
    finally:
        watch.close()
    (saved,) = (place / "saved").glob("*.ckpt")
    return str(saved)


@contextmanager
def _other(cell: Cell, asked: dict[str, Any], folder: Path, number: int, temporary: Path) -> Iterator[_Watch]:
    """Another job at the same time."""
    place = folder / f"job{number}"
    place.mkdir()
    began = start(cell.launcher, asked, place, port=free_port(), temporary=temporary, namespaces=[])
    watch = _Watch(cell, Expected("survived"), Job(place, began), None)
    try:
        yield watch
    finally:
        watch.close()


# ---- while it runs --------------------------------------------------------------------------------------------------


class _Watch:
    """Waits for the end of a job, and does what is to be done from outside.

    Attributes:
        codes: exit codes.
        ended_s: when the last process ended [s since the epoch].
        hung: why that was not awaited, if it was not.
        held: what the processes held when all were killed.
    """

    def __init__(self, cell: Cell, wanted: Expected, job: Job, cable: namespaces.Network | None) -> None:
        self.cell, self.wanted, self.job, self.folder, self._cable = cell, wanted, job, job.folder, cable
        self.codes: list[int | None] = []
        self.ended_s, self.hung = 0.0, list[str]()
        self.held: list[str] = []
        self._stopped = False
        self._plan: list[tuple[float, Callable[[], Any]]] = []  # what to do when
        self._attack: strangers.Attack | None = None

    def close(self) -> None:
        """Ends what is left."""
        if self._attack is not None:
            self._attack.end()
        for one in self.job.started:
            one.process.kill()
            one.process.wait()

    def to_the_end(self) -> None:
        begun_s = changed_s = time.monotonic()
        size, happened = -1, False
        patience_s = max(WATCH_S, self.wanted.within_s)
        while True:
            now_s = time.monotonic()
            self.codes = [one.process.poll() for one in self.job.started]
            if all(code is not None for code in self.codes):
                break
            if not happened and (said := observe.lines(self.folder / "happened.jsonl")):
                happened = True
                self._act(now_s, said[0]["pid"])
                now_s = changed_s = time.monotonic()  # the ranks may have waited for it
            while self._plan and self._plan[0][0] <= now_s:
                self._plan.pop(0)[1]()
            if self._only_the_stopped():
                self.ended_s = time.time()  # SLURM kills what is left of a job
                for one in self.job.started:
                    one.process.kill()
                self.codes = [one.process.wait() for one in self.job.started]
                return
            if (written := sum(path.stat().st_size for path in self.folder.glob("*") if path.is_file())) != size:
                size, changed_s = written, now_s
            if now_s - changed_s > patience_s or now_s - begun_s > LIMIT_S + self.wanted.within_s:
                why = f"nothing was written for {now_s - changed_s:.0f} s, {now_s - begun_s:.0f} s after its start"
                self.hung = [f"it hangs: {why}"]
                break
            time.sleep(0.02)
        self.ended_s = time.time()
        while not self.hung and self.job.pids() and time.time() - self.ended_s < observe.GRACE_S:
            time.sleep(0.02)
        if not self.hung:
            self.ended_s = time.time()

    def _act(self, now_s: float, pid: int) -> None:
        """Does what a fault needs from outside, now or later; ``pid`` is whom it has met."""
        fault, kind = self.cell.fault, self.cell.asked.get("kind")
        later: Callable[[], Any] | None = None
        if kind in ("stop", "stop the server"):
            self._stopped = kind == "stop"
            later = functools.partial(_wake, pid)
        elif kind == "stop all":  # once the others wait for the one that was hit
            self._plan += [(now_s + 1.0, self.job.stop), (now_s + 1.0 + (fault.wake_s or 0.0), self._woken)]
            return
        elif kind == "kill all":
            self.held = self.job.kill()
        elif kind == "strangers":
            uid = strangers.NOBODY if strangers.can_be(strangers.NOBODY) else None
            self._attack = strangers.start(self.job.pids(), self.cell.asked["attack"], uid=uid)
            self._attack.begun()
        if self._cable is not None:
            self._cable.cut()
            later = self._cable.restore
        (self.folder / "acted").touch()
        wait_s = fault.wake_s if fault.restore_s is None else fault.restore_s
        if later is not None and wait_s is not None:
            self._plan.append((time.monotonic() + wait_s, later))

    def _woken(self) -> None:
        (self.folder / "acted").touch()
        self.job.wake()

    def _only_the_stopped(self) -> bool:
        if not self._stopped or self.cell.fault.wake_s is not None:
            return False
        running = [one.ranks for one, code in zip(self.job.started, self.codes, strict=True) if code is None]
        return len(self.job.started) > 1 and running == [self.cell.fault.hit]


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):  # somebody has killed it
        os.kill(pid, signal.SIGCONT)
