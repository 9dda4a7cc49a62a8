"""Programs as users start them: nothing of a launcher's in their environment; and what is left of them afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil

from tests import warm

K = TypeVar("K")
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]

_LAUNCHERS = ("PL_", "SLURM_", "TORCHELASTIC_", "MASTER_")
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


# torchrun, but for how it starts a process: as a fork of one that has imported Lightning already, see `tests.warm`
_TORCHRUN = """
import os
import subprocess
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


def start(args, env, stdout, stderr, start_new_session):
    assert args[1] == "-u" and (stdout, stderr) == (None, None)
    return subprocess.Popen([sys.executable, *args[2:]], env=env)


subprocess_handler.Popen = start
os.killpg = os.kill  # they have no groups of their own
run.main(sys.argv[1:])
"""


def environ(**more: str) -> dict[str, str]:
    """Returns a user's environment, with one thread per process and ``more``; the checkout need not be installed."""
    mine = {k: v for k, v in os.environ.items() if k not in _RANKS and not k.startswith(_LAUNCHERS)}
    paths = [str(ROOT), str(ROOT / "lightning_hetero" / "_hydra"), *filter(None, [os.environ.get("PYTHONPATH")])]
    mine |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        mine["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    return mine | more


def run(
    command: Sequence[str], folder: Path, *, cold: bool = False, timeout_s: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *command`` in ``folder``, to the end of all who hold its screen; warm (`tests.warm`), or not."""
    if not cold:
        return warm.run(command, folder, environ(), timeout_s)
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ(), capture_output=True, text=True, timeout=timeout_s
    )


def warm_torchrun(folder: Path) -> str:
    """Puts torchrun as a script into ``folder``, with processes that start warm; returns its name."""
    (folder / "torchrun.py").write_text(_TORCHRUN)
    return "torchrun.py"


def two_at_a_time(jobs: Mapping[K, Callable[[], T]]) -> dict[K, Future[T]]:
    """Runs them in two threads: while one program waits for a process to start, another one has work to do.

    Returns:
        What each gave or raised, when all have ended.
    """
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(job) for name, job in jobs.items()}


def left_in(folder: Path, grace_s: float = 0.0) -> list[str]:
    """Kills and returns the processes that still work in ``folder`` after ``grace_s``.

    Children of a dead parent are nobody's children: hence not those of this process.
    """
    others = [p for p in psutil.process_iter(["cwd", "cmdline"]) if p.pid != os.getpid()]
    _, alive = psutil.wait_procs([p for p in others if p.info["cwd"] == str(folder)], timeout=grace_s)
    for process in alive:
        process.kill()
    return [f"{process.pid} {' '.join(process.info['cmdline'] or ())}" for process in alive]
