"""A job of one system under outages, as a supervisor runs it: who is started when, and what is useful in the end."""

from __future__ import annotations

import multiprocessing as mp
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.goodput.kills import Outage
from benchmarks.goodput.worker import BATCH, RANKS, newest_checkpoint, train

__all__ = ["Job", "System", "run"]

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What is compared.

    Attributes:
        engine: ``"DDP"`` or ``"stale"``.
        checkpoint_epochs: epochs between two checkpoints.
    """

    engine: str
    checkpoint_epochs: int

    @property
    def survives(self) -> bool:
        """Whether the others go on without one that died; else all are started again."""
        return self.engine == "stale"


@dataclass
class Job:
    """What became of a job.

    Attributes:
        samples: counted once in the model at the end of the window.
        starts: how often all ranks were started.
        came_again: ranks that were started into the run of the others.
        lost_steps: that were made and are in no model.
        idle_s: when no rank trained: until the first batch, and after each restart [s].
    """

    samples: int = 0
    starts: int = 0
    came_again: int = 0
    lost_steps: int = 0
    idle_s: float = 0.0


@dataclass
class _Rank:
    """A machine and the process on it."""

    process: BaseProcess | None = None
    progress: Path | None = None
    away_until_s: float = 0.0
    lives: int = field(default=0)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def noted(self) -> list[tuple[float, int]]:
        """(time, global step) as this process has noted; none before it trains."""
        if self.progress is None or not self.progress.exists():
            return []
        lines = self.progress.read_text(encoding="utf-8").splitlines(keepends=True)
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines if line.endswith("\n")]

    @property
    def trains(self) -> bool:
        return self.alive and self.progress is not None and self.progress.exists()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()


class _Supervisor:
    """Starts processes; kills those whose machines go."""

    def __init__(self, folder: Path, system: System, start_s: float) -> None:
        self.folder, self.system, self.start_s = folder, system, start_s
        self.ranks = [_Rank() for _ in range(RANKS)]
        self.job = Job()
        self.port = 0
        self._context: Any = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.goodput.worker"])

    def start(self, rank: int) -> None:
        one = self.ranks[rank]
        one.lives += 1
        one.progress = self.folder / f"progress-{rank}-{one.lives}"
        one.process = self._context.Process(
            target=train,
            args=(
                rank, str(self.folder), self.system.engine, self.system.checkpoint_epochs, self.port, self.start_s,
                str(one.progress), str(self.folder / f"said-{rank}-{one.lives}"),
            ),
        )  # fmt: skip
        one.process.start()

    def start_all(self) -> None:
        for one in self.ranks:
            one.kill()
        self.note_lost()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.job.starts += 1
        for rank in range(RANKS):
            self.start(rank)

    def note_lost(self) -> None:
        """Notes what the present lives have made beyond the newest checkpoint."""
        self.job.lost_steps += max(0, self.step() - newest_checkpoint(self.folder)[0])

    def step(self) -> int:
        """The global step that the processes of this life, dead ones too, have come to."""
        return max((one.noted[-1][1] for one in self.ranks if one.noted), default=0)

    def look(self, now_s: float) -> None:
        """Does what is due: what has ended is started again, alone or with all others."""
        ranks = self.ranks
        if all(one.alive for one in ranks):
            return
        goes_on = self.system.survives and any(one.trains for one in ranks)
        if not goes_on:
            for one in ranks:  # torchrun's agents end theirs, too, and wait for the missing machine
                one.kill()
            if all(one.away_until_s <= now_s for one in ranks):
                self.start_all()
            return
        for rank, one in enumerate(ranks):
            if rank > 0 and not one.alive and one.away_until_s <= now_s:  # rank 0 cannot come again
                self.job.came_again += 1
                self.start(rank)


def run(system: System, outages: Sequence[Outage], *, window_s: float, start_s: float) -> Job:
    """Runs a job for a while.

    Args:
        system: what trains.
        outages: by time.
        window_s: from the start of the first processes on [s].
        start_s: what starting a process takes [s].
    """
    with tempfile.TemporaryDirectory(prefix="goodput-", ignore_cleanup_errors=True) as name:
        folder, coming = Path(name), list(outages)
        supervisor = _Supervisor(folder, system, start_s)
        ranks, job = supervisor.ranks, supervisor.job
        try:
            supervisor.start_all()
            began_s = time.monotonic()
            while (now_s := time.monotonic() - began_s) < window_s:
                while coming and coming[0].at_s <= now_s:
                    outage = coming.pop(0)
                    ranks[outage.rank].kill()
                    ranks[outage.rank].away_until_s = outage.back_s
                supervisor.look(now_s)
                time.sleep(_LOOK_S)
            in_training = any if system.survives else all
            trains = in_training(one.trains for one in ranks)
            saved = newest_checkpoint(folder)[0]
            step = max(one.noted[-1][1] for one in ranks if one.trains) if trains else saved
            if not trains:
                supervisor.note_lost()
            job.samples = step * RANKS * BATCH
            job.idle_s = _idle_s(folder, began_s, began_s + window_s)
            return job
        finally:
            for one in ranks:
                one.kill()


def _idle_s(folder: Path, began_s: float, ended_s: float) -> float:
    """Returns the sum of all times of more than a second without a batch of any rank [s]."""
    times = [
        float(line.split()[0]) for path in folder.glob("progress-*") for line in path.read_text().splitlines() if line
    ]
    times = [began_s, *sorted(at_s for at_s in times if at_s < ended_s), ended_s]
    return sum(b - a for a, b in pairwise(times) if b - a > 1.0)
