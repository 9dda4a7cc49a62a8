"""What came of a cell, and what of that is not as the table says."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.faults import observe
from tests.faults.cells import Cell
from tests.faults.outcomes import Expected, blamed


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


def what(
    cell: Cell, wanted: Expected, outcome: Outcome, *, happened: bool, trained: bool, hung: bool
) -> str:
    """Returns what came of it in a word, see `Outcome.outcome`.

    Args:
        happened: whether the fault did.
        trained: whether any rank was given a batch.
        hung: whether its end was not awaited.
    """
    if hung:
        return "hangs"
    if all(outcome.codes) and (not happened or ((wanted.or_refused or wanted.outcome == "refused") and not trained)):
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
    if wanted.or_refused and outcome.outcome == "refused":
        wanted = replace(wanted, outcome="refused")
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
        others = not set(own) <= set(cell.fault.hit)
        if wanted.alone and others and (code == 0 or set(own) <= set(outcome.finished)):
            continue  # it had ended well
        if code == 0 and not wanted.told:
            found.append(f"exit code 0 of ranks {list(own)}")
        silent = set(own) <= set(wanted.dead) and code is not None and code < 0
        if wanted.cause and not silent and not re.search(wanted.cause, screen):
            found.append(f"the screen of ranks {list(own)} has no cause ({wanted.cause})")
        if wanted.named and others and not re.search(wanted.named, screen):
            found.append(f"the screen of ranks {list(own)} does not name who it was ({wanted.named})")
        if wanted.named and others and (innocent := blamed(screen, cell.fault.hit)):
            found.append(f"the screen of ranks {list(own)} blames {' and '.join(innocent)}")
    return found


def samples_of(cell: Cell, outcome: Outcome, folder: Path) -> list[str]:
    """Returns which samples were lost or counted twice, and whether the ranks have different models."""
    per_epoch, epochs = cell.asked.get("samples", 96), cell.asked.get("epochs", 2)
    books = observe.samples(folder, per_epoch)
    # What joins the next update makes that one larger, and an accumulated gradient weighs updates alike.
    uneven = cell.engine == "stale" and cell.asked.get("accumulate", 1) > 1
    found = [*([] if uneven else books.twice()), *books.unknown()]
    ended = observe.reports(folder)
    if outcome.outcome != "survived":
        return found
    first = per_epoch * (cell.asked.get("resumed", False))
    every = set(range(first, per_epoch * epochs))
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
        case "sharded":  # the first row of the gradient is rank 0's
            found += books.lost(every, [report["pid"] for rank, report in ended.items() if rank == 0], set())
        case _:
            found += books.lost(every, pids, set())
    if cell.engine not in ("pipeline", "sharded") and len({str(report["own"]) for report in ended.values()}) > 1:
        found.append("the ranks that came to the end have different models")
    if cell.asked.get("kind") == "wrap a layer":
        found += _not_called(cell, outcome, folder)
    return found


def _not_called(cell: Cell, outcome: Outcome, folder: Path) -> list[str]:
    """Of a layer that was put in another's place: a rank of the pipeline may have other layers only."""
    called = {line["rank"] for line in observe.lines(folder / "spied.jsonl")}
    if called >= set(outcome.finished) or (called and cell.engine == "pipeline"):
        return []
    return [f"the new layer was called by ranks {sorted(called)} only, and the replaced one was trained elsewhere"]
