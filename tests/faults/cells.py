"""The table: which engine meets which fault under which launcher, and what has to come of it. Nothing here runs.

A cell says one of three things. *survived*: all ranks but the dead ones come to the end, with one model and every
sample counted. *ended*: every process ends within the stated time, with an exit code that is not 0 and the cause on
every screen. *refused*: the same, before anything was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("balanced", "stale", "pipeline", "federated")
LAUNCHERS = ("script", "spawn", "fork", "torchrun", "SLURM")
OURS = ("script", "spawn", "fork")  # rank 0 is the user's process, or its child, and ends the others
RANKS = 3

SOON_S = 60.0  # nobody waits for a timeout, which is 120 s; ending three processes on a busy machine takes seconds
SHORT_S, LIVENESS_S, TIMEOUT_S = 1.5, 0.5, 15.0
SILENCE_S = 12 * LIVENESS_S  # so long a meeting of the stale engine waits for a silent rank

LOST = r"lost contact with another rank|is gone without a word|store is gone|Connection closed by peer"  # gloo's words
KILLED = r"[Ss]ignal \d|terminated with (?:code -|signal SIG)|\(SIG[A-Z]+\)"  # Lightning, multiprocessing, torchrun


@dataclass(frozen=True)
class Fault:
    """Something that happens to a training.

    Attributes:
        name: in the table.
        asked: arguments of the program, see `program.ASKED`.
        hit: ranks it happens to.
        gone: those of them that do not come back from it.
        wake_s: of a stopped rank: when it is woken, after the fault; None: never.
        restore_s: of a cut network: when it comes back; None: never.
        launchers: under which it is tried.
        engines: with which.
        needs: "mount" or "network" namespaces, which not every machine lets us make.
    """

    name: str
    asked: dict[str, Any] = field(default_factory=dict, hash=False)
    hit: tuple[int, ...] = (1,)
    gone: tuple[int, ...] = ()
    wake_s: float | None = None
    restore_s: float | None = None
    launchers: tuple[str, ...] = LAUNCHERS
    engines: tuple[str, ...] = ENGINES
    needs: str = ""


def _of_processes() -> Iterator[Fault]:
    kill = {"kind": "kill"}
    yield Fault("none")
    yield Fault("SIGKILL of a worker", kill, gone=(1,))
    yield Fault("SIGKILL of rank 0", kill, hit=(0,), gone=(0,))
    yield Fault("SIGKILL of the server", {"kind": "kill the server"}, hit=(0,), engines=("stale",))
    yield Fault("SIGKILL of two ranks at once", {"kind": "kill together"}, hit=(1, 2), gone=(1, 2))
    yield Fault("SIGTERM to a worker", {"kind": "SIGTERM", "timeout_s": TIMEOUT_S}, gone=(1,))
    yield Fault("SIGTERM to all ranks", {"kind": "SIGTERM to all", "timeout_s": TIMEOUT_S}, gone=(0, 1, 2))
    yield Fault("SIGUSR1 to a worker", {"kind": "SIGUSR1"}, gone=(1,), launchers=(*OURS, "torchrun"))
    requeue = {"kind": "SIGUSR1 to all"}
    yield Fault("SIGUSR1 to all ranks: requeue", requeue, launchers=("SLURM",))
    yield Fault("stopped for 1.5 s", {"kind": "stop"}, wake_s=SHORT_S)
    beyond = {"kind": "stop", "timeout_s": TIMEOUT_S}
    yield Fault("stopped for longer than liveness, then woken", beyond, gone=(1,), wake_s=SILENCE_S + 16.0)
    yield Fault("stopped for ever", beyond, gone=(1,))
    yield Fault("segmentation fault", {"kind": "segfault"}, gone=(1,))
    yield Fault("exception in a step", {"kind": "exception", "place": "Model.training_step"})


def _within_a_process() -> Iterator[Fault]:
    two = ("script", "SLURM")
    step = {"place": "Model.training_step"}
    yield Fault("a thread holds the GIL for 2 s", {"kind": "hold the GIL", "hold_s": 2}, launchers=two)
    long = {"kind": "hold the GIL", "hold_s": SILENCE_S + 9.0}
    yield Fault("a thread holds the GIL for 15 s", long, launchers=two)
    yield Fault("ten times slower, all at once", {"kind": "slow"}, launchers=two)
    yield Fault("NaN on one rank", {"kind": "nan", **step}, launchers=two)
    yield Fault("out of memory on one rank, once", {"kind": "out of memory", **step}, launchers=two)
    full = {"save_every": 5, "call": 4}
    yield Fault("disk full at a checkpoint", {"kind": "fill the disk", **full}, (0,), launchers=two, needs="mount")
    yield Fault("/dev/shm full at a checkpoint", {"kind": "fill /dev/shm", **full}, (0,), launchers=two, needs="mount",
                engines=("stale",))  # fmt: skip
    yield Fault("data that do not divide: 91 samples", {"samples": 91}, launchers=two)
    yield Fault("fewer samples than ranks: 2", {"samples": 2}, launchers=two)
    yield Fault("no samples at all", {"samples": 0}, launchers=two)
    cut = {"kind": "cut", "timeout_s": TIMEOUT_S, "step_s": 0.1}
    yield Fault("network cut for 2 s", cut, (2,), restore_s=2.0, launchers=("SLURM",), needs="network")
    yield Fault("network cut for ever", cut, (2,), gone=(2,), launchers=("SLURM",), needs="network")


FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_of_processes(), *_within_a_process())}


@dataclass(frozen=True)
class Cell:
    """One training: an engine, a launcher, a fault; `more` are further arguments of the program."""

    engine: str
    launcher: str
    fault: Fault
    ranks: int = RANKS
    more: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.launcher}: {self.fault.name}"

    def __str__(self) -> str:
        return self.name

    @property
    def asked(self) -> dict[str, Any]:
        """Returns what the program is told."""
        said = {"engine": self.engine, "ranks": self.ranks, "liveness_s": LIVENESS_S, "ranks_hit": self.fault.hit}
        return {**said, **self.fault.asked, **self.more}


@dataclass(frozen=True)
class Expected:
    """What has to come of a cell.

    Attributes:
        outcome: "survived", "ended" or "refused".
        dead: ranks that may, or must, not come to the end.
        within_s: from the fault to the end of the last process.
        cause: a pattern on every screen, but for that of a process which was killed; "": the shell that started it
            says so.
        alone: the others may come to the end, and well.
        told: the ranks were told to end: Lightning does so with exit code 0.
        known: why this does not hold yet; such a cell is shown as failing.
    """

    outcome: str
    dead: tuple[int, ...] = ()
    within_s: float = SOON_S
    cause: str = ""
    alone: bool = False
    told: bool = False
    known: str = ""


# ---- the hooks of a user's program -----------------------------------------------------------------------------------

MODULE_HOOKS = (
    "setup", "configure_model", "configure_optimizers", "configure_callbacks", "on_fit_start", "on_train_start",
    "on_train_epoch_start", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_train_batch_start", "training_step", "forward", "on_before_zero_grad", "optimizer_zero_grad",
    "on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_validation_model_eval", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end", "on_validation_model_train", "on_save_checkpoint",
    "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown",
)  # fmt: skip
CALLBACK_HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "state_dict", "on_save_checkpoint", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "teardown",
)  # fmt: skip
DATA_HOOKS = (
    "Data.prepare_data", "Data.setup", "Data.train_dataloader", "Data.val_dataloader", "Data.teardown",
    "Numbers.__len__", "Numbers.__getitem__", "collate",
)  # fmt: skip
BEFORE = ("Model.configure_callbacks", "Data.prepare_data")  # before the ranks have met
AFTER = ("on_train_end", "on_fit_end", "teardown")  # the training is over, and saved
_OFTEN = ("batch", "step", "backward", "forward", "zero_grad", "clipping", "__getitem__", "collate", "__len__")
# called in each batch: the third call is in the middle of the training


def places() -> list[str]:
    """Returns every place of a user's code."""
    return [*(f"Model.{n}" for n in MODULE_HOOKS), *(f"Hooks.{n}" for n in CALLBACK_HOOKS), *DATA_HOOKS]


def hook_cells() -> Iterator[Cell]:
    """Yields an exception in every hook, on rank 1 of 2; each rank has a screen of its own."""
    for engine in ENGINES:
        for place in places():
            often = any(word in place for word in _OFTEN) and "validation" not in place
            often = often and place not in ("Model.lr_scheduler_step", "Numbers.__len__")
            asked = {"kind": "exception", "place": place, "call": 3 if often else 1, "save_every": 5}
            if place in BEFORE:
                asked["timeout_s"] = TIMEOUT_S
            hit = (0,) if place == "Data.prepare_data" else (1,)  # which is called on one rank of a node
            yield Cell(engine, "SLURM", Fault(f"exception in {place}", asked, hit), ranks=2)


def cells() -> Iterator[Cell]:
    """Yields the table, without the hooks."""
    for fault in FAULTS.values():
        for engine in fault.engines:
            for launcher in fault.launchers:
                whole = engine == "balanced" and "out of memory" in fault.name  # one sample cannot be divided
                yield Cell(engine, launcher, fault, more={"options": {"min_samples": 2}} if whole else {})


QUICK = (
    "stale, SLURM: SIGKILL of two ranks at once",
    "stale, script: SIGUSR1 to a worker",
    "balanced, fork: SIGTERM to all ranks",
    "federated, SLURM: SIGUSR1 to all ranks: requeue",
)
"""What the suite runs each time; the rest needs ``--matrix``."""


# ---- what has to come of each ----------------------------------------------------------------------------------------


def expected(cell: Cell) -> Expected:
    """Returns what has to come of a cell."""
    fault, kind = cell.fault, cell.asked.get("kind", "")
    if fault.name.startswith("exception in"):
        return _exception(cell)
    if cell.engine == "federated" and cell.asked.get("samples", RANKS) < RANKS:
        return Expected("refused", cause="have no batch of training data")
    if not kind or fault.name in _HARMLESS:
        return Expected("survived")
    return _BY_KIND[kind](cell)


_HARMLESS = (
    "stopped for 1.5 s", "a thread holds the GIL for 2 s", "ten times slower, all at once", "network cut for 2 s",
    "/dev/shm full at a checkpoint", "SIGUSR1 to all ranks: requeue",
)  # fmt: skip


def _death(cell: Cell) -> Expected:
    """Of ranks without a word."""
    gone = cell.fault.gone
    if cell.engine == "stale" and cell.launcher != "torchrun" and (0 not in gone or cell.launcher == "SLURM"):
        return Expected("survived", dead=gone)
    own = 0 in gone and cell.launcher == "script"  # the user's own process: its shell says so
    # without rank 0 the others of the stale engine have some seconds to end, which may do for the rest of the training
    alone = cell.engine == "stale" and 0 in gone and cell.launcher in OURS
    return Expected("ended", gone, cause="" if own else f"{LOST}|{KILLED}", alone=alone)


def _server(cell: Cell) -> Expected:
    return Expected("ended", cause="parameter server")


def _terminated(cell: Cell) -> Expected:
    """Who is told to go ends at the end of its batch; so do all others, or the stale engine's go on without it."""
    if cell.asked["kind"] == "SIGTERM to all":
        return Expected("ended", cell.fault.gone, cause="SIGTERM", told=True)
    if cell.engine == "stale":
        return Expected("survived", dead=cell.fault.gone)
    return Expected("ended", cell.fault.gone, cause=f"SIGTERM|{LOST}", told=True)


def _stopped(cell: Cell) -> Expected:
    long_s = SOON_S + TIMEOUT_S + (cell.fault.wake_s or 0.0)
    if cell.engine == "stale":
        if cell.launcher == "torchrun":  # the others come to the end; it ends when the one left behind has
            known = "" if cell.fault.wake_s else "torchrun itself waits for a stopped process; the others have ended"
            return Expected("ended", cell.fault.hit, long_s, cause="was left behind", alone=True, known=known)
        return Expected("survived", cell.fault.hit, long_s)
    if cell.launcher == "torchrun":
        long_s += 30.0  # which it leaves to ranks that it has told to end
    return Expected("ended", cell.fault.hit, long_s, cause=rf"{LOST}|[Tt]imed? ?out")


def _gil(cell: Cell) -> Expected:
    if cell.engine == "stale":  # no sign of life for longer than its peers wait where they meet
        return Expected("survived", dead=(1,))
    return Expected("survived")


def _nan(cell: Cell) -> Expected:
    if cell.engine == "stale":
        return Expected("ended", cause="worker 1 has a gradient with NaN or Inf")
    return Expected("survived")


def _memory(cell: Cell) -> Expected:
    return Expected("survived") if cell.engine == "balanced" else Expected("ended", cause="out of memory|" + LOST)


def _disk(cell: Cell) -> Expected:
    return Expected("ended", cause="No space left on device|" + LOST)


def _cut(cell: Cell) -> Expected:
    """Of the last rank, which is alone on its node."""
    if cell.engine == "stale":
        return Expected("survived", (2,), SOON_S + SILENCE_S)
    return Expected("ended", (2,), SOON_S + 2 * TIMEOUT_S, cause=rf"{LOST}|[Tt]imed? ?out")


def _exception(cell: Cell) -> Expected:
    place = cell.asked["place"]
    if cell.engine == "pipeline" and place == "Model.backward":
        return Expected("refused", cause="backward")
    if place in BEFORE:
        return Expected("ended", within_s=SOON_S + TIMEOUT_S, cause=f"a flux compensator broke|{LOST}|[Tt]imed? ?out")
    if place.partition(".")[2] in AFTER:
        return Expected("ended", cause="a flux compensator broke", alone=True)
    return Expected("ended", cause=f"a flux compensator broke|{LOST}")


_BY_KIND = {
    "kill": _death, "kill together": _death, "segfault": _death, "SIGUSR1": _death, "kill the server": _server,
    "SIGTERM": _terminated, "SIGTERM to all": _terminated, "stop": _stopped, "hold the GIL": _gil, "nan": _nan,
    "out of memory": _memory, "fill the disk": _disk, "cut": _cut,
}  # fmt: skip
