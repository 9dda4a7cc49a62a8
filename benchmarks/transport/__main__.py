"""Times push + pull over our transports against gloo's all_reduce, in the same processes and in turn.

Push + pull: every worker copies its gradients into its slot; the server sums all slots and publishes the sum; every
worker reads it.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.report import write_results
from benchmarks.transport.processes import TRANSPORTS, serve, work

WORKERS = 4
FLOATS = {"25M": 25_000_000, "1M": 1_000_000, "10k": 10_000}
GOAL = 0.5  # of all_reduce's time, by shared memory, 25M float32
NOTES = (
    f"{WORKERS} workers on one node, float32, one thread per process. A round's time is its slowest worker's, from a\n"
    "barrier to the result in place; medians over rounds, all_reduce and the transports in turn. all_reduce sums "
    "without\na server; ours has a server process as a fifth. *Pairs* are meant for other nodes: here they go over "
    "the loopback.\nThe goal is for this table's machine and is no test."
)


class Fleet:
    """The workers, and the servers they talk to for one size."""

    def __init__(self, folder: Path) -> None:
        self._context = mp.get_context("spawn")
        self._servers: dict[str, Any] = {}
        self._talks: list[Connection] = []
        self._workers: list[Any] = []
        for rank in range(WORKERS):
            mine, its = self._context.Pipe()
            args = (rank, WORKERS, (folder / "group").as_uri(), its)
            self._workers.append(self._context.Process(target=work, args=args, daemon=True))
            self._workers[-1].start()
            its.close()  # so that a worker's end is an EOF here
            self._talks.append(mine)

    def all_do(self, *job: Any) -> list[Any]:
        """Has every worker do a job; returns what they answer."""
        for talk in self._talks:
            talk.send(job)
        return [talk.recv() for talk in self._talks]

    def open(self, floats: int) -> None:
        for kind in TRANSPORTS:
            mine, its = self._context.Pipe()
            server = self._context.Process(target=serve, args=(kind, WORKERS, floats, its), daemon=True)
            server.start()
            its.close()
            self._servers[kind] = server
            self.all_do("connect", kind, mine.recv())

    def close(self) -> None:
        for kind, server in self._servers.items():
            self.all_do("disconnect", kind)
            server.join()
        self._servers.clear()

    def end(self) -> None:
        for talk in self._talks:
            talk.send(None)
        for process in self._workers:
            process.join()


def measure(quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns times [s] by size and way."""
    rounds = {"25M": 5 if quick else 31, "1M": 20 if quick else 200, "10k": 50 if quick else 500}
    raw: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder))
        for name, floats in FLOATS.items():
            fleet.open(floats)
            fleet.all_do("rounds", floats, 3)  # first touch of all memory
            by_worker = fleet.all_do("rounds", floats, rounds[name])
            raw[name] = {
                way: [max(times) for times in zip(*(w[way] for w in by_worker), strict=True)]
                for way in by_worker[0]
            }
            if name == "10k":
                calls, repeats = (200, 3) if quick else (1000, 11)
                raw["request"] = {
                    kind: [fleet.all_do("latency", kind, calls)[0] for _ in range(repeats)] for kind in TRANSPORTS
                }
            fleet.close()
        fleet.end()
    return raw


def figures(raw: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, goal: float | None = None) -> None:
        holds = None if goal is None else value <= goal
        said = None if goal is None else f"<= {goal:g}"
        rows.append({"name": name, "value": float(f"{value:.4g}"), "unit": unit, "goal": said, "holds": holds})

    for size in FLOATS:
        for way, times_s in raw[size].items():
            add(f"{size}, {way}", 1e3 * statistics.median(times_s), "ms")
        for kind in TRANSPORTS:
            pairs = zip(raw[size][kind], raw[size]["all_reduce"], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            goal = GOAL if (size, kind) == ("25M", "shared memory") else None
            add(f"{size}, {kind} : all_reduce, median of paired ratios", ratio, "", goal)
    for kind, times_s in raw["request"].items():
        add(f"request and answer, {kind}", 1e6 * statistics.median(times_s), "us")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds (under a minute)")
    raw = measure(parser.parse_args().quick)
    rounded = {
        f"{size}, {way} [ms]": [round(1e3 * t, 4) for t in times]
        for size, ways in raw.items()
        for way, times in ways.items()
    }
    title = "Transport: push + pull against all_reduce"
    write_results(Path(__file__).parent, title=title, figures=figures(raw), raw=rounded, notes=NOTES)


if __name__ == "__main__":
    main()
