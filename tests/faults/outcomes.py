"""What has to come of each cell of the table. Nothing here runs.

A cell says one of three things. *survived*: all ranks but the dead ones come to the end, with one model and every
sample counted. *ended*: every process ends within the stated time, with an exit code that is not 0 and the cause on
every screen. *refused*: the same, before anything was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.cells import AFTER, BEFORE, RANKS, Cell
from tests.faults.table import IMPORT_S, OURS, SILENCE_S, TIMEOUT_S

SOON_S = 60.0  # nobody waits for a timeout, which is 120 s; ending three processes on a busy machine takes seconds
BROKE = "a flux compensator broke"  # the words of the user's exception
SILENT = "is gone without a word"
KILLED = r"[Ss]ignal \d|terminated with (?:code -|signal SIG)|\(SIG[A-Z]+\)|was killed"  # Lightning, torchrun, ours


@dataclass(frozen=True)
class Expected:
    """What has to come of a cell.

    Attributes:
        outcome: "survived", "ended" or "refused".
        dead: ranks that may, or must, not come to the end.
        within_s: from the fault to the end of the last process.
        cause: a pattern on every screen, but for that of a process which was killed; "": the shell that started it
            says so.
        named: a pattern on every screen on which other ranks write than those that were hit: the right rank's name.
        alone: the others may come to the end, and well.
        told: the ranks were told to end: Lightning does so with exit code 0.
        or_refused: it may be refused as well, with the cause, before anything was trained.
        known: why this does not hold yet; such a cell is shown as failing.
    """

    outcome: str
    dead: tuple[int, ...] = ()
    within_s: float = SOON_S
    cause: str = ""
    named: str = ""
    alone: bool = False
    told: bool = False
    or_refused: bool = False
    known: str = ""


def named(ranks: Iterable[int]) -> str:
    """Returns a pattern that names one of these ranks: as we, Lightning, multiprocessing, torchrun or torch do."""
    which = f"(?:{'|'.join(map(str, ranks))})"
    by_torch = rf"CheckpointException ranks:dict_keys\(\[(?:\d+, )*{which}\b"  # of those that write one together
    return rf"rank {which}\b|\[rank: {which}\]|[Pp]rocess {which} terminated|rank\s+: {which} \(|{by_torch}"


def blamed(screen: str, but: Iterable[int]) -> list[str]:
    """Returns who is said there to be the cause, of all ranks ``but`` those that are."""
    said = re.findall(rf"rank (\d+) (?:failed:|{SILENT})", screen)
    return sorted({f"rank {rank}" for rank in said if int(rank) not in but})


def expected(cell: Cell) -> Expected:
    """Returns what has to come of a cell."""
    fault, kind = cell.fault, cell.asked.get("kind", "")
    if kind == "exception":
        return _exception(cell)
    if cell.engine == "federated" and cell.asked.get("samples", RANKS) < RANKS:
        return Expected("refused", cause="have no batch of training data")
    if not kind or fault.name in _HARMLESS:
        return Expected("survived")
    return _BY_KIND[kind](cell)


_HARMLESS = (
    "stopped for 1.5 s", "a thread holds the GIL for 2 s", "ten times slower, all at once", "network cut for 2 s",
    "/dev/shm full at a checkpoint", "SIGUSR1 to all ranks: requeue", "server stopped for 5 s",
)  # fmt: skip


def _goes_on(cell: Cell) -> bool:
    """Whether those that are left go on without those that are gone."""
    gone, options = cell.fault.gone, cell.asked.get("options", {})
    if cell.launcher == "torchrun" or (0 in gone and cell.launcher != "SLURM"):
        return False
    if cell.engine in ("balanced", "federated"):
        least = options.get("min_clients", options.get("min_ranks", cell.ranks))
        return 0 not in gone and cell.ranks - len(gone) >= least
    return cell.engine == "stale"


_LEAST = "min_clients", "min_ranks"


def _death(cell: Cell) -> Expected:
    """Of ranks without a word."""
    gone = cell.fault.gone
    if cell.asked.get("place") in BEFORE:  # the others have not met it yet
        return Expected("ended", gone, _start_s(cell), cause="" if cell.launcher == "script" else _unmet())
    if _goes_on(cell):
        return Expected("survived", dead=gone)
    # without rank 0 the others of the stale engine have some seconds to end, which may do for the rest of the training
    alone = cell.engine == "stale" and 0 in gone and cell.launcher in OURS
    few = "".join(f"|{name}|rank 0, without which" for name in _LEAST if name in cell.asked.get("options", {}))
    went_on = "|rank 0 died" if alone else ""
    return Expected("ended", gone, cause=f"{SILENT}|{KILLED}{few}{went_on}", named=named(gone), alone=alone)


def _start_s(cell: Cell) -> float:
    """Who is nobody's child waits for the rank that never comes; others end when their imports have."""
    return SOON_S + cell.asked["timeout_s"] if cell.launcher == "SLURM" else 10.0 + IMPORT_S


def _unmet() -> str:
    return rf"{SILENT}|{KILLED}|[Tt]imed? ?out|rank 0|did not connect"


def _of_all(cell: Cell) -> Expected:
    known = "Python's own semaphores of spawned processes stay, as under stock DDP: their tracker was killed as well"
    return Expected("ended", cell.fault.gone, known=known if cell.launcher == "spawn" else "")


def _unharmed(cell: Cell) -> Expected:
    return Expected("survived")


def _suspended(cell: Cell) -> Expected:
    alike = cell.engine in ("balanced", "sharded") or (cell.engine == "federated" and not cell.asked.get("options"))
    known = "gloo, in whose collective the ranks were, counts the time in which they were stopped, as under stock DDP"
    return Expected("survived", known=known if alike else "")


def _server(cell: Cell) -> Expected:
    return Expected("ended", cause="parameter server")


def _silent_server(cell: Cell) -> Expected:
    long_s = SOON_S + cell.asked["timeout_s"]
    return Expected("ended", within_s=long_s, cause=r"parameter server \((?:process|pid) \d+\)")


def _terminated(cell: Cell) -> Expected:
    """Who is told to go ends at the end of its batch; so do all others, or the stale engine's go on without it."""
    if cell.asked["kind"] == "SIGTERM to all":
        return Expected("ended", cell.fault.gone, cause="SIGTERM", told=True)
    if cell.engine == "stale":
        return Expected("survived", dead=cell.fault.gone)
    return Expected("ended", cell.fault.gone, cause="SIGTERM", told=True)  # it was not the rank that failed


def _stopped(cell: Cell) -> Expected:
    long_s = SOON_S + TIMEOUT_S + (cell.fault.wake_s or 0.0)
    if cell.engine == "stale":
        if cell.launcher == "torchrun":  # the others come to the end; it ends when the one left behind has
            known = "" if cell.fault.wake_s else "torchrun itself waits for a stopped process; the others have ended"
            return Expected("ended", cell.fault.hit, long_s, cause="was left behind", alone=True, known=known)
        return Expected("survived", cell.fault.hit, long_s)
    if cell.launcher == "torchrun":
        long_s += 30.0  # which it leaves to ranks that it has told to end
    if "min_ranks" in cell.asked.get("options", {}):  # after the silence of one that is left out
        if cell.launcher == "torchrun":
            known = "torchrun itself waits for a stopped process; the others have ended"
            return Expected("ended", cell.fault.hit, long_s + 30.0, alone=True, known=known)
        return Expected("survived", cell.fault.hit, long_s + 30.0)
    return Expected("ended", cell.fault.hit, long_s, cause=_alone_said(), named=named(cell.fault.hit))


def _alone_said() -> str:
    """What may stand on the screen of a rank that the others have lost: to it, they are silent, or it knows why."""
    gone = "Connection closed by peer|was stopped for [0-9.]+ s, and the others have ended"
    return rf"{SILENT}|{KILLED}|[Tt]imed? ?out|left behind|rank \d failed|lost contact|{gone}"


def _gil(cell: Cell) -> Expected:
    if cell.engine == "stale":  # no sign of life for longer than its peers wait where they meet
        return Expected("survived", dead=(1,))
    return Expected("survived")


def _nan(cell: Cell) -> Expected:
    if cell.engine == "stale":
        return Expected("ended", cause="worker 1 has a gradient with NaN or Inf")
    return Expected("survived")


def _memory(cell: Cell) -> Expected:
    if cell.engine in ("balanced", "sharded"):
        return Expected("survived")
    return Expected("ended", cause="out of memory: tried to allocate", named=named(cell.fault.hit))


def _disk(cell: Cell) -> Expected:
    if cell.asked.get("trace") is not None:  # telemetry is no reason to end
        return Expected("survived")
    return Expected("ended", cause="No space left on device", named=named(cell.fault.hit))


def _cut(cell: Cell) -> Expected:
    """Of the last rank, which is alone on its node."""
    if cell.engine == "stale":
        return Expected("survived", (2,), SOON_S + SILENCE_S)
    return Expected("ended", (2,), SOON_S + 2 * TIMEOUT_S, cause=_alone_said(), named=named((2,)))


def _changed(cell: Cell) -> Expected:
    """The module is trained as it is then, or refused; stock DDP notices a replaced layer in the second step."""
    change = r"module|layer|parameter"
    if cell.asked["kind"] == "replace a layer":
        if cell.engine == "balanced":
            return Expected("ended", cause="parameters that were not used in producing the loss", or_refused=True)
        if cell.engine == "stale":
            return Expected("refused", cause=change)
    return Expected("survived", cause=change, or_refused=True)


def _exception(cell: Cell) -> Expected:
    place, hit = cell.asked["place"], cell.fault.hit
    if cell.engine == "pipeline" and place == "Model.backward":
        return Expected("refused", cause="backward")
    if place in BEFORE:
        return Expected("ended", within_s=_start_s(cell), cause=rf"{BROKE}|{_unmet()}")
    return Expected("ended", cause=BROKE, named=named(hit), alone=place.partition(".")[2] in AFTER)


_BY_KIND = {
    "kill": _death, "kill together": _death, "kill soon": _death, "kill in a write": _death, "segfault": _death,
    "SIGUSR1": _death, "kill all": _of_all, "stop all": _suspended, "strangers": _unharmed, "kill the server": _server,
    "stop the server": _silent_server, "hang": _silent_server, "SIGTERM": _terminated, "SIGTERM to all": _terminated,
    "stop": _stopped, "hold the GIL": _gil, "nan": _nan, "out of memory": _memory, "fill the disk": _disk, "cut": _cut,
    "add a submodule": _changed, "wrap a layer": _changed, "replace a layer": _changed,
}  # fmt: skip

