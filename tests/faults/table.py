"""The faults of the table: what happens to a training, where, under which launchers. Nothing here runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("balanced", "stale", "pipeline", "federated", "sharded")
LAUNCHERS = ("script", "spawn", "fork", "torchrun", "SLURM")
OURS = ("script", "spawn", "fork")  # rank 0 is the user's process, or its child, and ends the others
TWO = ("script", "SLURM")  # of our launchers and of others; the latter give each rank a screen of its own
ALONE = ("SLURM",)

SHORT_S, LIVENESS_S, TIMEOUT_S = 1.5, 0.5, 15.0
SILENCE_S = 12 * LIVENESS_S  # so long a meeting of the stale engine waits for a silent rank
PATIENCE_S, SUSPENDED_S = 8.0, 12.0  # a timeout, and how long a whole job is stopped
IMPORT_S = 3.0

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
        jobs: how many run at once in one ``default_root_dir``.
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
    jobs: int = 1


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
    step = {"place": "Model.training_step"}
    yield Fault("a thread holds the GIL for 2 s", {"kind": "hold the GIL", "hold_s": 2}, launchers=TWO)
    long = {"kind": "hold the GIL", "hold_s": SILENCE_S + 9.0}
    yield Fault("a thread holds the GIL for 15 s", long, launchers=TWO)
    yield Fault("ten times slower, all at once", {"kind": "slow"}, launchers=TWO)
    yield Fault("NaN on one rank", {"kind": "nan", **step}, launchers=TWO)
    yield Fault("out of memory on one rank, once", {"kind": "out of memory", **step}, launchers=TWO)
    full = {"save_every": 5, "save_in": "small", "call": 4}
    yield Fault("disk full at a checkpoint", {"kind": "fill the disk", **full}, (0,), launchers=TWO, needs="mount")
    yield Fault("/dev/shm full at a checkpoint", {"kind": "fill /dev/shm", **full}, (0,), launchers=TWO, needs="mount",
                engines=("stale",))  # fmt: skip
    yield Fault("data that do not divide: 91 samples", {"samples": 91}, launchers=TWO)
    yield Fault("fewer samples than ranks: 2", {"samples": 2}, launchers=TWO)
    yield Fault("no samples at all", {"samples": 0}, launchers=TWO)
    cut = {"kind": "cut", "timeout_s": TIMEOUT_S, "step_s": 0.1}
    yield Fault("network cut for 2 s", cut, (2,), restore_s=2.0, launchers=("SLURM",), needs="network")
    yield Fault("network cut for ever", cut, (2,), gone=(2,), launchers=("SLURM",), needs="network")


def _of_the_server() -> Iterator[Fault]:
    stop = {"kind": "stop the server", "timeout_s": TIMEOUT_S}
    of = {"hit": (0,), "launchers": TWO, "engines": ("stale",)}
    yield Fault("server stopped for 5 s", {**stop, "timeout_s": 30.0}, wake_s=5.0, **of)
    yield Fault("server stopped for ever", stop, **of)
    yield Fault("server hangs in the optimizer's step", {**stop, "kind": "hang", "place": "Ledger.step"}, **of)


def _of_everything() -> Iterator[Fault]:
    all_of_them = {"hit": (1,), "launchers": TWO}
    yield Fault("SIGKILL of every process at once", {"kind": "kill all"}, gone=(0, 1, 2), needs="mount", **all_of_them)
    asleep = {"kind": "stop all", "timeout_s": PATIENCE_S, "step_s": 0.05}
    yield Fault("all stopped for longer than the timeout, then woken", asleep, wake_s=SUSPENDED_S, **all_of_them)
    yield Fault("two jobs in one folder", {"trace": ""}, launchers=("script",), jobs=2)
    first = {"place": "Model.configure_callbacks", "call": 1, "import_s": IMPORT_S, "timeout_s": 3 * TIMEOUT_S}
    yield Fault("SIGKILL of rank 0 while others import", {"kind": "kill", **first}, hit=(0,), gone=(0,))
    yield Fault("rank 0 raises while others import", {"kind": "exception", **first}, hit=(0,),
                launchers=(*OURS, "torchrun"))  # fmt: skip


def _around_a_save() -> Iterator[Fault]:
    second = {"save_every": 5, "place": "Hooks.on_save_checkpoint", "call": 2}
    writer = {"kind": "kill in a write", **second}
    yield Fault("SIGKILL of rank 0 as it writes a checkpoint", writer, hit=(0,), gone=(0,), launchers=TWO)
    waits = {"kind": "kill soon", "write_s": 1.5, "hold_s": 0.5, **second}
    yield Fault("SIGKILL of a worker as rank 0 writes a checkpoint", waits, gone=(1,), launchers=TWO)


def _of_a_late_module() -> Iterator[Fault]:
    late = {"place": "Model.on_fit_start", "call": 1, "save_every": 5}
    every: dict[str, Any] = {"hit": (0, 1, 2), "launchers": ALONE}
    yield Fault("a submodule added in on_fit_start", {"kind": "add a submodule", **late}, **every)
    yield Fault("a layer wrapped in on_fit_start", {"kind": "wrap a layer", **late}, **every)
    yield Fault("a layer replaced in on_fit_start", {"kind": "replace a layer", **late}, **every)


def _of_telemetry() -> Iterator[Fault]:
    full = {"kind": "fill the disk", "trace": "small/trace", "save_every": 5}
    of: dict[str, Any] = {"hit": (0,), "launchers": ALONE, "needs": "mount"}
    yield Fault("disk full under a trace", full, **of)
    yield Fault("disk full before a trace begins", {**full, "place": "Model.setup", "call": 1}, **of)
    yield Fault("disk full under a trace, then room again", {**full, "hold_s": 0.5, "step_s": 0.1}, **of)


def _of_strangers() -> Iterator[Fault]:
    long = {"kind": "strangers", "step_s": 0.3}
    for what, words in STRANGERS.items():
        launchers = TWO if what == "silence" else ("script",)
        yield Fault(f"strangers: {words}", {**long, "attack": what}, launchers=launchers)


STRANGERS = {
    "silence": "60 connections to every port and socket that say nothing",
    "half hello": "60 connections that begin as a worker of the stale engine does",
    "noise": "random bytes",
    "knock": "connections that come and go",
    "flood": "10,000 connections",
    "store keys": "whatever they can write into the stores",
}
"""What another user does, see `tests.faults.strangers`."""


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *_of_processes(), *_of_the_server(), *_of_everything(), *_within_a_process(), *_around_a_save(),
        *_of_a_late_module(), *_of_telemetry(), *_of_strangers(),
    )
}  # fmt: skip
