"""Groups of ranks for a benchmark, each a process, and what they have measured."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def launch(
    module: str, world_size: int, *arguments: object, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs ``python -m module path-of-result arguments...`` under torchrun; returns what `as_rank` wrote there.

    Args:
        module: calls `as_rank`.
        world_size: number of ranks.
        arguments: for the module.
        environment: variables that the ranks have besides this process's.

    Raises:
        subprocess.CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", module, str(path), *map(str, arguments)]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})})
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
    """One thread, and nothing said but errors."""
    import torch

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    environ |= {"NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    needed = range(world_size) if needed is None else needed
    with tempfile.TemporaryDirectory() as folder:
        paths, logs = ([Path(folder) / f"{rank}.{kind}" for rank in range(world_size)] for kind in ("json", "log"))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments, str(path)],
                env={**environ, "LOCAL_RANK": str(rank), "RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=log.open("w"),
                start_new_session=True,  # a library's own daemons end with their rank
            )
            for rank, (path, log) in enumerate(zip(paths, logs, strict=True))
        ]
        deadline_s = time.monotonic() + limit_s
        while any(ranks[r].poll() is None for r in needed) and not any(ranks[r].poll() for r in needed):
            time.sleep(0.05)
            if time.monotonic() > deadline_s:
                break
        codes = [process.poll() for process in ranks]
        for process in ranks:
            with suppress(ProcessLookupError):  # nobody is left of most groups
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in needed:
            if codes[rank] != 0:
                raise RuntimeError(last_words(logs[rank]) if codes[rank] else f"not at its end after {limit_s:.0f} s")
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def last_words(log: Path) -> str:
    """Returns what a rank ended with: its exception, or else the last line it wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or ["ended without a word"])[-1][:300]
