"""Runs one cell and says what came of it, and what of that is not as the table says."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.stale.scripts import free_port
from tests.faults import namespaces, observe
from tests.faults.cells import Cell, Expected, expected
from tests.faults.launchers import Started, start

LIMIT_S = 100.0  # of a run, beyond what the table says of the fault
_TRIES = 3
WATCH_S = 60.0  # so long nothing may be written


@dataclass
class Outcome:
    """What came of a cell.

    Attributes:
        cell: its name.
        outcome: "survived", "ended", "refused", "hangs", or "did not happen".
        seconds: from the fault to the end of the last process; of a run without one, of all of it.
        codes: exit codes, of each process that was started by hand.
        finished: ranks that came to the end.
        violations: what is not as the table says; empty: the cell holds.
        screens: what was to be read.
    """

    cell: str
    outcome: str
    seconds: float
    codes: list[int | None]
    finished: list[int]
    violations: list[str] = field(default_factory=list)
    screens: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns it for a results file."""
        return {name: value for name, value in asdict(self).items() if name not in ("cell", "screens")}


def run(cell: Cell, folder: Path) -> Outcome:
    """Runs a cell in folders of its own below ``folder``, to its end, and judges it.

    Again, if it did not happen: the rank that was to be hit may have been too slow to be given so many batches.
    """
    for attempt in range(_TRIES):
        place = folder / f"run{attempt}"
        place.mkdir()
        outcome = _run(cell, place, expected(cell))
        if outcome.outcome != "did not happen":
            break
    return outcome


def _run(cell: Cell, folder: Path, wanted: Expected) -> Outcome:
    port = free_port()
    with ExitStack() as stack:
        entered = stack.enter_context(namespaces.small_disks(folder)) if cell.fault.needs == "mount" else []
        cable = stack.enter_context(namespaces.network()) if cell.fault.needs == "network" else None
        began_s = time.time()
        started = start(cell.launcher, cell.asked, folder, port, entered, cable)
        try:
            codes, ended_s, hung = _watch(cell, wanted, folder, started, cable)
        finally:
            for one in started:
                one.process.kill()
                one.process.wait()
    screens = [one.screen.read_text(errors="replace") for one in started]
    happened = observe.lines(folder / "happened.jsonl")
    finished = sorted(observe.reports(folder))
    outcome = Outcome(cell.name, "", ended_s - (happened[0]["at_s"] if happened else began_s), codes, finished)
    outcome.screens = screens
    outcome.outcome = _what(cell, wanted, outcome, bool(happened), hung)
    outcome.violations = [
        *hung,
        *judge(cell, wanted, outcome, [one.ranks for one in started], happened=bool(happened)),
        *_samples(cell, outcome, folder),
        *(observe.not_requeued(folder) if cell.asked.get("kind") == "SIGUSR1 to all" else []),
        *observe.outlived(folder, port),
    ]
    return outcome


# ---- while it runs --------------------------------------------------------------------------------------------------


def _watch(
    cell: Cell, wanted: Expected, folder: Path, started: list[Started], cable: namespaces.Network | None
) -> tuple[list[int | None], float, list[str]]:
    """Waits for the end, and does what is to be done from outside.

    Returns:
        Exit codes, when the last process ended [s since the epoch], and why that was not awaited, if it was not.
    """
    begun_s = time.monotonic()
    fault, at_s, stopped = cell.fault, None, None
    plan: list[tuple[float, Any]] = []
    changed_s, size = begun_s, -1
    patience_s = max(WATCH_S, wanted.within_s)
    while True:
        now_s = time.monotonic()
        codes = [one.process.poll() for one in started]
        if all(code is not None for code in codes):
            return codes, time.time(), []
        if at_s is None and (happened := observe.lines(folder / "happened.jsonl")):
            at_s = now_s
            if cell.asked.get("kind") == "stop":
                stopped = happened[0]["pid"]
                if fault.wake_s is not None:
                    plan.append((at_s + fault.wake_s, lambda pid=stopped: os.kill(pid, signal.SIGCONT)))
            if cable is not None:
                cable.cut()
                if fault.restore_s is not None:
                    plan.append((at_s + fault.restore_s, cable.restore))
        while plan and plan[0][0] <= now_s:
            plan.pop(0)[1]()
        if stopped and fault.wake_s is None and _only_the_stopped(started, codes, fault.hit):
            ended_s = time.time()  # SLURM kills what is left of a job
            for one in started:
                one.process.kill()
            return [one.process.wait() for one in started], ended_s, []
        if (written := sum(path.stat().st_size for path in folder.glob("*") if path.is_file())) != size:
            size, changed_s = written, now_s
        if now_s - changed_s > patience_s or now_s - begun_s > LIMIT_S + wanted.within_s:
            why = f"nothing was written for {now_s - changed_s:.0f} s, {now_s - begun_s:.0f} s after its start"
            return list(codes), time.time(), [f"it hangs: {why}"]
        time.sleep(0.02)


def _only_the_stopped(started: list[Started], codes: list[int | None], hit: tuple[int, ...]) -> bool:
    running = [one.ranks for one, code in zip(started, codes, strict=True) if code is None]
    return len(started) > 1 and running == [hit]


# ---- what came of it ------------------------------------------------------------------------------------------------


def _what(cell: Cell, wanted: Expected, outcome: Outcome, happened: bool, hung: list[str]) -> str:
    if hung:
        return "hangs"
    if not happened and all(outcome.codes):
        return "refused"
    if cell.asked.get("kind") and not happened:
        return "did not happen"
    if 0 in outcome.codes and (outcome.finished or cell.asked.get("samples") == 0):
        return "ended" if any(outcome.codes) and wanted.outcome == "ended" else "survived"
    return "ended"


def judge(
    cell: Cell, wanted: Expected, outcome: Outcome, ranks: list[tuple[int, ...]], *, happened: bool
) -> list[str]:
    """Returns what is not as it should be of codes, screens and seconds.

    Args:
        ranks: whose screen each is.
        happened: whether the fault did.
    """
    found = []
    if outcome.outcome != wanted.outcome:
        found.append(f"{outcome.outcome}, and should have {wanted.outcome}")
    by_screen = list(zip(ranks, outcome.codes, outcome.screens, strict=True))
    if wanted.outcome == "survived":
        left = [rank for rank in range(cell.ranks) if rank not in wanted.dead]
        nothing_to_do = cell.asked.get("samples") == 0  # Lightning leaves the fit out
        if not nothing_to_do and not set(left) <= set(outcome.finished):
            found.append(f"came to the end: {outcome.finished}, and should have: {left}")
        for own, code, _ in by_screen:
            if code != 0 and not set(own) <= set(wanted.dead):
                found.append(f"exit code {code} of ranks {list(own)}, which live")
        return found
    if outcome.finished and not wanted.alone:
        found.append(f"came to the end, and should not: {outcome.finished}")
    if happened and outcome.seconds > wanted.within_s:
        found.append(f"ended {outcome.seconds:.0f} s after the fault, and should within {wanted.within_s:.0f} s")
    for own, code, screen in by_screen:
        if wanted.alone and not set(own) & set(cell.fault.hit):
            continue
        if code == 0 and not wanted.told:
            found.append(f"exit code 0 of ranks {list(own)}")
        silent = set(own) <= set(wanted.dead) and code is not None and code < 0
        if wanted.cause and not silent and not re.search(wanted.cause, screen):
            found.append(f"the screen of ranks {list(own)} has no cause ({wanted.cause})")
    return found


def _samples(cell: Cell, outcome: Outcome, folder: Path) -> list[str]:
    per_epoch, epochs = cell.asked.get("samples", 96), cell.asked.get("epochs", 2)
    books = observe.samples(folder, per_epoch)
    found = [*books.twice(), *books.unknown()]
    ended = observe.reports(folder)
    if outcome.outcome != "survived":
        return found
    every = set(range(per_epoch * epochs))
    pids = [report["pid"] for report in ended.values()]
    dead = set().union(*(ids for pid, ids in books.last.items() if pid not in pids))
    match cell.engine:
        case "stale":  # the server's
            keepers = [pid for pid in books.counted if pid not in pids] or ([0] if every else [])
            found += books.lost(every, keepers[:1], dead)
        case "federated":
            for rank, report in ended.items():
                own = {i for i in every if i % per_epoch % cell.ranks == rank}
                found += books.lost(own, [report["pid"]], set())
        case "pipeline":
            keepers = [report["pid"] for rank, report in ended.items() if rank != 0]
            found += books.lost(every, keepers, set())
        case _:
            found += books.lost(every, pids, set())
    if cell.engine != "pipeline" and len({str(report["own"]) for report in ended.values()}) > 1:
        found.append("the ranks that came to the end have different models")
    return found
