"""A job whose machines go and come back: who is started when, and how many samples are in the model that is left."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import WORLD
from benchmarks.provenance import ROOT
from benchmarks.ranks import last_words
from tests import warm

RANKS, LEAST = WORLD, 2  # of the job; of which must be left
BATCH, EPOCH_STEPS, SAMPLE_S = 8, 10, 0.25 / 8  # samples per rank and step; steps of all ranks; of a sample
EVERY_S, FIRST_S, AWAY_S = 20.0, 5.0, 2.0  # between outages; until the first; until the machine is there again
START_S = 4.0  # of a process: imports, and whatever it does before it trains; four machines would not share two cores
_LOOK_S, _LIMIT_S = 0.02, 90.0


class System(Enum):
    """What is compared."""

    DDP = "DDP from checkpoints"
    TORCHFT = "torchft"
    BALANCED = "hetero_balanced"
    STALE = "hetero_stale"

    @property
    def survives(self) -> bool:
        """Whether the others go on without one that died; else all are started again."""
        return self is not System.DDP


class Job:
    """Processes of a job, forks of one that has imported Lightning, and what they note.

    Args:
        system: what trains.
        folder: of its files.
    """

    def __init__(self, system: System, folder: Path) -> None:
        self.system, self.folder = system, folder
        self.lives = [0] * RANKS
        self.ranks: list[warm.WarmProcess | None] = [None] * RANKS
        self.there_s = [0.0] * RANKS  # when the machine is there again
        self._port = 0

    def start(self, *ranks: int) -> None:
        """Starts processes; of all ranks, at a new port."""
        if len(ranks) == RANKS:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._port = free.getsockname()[1]
        for rank in ranks:
            self.lives[rank] += 1
            its = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "LOCAL_RANK": str(rank)}
            its |= {"NODE_RANK": "0", "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = ["-m", "benchmarks.faults.worker", str(rank), self.system.value]
            command += [str(self.folder), str(self.notes(rank))]
            with self.said(rank).open("w") as said:
                self.ranks[rank] = warm.start(command, ROOT, {**os.environ, **its}, said.fileno(), said.fileno())

    def said(self, rank: int) -> Path:
        return self.folder / f"said-{rank}-{self.lives[rank]}"

    def notes(self, rank: int) -> Path:
        return self.folder / f"notes-{rank}-{self.lives[rank]}"

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            if (process := self.ranks[rank]) is not None:
                process.kill()
                process.wait(_LIMIT_S)
                self.ranks[rank] = None

    def trains(self) -> bool:
        """Whether every rank has noted a batch.

        Raises:
            RuntimeError: one has ended by itself.
        """
        self.check()
        return all(self.ranks[rank] is not None and self.notes(rank).exists() for rank in range(RANKS))

    def check(self) -> None:
        for rank, process in enumerate(self.ranks):
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"rank {rank}: {last_words(self.said(rank))}")

    def look(self) -> None:
        """Starts whose machine is there again."""
        self.check()
        away = [rank for rank in range(RANKS) if self.ranks[rank] is None]
        if away and all(self.there_s[rank] <= time.monotonic() for rank in away):
            self.start(*away)

    def useful(self, until_s: float) -> int:
        """Returns the samples that are in the model by then."""
        lines = [line.split() for path in self.folder.glob("notes-*") for line in path.read_text().splitlines()]
        told = sorted((float(at_s), int(samples), int(step)) for at_s, samples, step in lines if float(at_s) < until_s)
        if self.system.survives:
            return sum(samples for _, samples, _ in told)
        return told[-1][2] * RANKS * BATCH if told else 0


def run(system: System, outages: int, periods: int) -> dict[str, Any]:
    """Runs a job from its first steps on.

    Args:
        system: what trains.
        outages: one in each of the first periods, of ranks 1, 2, 3 in turn.
        periods: of ``EVERY_S`` each.

    Returns:
        ``samples``: that are in the model, by period.

    Raises:
        RuntimeError: a process ended that nobody killed, or the job did not start.
    """
    with tempfile.TemporaryDirectory(prefix="outages-", ignore_cleanup_errors=True) as name:
        job, everyone = Job(system, Path(name)), range(RANKS)
        try:
            job.start(*everyone)
            limit_s = time.monotonic() + _LIMIT_S
            while not job.trains():
                if time.monotonic() > limit_s:
                    raise RuntimeError(f"{system.value} did not start within {_LIMIT_S:g} s")
                time.sleep(_LOOK_S)
            began_s, coming = time.monotonic(), list(range(outages))
            while (now_s := time.monotonic()) < began_s + periods * EVERY_S:
                if coming and now_s >= began_s + FIRST_S + coming[0] * EVERY_S:
                    gone = 1 + coming.pop(0) % (RANKS - 1)
                    job.there_s[gone] = now_s + AWAY_S
                    job.end(*([gone] if system.survives else everyone))
                job.look()
                time.sleep(_LOOK_S)
            counts = [job.useful(began_s + period * EVERY_S) for period in range(periods + 1)]
            return {"samples": [after - before for before, after in pairwise(counts)]}
        finally:
            job.end(*everyone)
            warm.close()
