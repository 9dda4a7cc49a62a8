"""Leak guards: each notices what a test left behind, cleans it up, and fails that test, not a later one.

    with environment(), threads():
        ...  # LeakError on the way out

The idea and most of the list are from Lightning's ``tests/tests_pytorch/conftest.py``, the child processes
from hivemind's ``tests/conftest.py``.
"""

from __future__ import annotations

import fnmatch
import gc
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tests.seeds import seed_all

REPOSITORY = Path(__file__).resolve().parents[1]
GRACE_S = 3.0  # what is on its way out gets this long

# Set by Lightning or torch for the process, not by the test; still put back.
TOLERATED_ENV = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_MODULE_LOADING",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "PYTEST_CURRENT_TEST",
        "RANK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "WORLD_SIZE",
    }
)

# What Lightning and Hydra write where they stand.
DROPPINGS = ("lightning_logs", "outputs", "multirun", "checkpoints", ".hydra", "*.ckpt", "*.jsonl", "*.log")


class LeakError(AssertionError):
    """A test left something behind that changes the tests after it."""


@contextmanager
def environment() -> Iterator[None]:
    """Restores environment variables; LeakError for each not in `TOLERATED_ENV`."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if leaked := sorted(changed - TOLERATED_ENV):
        raise LeakError(f"environment variables left changed: {leaked} (use monkeypatch.setenv)")


@contextmanager
def threads() -> Iterator[None]:
    """LeakError for a new non-daemon thread which does not end by itself within `GRACE_S`."""
    before = set(threading.enumerate())
    yield
    new = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in new:
        thread.join(GRACE_S)
    if alive := [thread.name for thread in new if thread.is_alive()]:
        raise LeakError(f"threads left running: {alive} (join them in teardown)")


@contextmanager
def process_group() -> Iterator[None]:
    """Destroys a default process group left over; LeakError if there was one."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        raise LeakError("default process group left initialised (call destroy_process_group)")


@contextmanager
def child_processes() -> Iterator[None]:
    """Kills child processes left over; LeakError if there were any.

    `run_ranks` keeps its workers, `tests.warm` the process that starts scripts, not the scripts, and `tests.simgpu` the
    one that starts its ranks.
    """
    before = _descendants()
    yield
    if _descendants() <= before:
        return
    new = [p for p in psutil.Process().children(recursive=True) if p.pid not in before and not _is_ours(p)]
    if new:
        _, alive = psutil.wait_procs(new, timeout=GRACE_S)
        names = [_describe(process) for process in alive]  # a killed one has no command line any more
        for process in alive:
            process.kill()
        if names:
            raise LeakError(f"child processes left running, killed now: {names}")


def _descendants() -> set[int]:
    """Asks the kernel for children's children: psutil reads what it knows of every process, in milliseconds."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # not Linux
        return {process.pid for process in psutil.Process().children(recursive=True)}
    found: set[int] = set()
    asked = {os.getpid()}
    while asked:
        pid = asked.pop()
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # ended meanwhile
                asked |= (children := set(map(int, path.read_text().split())) - found)
                found |= children
    return found


def _is_ours(process: psutil.Process) -> bool:
    if process.pid == vars(resource_tracker)["_resource_tracker"]._pid:  # not in typeshed
        return True
    harness, warm = sys.modules.get("tests.ranks.harness"), sys.modules.get("tests.warm")
    simgpu = sys.modules.get("tests.simgpu.harness")
    ours = (harness.worker_pids() if harness else set()) | (warm.pids() if warm else set())
    ours |= simgpu.pids() if simgpu else set()
    return process.pid in ours


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


@contextmanager
def listening_ports() -> Iterator[None]:
    """LeakError if this process still listens on a TCP port it did not listen on before."""
    before = _listening()
    yield
    if _listening() - before:
        gc.collect()  # gloo closes its listener when the last reference to the group goes
    if left := sorted(_listening() - before):
        raise LeakError(f"sockets left listening on {left}")


def _listening() -> set[tuple[str, int]]:
    """Asks each of our sockets: the system's table, which psutil reads, is of all processes and takes milliseconds."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, as the list's own
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as ours:
                listens = ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and ours.family in (socket.AF_INET, socket.AF_INET6):
                    found.add(ours.getsockname()[:2])
    return found


@contextmanager
def droppings(folder: Path = REPOSITORY) -> Iterator[None]:
    """LeakError if Lightning or Hydra wrote into ``folder`` (the files are left for you to look at)."""
    before = _droppings(folder)
    yield
    if new := sorted(str(path) for path in _droppings(folder) - before):
        raise LeakError(f"files left in the repository: {new} (write to tmp_path)")


def _droppings(folder: Path) -> set[Path]:
    names = os.listdir(folder)
    return {folder / name for pattern in DROPPINGS for name in fnmatch.filter(names, pattern)}


@contextmanager
def process_state() -> Iterator[None]:
    """Seeds every global generator, sets one thread and rank 0; puts back signal handlers and torch modes."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    seed_all()
    torch.set_num_threads(1)
    rank_zero_only.rank = 0  # pyright: ignore[reportFunctionMemberAccess]
    handlers = {number: signal.getsignal(number) for number in _handled_signals()}
    dtype, grad, deterministic = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _handled_signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]
