"""Ranks on simulated GPUs, as `tests.ranks.harness` has them on the host.

Ranks are forks of one process that has imported everything (`tests.simgpu.warm`), with torchrun's variables. There is
no process group yet: Lightning makes it in its own way, with the device's number, or the job does.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.ports import free_port
from tests.ranks.harness import RankTimeoutError, RankTracebackError
from tests.simgpu.rank_process import Answer
from tests.simgpu.sim.check import check
from tests.simgpu.warm import Request, receive, send

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = 6000  # characters of a rank's screen in a message

_python: subprocess.Popen[bytes] | None = None
_line: socket.socket | None = None


def run_sim_ranks(
    world: int,
    job: Callable[..., T],
    *args: Any,
    gpus: int | None = None,
    nccl: bool = False,
    asynchronous: bool = True,
    serial: bool = False,
    timeout_s: float = 110.0,
    circle_known: str = "",
    screen: bool = False,
) -> list[T]:
    """Calls ``job(rank, world, *args)`` in ``world`` processes that have simulated GPUs.

    With ``nccl`` the order of operations is proven afterwards: same operations on all ranks of a communicator, and no
    circle, be kernels of a device beside one another or one after the other.

    Args:
        world: number of ranks.
        job: importable by name; arguments and results are pickled, and results are on the host.
        gpus: number of devices that each process sees; fewer than ranks: they share (gloo only).
        nccl: there is a backend with NCCL's rules.
        asynchronous: copies deliver late, and unordered work raises.
        serial: kernels of all communicators of a device run one after the other.
        timeout_s: after it, ranks still running are ended.
        circle_known: why operations may wait for one another in a circle where kernels run one after the other; then
            only the order with a stream per communicator is proven.
        screen: ranks write to this process's screen.

    Returns:
        The results, by rank.

    Raises:
        RankTimeoutError: a rank did not finish; with what it has written, and where it stood.
        AssertionError: a race was found, or an order that may hang.
        BaseException: what the first rank to fail raised, its traceback as ``__cause__``.
    """
    with tempfile.TemporaryDirectory(prefix="simgpu-", ignore_cleanup_errors=True) as folder:
        request = Request(
            pickle.dumps((job, args)), world, world if gpus is None else gpus, nccl, asynchronous, serial, folder,
            free_port(), timeout_s, list(sys.path), screen,
        )  # fmt: skip
        codes = _ask(request)
        answers: dict[int, Answer] = {}
        for rank in range(world):
            file = Path(folder, f"result-{rank}")
            if file.exists():
                answers[rank] = pickle.loads(file.read_bytes())
        screens = {rank: _screen(folder, rank) for rank in range(world)}
    _raise_first(answers, codes, screens, timeout_s)
    races = [f"rank {rank}: {text}" for rank, answer in answers.items() for text in answer.races]
    assert not races, "races on simulated devices:\n" + "\n".join(races)
    if nccl:
        wrong = check({rank: answer.issued for rank, answer in answers.items()}, serial=not circle_known)
        assert not wrong, "NCCL may hang:\n" + "\n".join(wrong)
    return [answers[rank].value for rank in range(world)]


def _raise_first(answers: dict[int, Answer], codes: dict[int, int], screens: dict[int, str], timeout_s: float) -> None:
    """Raises what the first rank to fail raised, if one did: one that died without a word comes first."""
    late = [rank for rank, code in codes.items() if rank not in answers and code == -9]
    dead = [rank for rank in codes if rank not in answers and rank not in late]
    for rank in dead:
        raise RuntimeError(f"rank {rank} died with exit code {codes[rank]}\n{screens[rank]}")
    failed = [rank for rank, answer in answers.items() if answer.error is not None]
    if failed:
        rank = min(failed, key=lambda r: answers[r].failed_at_s)
        error = answers[rank].error
        assert error is not None
        raise error from RankTracebackError(f"rank {rank}:\n{answers[rank].trace}\n{screens[rank]}")
    if late:
        shown = "\n".join(f"rank {rank}:\n{screens[rank]}" for rank in late)
        raise RankTimeoutError(f"ranks {late} did not finish within {timeout_s} s, ended\n{shown}")


def _screen(folder: str, rank: int) -> str:
    file = Path(folder, f"screen-{rank}")
    return file.read_text(errors="replace")[-_SHOWN:] if file.exists() else ""


def _ask(request: Request) -> dict[int, int]:
    global _python, _line
    if _python is None or _line is None or _python.poll() is not None:
        _line, other = socket.socketpair()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with other:
            _python = subprocess.Popen(
                [sys.executable, "-m", "tests.simgpu.warm", str(other.fileno())],
                cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()],
            )  # fmt: skip
    try:
        send(_line, request)
        answer = receive(_line)
    except BaseException:  # Ctrl-C, or the test's own limit: half a conversation cannot be taken up again
        close()
        raise
    if answer is None:
        code = _python.wait()
        close()
        raise RuntimeError(f"the process that starts ranks on simulated GPUs ended with code {code}")
    assert isinstance(answer, dict)
    return answer


def pids() -> set[int]:
    """Returns the id of the process that starts ranks, if it runs; leak guards leave it alone."""
    return {_python.pid} if _python is not None else set()


def close() -> None:
    """Ends it; `run_sim_ranks` starts another when needed."""
    global _python, _line
    if _python is not None and _line is not None:
        _line.close()  # it ends with its line, after its ranks
        _python.wait()
    _python = _line = None


atexit.register(close)
