"""Starts trainings one after the other, each in four fresh processes; what has been run is kept and not run again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import LIMIT_S, PEERS, WORLD, Run, key

START_S = 120.0  # imports, set-up and the judgement at the end, at most
Result = dict[str, Any]


def run_all(runs: Iterable[Run], cache: Path, say: Callable[[str], None]) -> dict[str, Result]:
    """Trains what can be trained; returns results by `key`.

    Args:
        runs: in this order.
        cache: JSONL file, one line per run that came to its end; may exist.
        say: told what is about to run.

    Returns:
        Of each run ``ranks`` (what each rank saw), or ``failed``: why there is nothing.
    """
    known = {entry["key"]: entry["result"] for entry in _lines(cache)}
    results: dict[str, Result] = {}
    for run in runs:
        missing = next(peer for peer in PEERS if peer.name == run.peer).missing()
        if missing is not None:
            results[key(run)] = {"failed": missing}
        elif key(run) in known:
            results[key(run)] = known[key(run)]
        else:
            say(f"{run.cluster}, seed {run.seed}: {run.peer}")
            result = results[key(run)] = _launch(run)
            if "failed" not in result:
                cache.parent.mkdir(parents=True, exist_ok=True)
                with cache.open("a") as file:
                    file.write(json.dumps({"key": key(run), "result": result}) + "\n")
    return results


def _lines(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cache.read_text().splitlines()] if cache.exists() else []


def _launch(run: Run) -> Result:
    """Starts the ranks as a cluster manager would, each by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    environ |= {"NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        command = [sys.executable, "-m", "benchmarks.peers.worker", json.dumps(asdict(run)), str(path)]
        logs = [path.with_suffix(f".log{rank}") for rank in range(WORLD)]
        ranks = [
            subprocess.Popen(
                command,
                env={**environ, "LOCAL_RANK": str(rank), "RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=log.open("w"),
                start_new_session=True,  # a library's own daemons end with their rank
            )
            for rank, log in enumerate(logs)
        ]
        late, failed = _wait(ranks, START_S + LIMIT_S)
        if late:
            return {"failed": f"not at its end after {START_S + LIMIT_S:.0f} s"}
        if failed is not None:
            return {"failed": _last_words(logs[failed])}
        return {"ranks": [json.loads(path.with_suffix(f".rank{rank}").read_text()) for rank in range(WORLD)]}


def _wait(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> tuple[bool, int | None]:
    """Waits for all, or until one fails, and leaves nothing behind; tells whether it took too long, and who failed."""
    deadline_s, late = time.monotonic() + limit_s, False
    while not late and any(p.poll() is None for p in ranks) and not any(p.returncode for p in ranks):
        time.sleep(0.05)
        late = time.monotonic() > deadline_s
    failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
    for process in ranks:
        with suppress(ProcessLookupError):  # nobody is left of most groups
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return late, failed


def _last_words(log: Path) -> str:
    """Returns what a rank ended with: its exception, or else the last line it wrote."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or ["ended without a word"])[-1][:300]
