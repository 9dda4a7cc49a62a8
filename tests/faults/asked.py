"""What the program of the fault matrix is told, and what it writes for the observer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ASKED: dict[str, Any] = {
    "engine": "balanced",
    "start": "popen",  # how Lightning starts the other ranks, where nobody else does
    "ranks": 3,
    "devices": 0,  # of this node; 0: all
    "nodes": 1,
    "samples": 96,
    "batch": 4,
    "epochs": 2,
    "last_epoch": 0,  # ends there; 0: after all epochs
    "step_s": 0.01,  # a device's work
    "timeout_s": 120.0,
    "liveness_s": 0.5,
    "validation": True,
    "accumulate": 1,
    "precision": "",  # of the Trainer; "": a module of doubles
    "save_every": 0,  # steps; 0: no checkpoints
    "save_in": "saved",  # folder of the checkpoints
    "write_s": 0.0,  # so long a checkpoint's write takes at least
    "resume": "",  # checkpoint to go on from
    "trace": None,  # folder of a `HeteroTrace`, with a `StragglerMonitor`; "": its own default; None: neither
    "root": "",  # default_root_dir; "": the program's folder
    "import_s": 0.0,  # so long ranks other than 0 import
    "kind": "",  # of fault; "": none
    "place": "Model.on_train_batch_start",
    "call": 3,  # which call of the place on a rank that is hit
    "ranks_hit": [1],
    "attack": "",  # of strangers
    "hold_s": 0.0,  # how long, for what lasts
    "options": {},  # further arguments of the strategy
    **json.loads(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("{") else "{}"),
}
CAUSE = "the cause: a flux compensator broke"
FOLDER = Path.cwd()
RANK: list[int] = []


def note(name: str, **said: Any) -> None:
    """Appends a line at once: a kill in the next moment does not lose it."""
    file = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(said) + "\n").encode())
    os.close(file)


def my_rank() -> int:
    """Returns the rank of the start: in the group of those who are left it may be another."""
    if not RANK and dist.is_initialized():
        RANK.append(dist.get_rank())
    if RANK:
        return RANK[0]
    return int(next(filter(None, map(os.environ.get, ("RANK", "SLURM_PROCID", "LOCAL_RANK"))), 0))


def pids(ranks: Iterable[int]) -> list[int]:
    """Returns the processes of these ranks, this one last; waits for those that have not begun to train."""
    files = [FOLDER / f"pid-{rank}" for rank in ranks]
    while not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.01)
    return sorted((int(file.read_text()) for file in files), key=lambda pid: pid == os.getpid())
