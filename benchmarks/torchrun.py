"""Groups of ranks for a benchmark, each a process under torchrun, and what rank 0 of them has measured."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def launch(
    module: str, world_size: int, *arguments: object, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs ``python -m module path-of-result arguments...`` on so many ranks; returns what `as_rank` wrote there.

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
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # Lightning keeps an existing group
    result = measure(dist.get_rank())
    if dist.get_rank() == 0:
        path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
