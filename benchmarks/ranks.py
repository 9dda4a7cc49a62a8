"""Groups of ranks for a benchmark, each a process, and what they have measured.

Ranks are forks of a process that has imported Lightning, with the variables that a cluster manager sets: there are some
hundred groups in an evening, and four cold starts on two cores take 18 s, warm ones 1 s.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT
from tests import warm

_LIMIT_S = 3600.0


def launch(module: str, world_size: int, *arguments: object) -> dict[str, Any]:
    """Runs ``python -m module path-of-result arguments...`` as each rank; returns what `as_rank` wrote there.

    Args:
        module: calls `as_rank`.
        world_size: number of ranks.
        arguments: for the module.

    Raises:
        RuntimeError: a rank failed; in its own last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [module, str(path), *map(str, arguments)]
        _run(Path(folder), [command] * world_size, _LIMIT_S, range(world_size))
        return json.loads(path.read_text())


def as_rank(path: Path, measure: Callable[[int], dict[str, Any]]) -> None:
    """Runs ``measure(rank)`` in a process group, one thread per rank, and writes what rank 0's returns.

    Args:
        path: of the result.
        measure: called on every rank; plain JSON values.
    """
    import torch.distributed as dist

    quietly()
    dist.init_process_group("gloo")  # Lightning keeps an existing group
    result = measure(dist.get_rank())
    if dist.get_rank() == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def quietly() -> None:
    """One thread, garbage as in any program, and nothing said but errors."""
    import torch

    gc.unfreeze()  # of what was imported before the fork, as in any program
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def apart(
    module: str, world_size: int, *arguments: str, limit_s: float, needed: Sequence[int] | None = None
) -> list[Any]:
    """Runs ``python -m module arguments... path-of-result`` as each rank, started as by a cluster manager.

    Args:
        module: writes JSON to the path, on each rank.
        world_size: number of ranks.
        arguments: for the module.
        limit_s: after so long all are ended [s].
        needed: ranks that must end well; the others may die. None: all.

    Returns:
        What each rank wrote; None of those that did not.

    Raises:
        RuntimeError: a needed rank failed, or was too slow; in its own last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        commands = [[module, *arguments, str(path)] for path in paths]
        _run(Path(folder), commands, limit_s, range(world_size) if needed is None else needed)
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def _run(folder: Path, commands: Sequence[Sequence[str]], limit_s: float, needed: Sequence[int]) -> None:
    """Runs a module and its arguments as each rank until those needed have ended, then ends the others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        its = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    environ = {**os.environ, **its, "WORLD_SIZE": str(len(commands)), "OMP_NUM_THREADS": "1"}
    logs, ranks = [folder / f"{rank}.log" for rank in range(len(commands))], list[warm.WarmProcess]()
    for rank, (command, log) in enumerate(zip(commands, logs, strict=True)):
        own = {**environ, "LOCAL_RANK": str(rank), "RANK": str(rank)}
        with log.open("w") as said:
            ranks.append(warm.start(["-m", *command], ROOT, own, said.fileno(), said.fileno()))
    deadline_s = time.monotonic() + limit_s
    while any(ranks[r].poll() is None for r in needed) and not any(ranks[r].poll() for r in needed):
        time.sleep(0.05)
        if time.monotonic() > deadline_s:
            break
    codes = [process.poll() for process in ranks]
    for process in ranks:
        with suppress(ProcessLookupError):  # of ranks that are a group of their own
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    for rank in needed:
        if codes[rank] != 0:
            raise RuntimeError(last_words(logs[rank]) if codes[rank] else f"not at its end after {limit_s:.0f} s")


def last_words(log: Path) -> str:
    """Returns what a rank ended with: its exception, or else the last line it wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or ["ended without a word"])[-1][:300]
