"""What a run has left: who came to the end, which samples counted, and what is still there of it."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_hetero.cluster import read_events
from lightning_hetero.lightning_compat.strategies import read_folder, written_last
from tests.e2e.programs import left_in
from tests.faults.cells import Cell
from tests.faults.job import unix_sockets

GRACE_S = 20.0  # what children have to end when the processes that were started by hand have


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns what a process noted there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _noted(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        yield from lines(path)


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns what the ranks that came to the end say, by rank."""
    found = {int(path.stem.partition("-")[2]): path.read_text() for path in folder.glob("ended-*.json")}
    return {rank: json.loads(text) for rank, text in found.items() if text}


# ---- samples --------------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Which samples counted; a sample is a column, number + epoch * samples.

    Attributes:
        counted: by process that made steps of an optimizer: how often each sample counted.
        issued: all that some rank was given to compute.
        last: by process: what it was given last.
    """

    counted: dict[int, Counter[int]]
    issued: set[int]
    last: dict[int, set[int]]

    def twice(self) -> list[str]:
        """Returns what counted more than once, in any process."""
        return [
            f"samples counted more than once in process {pid}: { {i: n for i, n in counts.items() if n != 1} }"
            for pid, counts in self.counted.items()
            if any(n != 1 for n in counts.values())
        ]

    def unknown(self) -> list[str]:
        """Returns what counted although no rank had it."""
        strange = {i for counts in self.counted.values() for i in counts} - self.issued
        return [f"samples counted that no rank was given: {sorted(strange)}"] if strange else []

    def lost(self, wanted: set[int], pids: Sequence[int], spared: set[int]) -> list[str]:
        """Returns what did not count, by the books of these processes; ``spared`` may be missing."""
        found = []
        for pid in pids:
            missing = wanted - self.counted.get(pid, Counter()).keys() - spared
            if missing:
                found.append(f"samples lost, by process {pid}: {sorted(missing)}")
        return found


def samples(folder: Path, per_epoch: int) -> Samples:
    """Reads the books of all processes."""
    counted: dict[int, Counter[int]] = {}
    for path in sorted(folder.glob("applied-*.jsonl")):
        counts = counted.setdefault(int(path.stem.partition("-")[2]), Counter())
        for line in lines(path):
            for column, times in zip(line["ids"], line["times"], strict=True):
                counts[column] += times
    issued: set[int] = set()
    last: dict[int, set[int]] = {}
    for path in sorted(folder.glob("issued-*.jsonl")):
        given = [{i + per_epoch * line["epoch"] for i in line["ids"]} for line in lines(path)]
        issued |= set().union(*given)
        last[int(path.stem.split("-")[2])] = given[-1] if given else set()
    return Samples(counted, issued, last)


def not_requeued(folder: Path) -> list[str]:
    """Returns what SLURM's request has not brought about: one checkpoint, and one answer."""
    asked = folder / "requeued"
    answers = asked.read_text().splitlines() if asked.exists() else []
    saved = sorted(path.name for path in folder.glob("hpc_ckpt_*.ckpt"))
    if answers == ["requeue 4711"] and saved == ["hpc_ckpt_1.ckpt"]:
        return []
    return [f"SLURM was answered {answers}, and what was saved is {saved}"]


# ---- what outlives a run --------------------------------------------------------------------------------------------


def outlived(folder: Path, port: int, grace_s: float = GRACE_S) -> list[str]:
    """Returns processes, ports, and shared memory that are left; kills what it can.

    Args:
        port: where ranks met that nobody of ours started.
        grace_s: for what is on its way out.
    """
    found = [f"process outlives the run: {name.split()[0]}" for name in left_in(folder, grace_s)]
    held = list(_noted(folder, "held-*.jsonl"))
    begun_s = {int(pid): at_s for one in held for pid, at_s in one["pids"].items()}
    found += [f"process outlives the run: {name}" for name in _still_there(begun_s, grace_s)]
    ports = {port, *(number for one in held for number in one["ports"])}
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port in ports]
    # others of the machine may have got the number meanwhile
    found += [f"port is still listened on: {c.laddr.port}" for c in listening if c.pid is None or c.pid in begun_s]
    files = {file for one in held for file in one["files"] if not file.endswith(" (deleted)")}
    found += [f"shared memory is left: {file}" for file in sorted(files) if Path(file).exists()]
    return found


def _still_there(begun_s: dict[int, float], grace_s: float) -> list[str]:
    """Kills and returns those that live on in another folder."""
    there = []
    for pid, at_s in begun_s.items():
        with suppress(psutil.Error):
            if (process := psutil.Process(pid)).create_time() == at_s:
                there.append(process)
    _, alive = psutil.wait_procs(there, timeout=grace_s)
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    return [str(process.pid) for process in alive]


# Which others than we leave behind: when they are killed, and Lightning's launcher of processes always. Lightning's own
# writer of checkpoints, which all engines but the pipeline have, leaves its file if it is killed, as under stock DDP.
_OF_OTHERS = ("pymp-", "pytorch-errorfile-", "torchelastic_")
_OF_LIGHTNING = ("tmp",)


def files_left(
    cell: Cell, folder: Path, temporary: Path, memory: Path | None, held: Sequence[str]
) -> list[str]:
    """Returns parts of checkpoints, temporary files, and what is left of a job that was killed as a whole.

    Args:
        folder: of the job.
        temporary: its folder for temporary files.
        memory: its own /dev/shm; None: it had the machine's.
        held: names of files in memory and of sockets that it had.
    """
    found = [f"part of a file is left: {path.name}" for path in folder.rglob("*.part*")]
    writes = cell.asked.get("kind") == "kill in a write" and cell.engine != "pipeline"
    lightnings = writes or cell.launcher in ("spawn", "fork")
    theirs = (*_OF_OTHERS, *(_OF_LIGHTNING if lightnings else ()))
    names = [path.name for path in temporary.iterdir() if not path.name.startswith(theirs)]
    found += [f"temporary file is left: {name}" for name in sorted(names)]
    if memory is not None:
        found += [f"shared memory is left: {path.name}" for path in memory.iterdir() if path.name != "filler"]
    sockets = {name for _, name in unix_sockets()} if held else set()
    found += [f"still there: {name}" for name in held if name in sockets or (name[0] == "/" and Path(name).exists())]
    return found


def broken_checkpoints(folder: Path, cell: Cell) -> list[str]:
    """Returns checkpoints that cannot be read, and whether there is none where a save was disturbed."""
    if not cell.asked.get("save_every") or cell.asked.get("save_in") is not None:
        return []
    found = []
    # A folder in which each rank writes its part is whole once it has the file that is written last.
    saved = [p for p in sorted(folder.glob("saved/*.ckpt")) if not p.is_dir() or written_last(p).exists()]
    for path in saved:
        try:
            read_folder(path, weights_only=False) if path.is_dir() else torch.load(path, weights_only=False)
        except Exception as error:  # whatever it is
            found.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    disturbed = cell.asked.get("kind") in ("kill in a write", "kill soon")
    return found or (["the checkpoint before is gone"] if disturbed and not saved else [])


def unreadable(trace: Path, cell: Cell) -> list[str]:
    """Returns why what was written of a trace on a full disk cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lines that are skipped are told
        try:
            events = read_events(trace)
        except Exception as error:  # whatever it is
            return [f"the trace cannot be read: {type(error).__name__}: {error}"]
    empty = cell.asked.get("call") == 1  # there was room for nothing
    return [] if empty or any(event.kind == "step" for event in events) else ["the trace has no step"]


def not_told_apart(folder: Path, jobs: int, engine: str) -> list[str]:
    """Returns whether the traces of jobs that ran at once in a folder are mixed."""
    runs = {line.get("run") for path in (folder / "hetero").glob("rank*.jsonl") for line in lines(path)}
    if len(runs) != jobs or None in runs:
        return [f"{jobs} jobs wrote traces into one folder, whose lines are of the runs {sorted(map(str, runs))}"]
    unread = []
    for run in sorted(filter(None, runs)):
        steps = Counter((e.rank, e.epoch, e.step) for e in read_events(folder / "hetero", run=run) if e.kind == "step")
        if not steps or (engine != "stale" and max(steps.values()) > 1):  # whose steps may have several parts
            unread.append(f"run {run} has steps {steps.most_common(3)}")
    return unread
