"""Starts the program in every way: who starts the other ranks, and how many screens there are."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm
from tests.e2e.programs import environ, warm_torchrun
from tests.faults.namespaces import ADDRESSES, Network

PROGRAM = Path(__file__).with_name("program.py")
Process = subprocess.Popen | warm.WarmProcess
_START_METHODS = {"script": "popen", "spawn": "spawn", "fork": "fork"}


@dataclass
class Started:
    """A process that somebody started by hand, and its screen.

    Attributes:
        ranks: that show what they say on this screen.
    """

    process: Process
    screen: Path
    ranks: tuple[int, ...]


def start(
    launcher: str,
    asked: dict[str, Any],
    folder: Path,
    *,
    port: int,
    temporary: Path,
    namespaces: list[str],
    cable: Network | None = None,
) -> list[Started]:
    """Starts the program.

    Args:
        launcher: one of `cells.LAUNCHERS`.
        asked: what the program is told.
        folder: where it works.
        port: where ranks meet that nobody of ours starts.
        temporary: folder for temporary files.
        namespaces: to enter.
        cable: two nodes, of which the last rank is alone on the second; SLURM only.
    """
    ranks = tuple(range(asked["ranks"]))

    def one(name: str, own: tuple[int, ...], command: list[str], said: dict[str, Any], **variables: str) -> Started:
        screen = folder / name
        entered = json.dumps([*namespaces, *([cable.namespace(int(own == ranks[-1:]))] if cable else [])])
        its = environ(FAULTS_NAMESPACES=entered, TMPDIR=str(temporary), **variables)
        with screen.open("w") as file:
            program = [*command, str(PROGRAM), json.dumps(said)]
            return Started(warm.start(program, folder, its, file.fileno(), file.fileno()), screen, own)

    if launcher in _START_METHODS:
        return [one("screen", ranks, [], {**asked, "start": _START_METHODS[launcher]})]
    asked = {**asked, "start": None}
    if launcher == "torchrun":
        options = ["--standalone", f"--nproc-per-node={len(ranks)}", "--monitor-interval=0.1"]
        return [one("screen", ranks, [warm_torchrun(folder), *options], asked)]
    assert launcher == "SLURM", launcher
    return [
        one(f"screen{rank}", (rank,), [], {**asked, **_devices(rank, len(ranks), cable)},
            **_slurm(rank, len(ranks), port, cable, folder))
        for rank in ranks
    ]  # fmt: skip


def _devices(rank: int, ranks: int, cable: Network | None) -> dict[str, int]:
    if cable is None:
        return {}
    return {"devices": 1 if rank == ranks - 1 else ranks - 1, "nodes": 2}


def _slurm(rank: int, ranks: int, port: int, cable: Network | None, folder: Path) -> dict[str, str]:
    """Returns the variables that srun gives to one of its tasks."""
    per_node = [ranks - 1, 1] if cable else [ranks]
    node = int(rank >= per_node[0])
    local = rank - node * per_node[0]
    tasks = ",".join(map(str, per_node))
    first = ADDRESSES[0] if cable else "localhost"
    said = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": f"{first},other" if cable else first,
        "SLURM_NNODES": str(len(per_node)), "SLURM_NTASKS": str(ranks), "SLURM_NTASKS_PER_NODE": str(per_node[0]),
        "SLURM_TASKS_PER_NODE": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "MASTER_PORT": str(port),
        "SLURM_GTIDS": ",".join(str(r) for r in range(ranks) if int(r >= per_node[0]) == node),
        "PATH": f"{_scontrol(folder)}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }  # fmt: skip
    if cable:
        said |= {"MASTER_ADDR": first, "GLOO_SOCKET_IFNAME": cable.interface}
    return said


def _scontrol(folder: Path) -> Path:
    """Puts a program there which notes what SLURM is asked for."""
    place = folder / "bin"
    if not place.exists():
        place.mkdir()
        command = place / "scontrol"
        command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
        command.chmod(0o700)
    return place
