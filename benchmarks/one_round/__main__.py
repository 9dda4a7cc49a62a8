"""``python -m benchmarks.one_round [--quick]``: small collectives of gloo, in one round, and through shared memory.

Four processes share two cores. Between two collectives each sleeps 5 ms, so they meet as ranks do at a step's end; the
ways take turns. *Takes*: from when the last rank begins until all have the result.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.one_round import ranks
from benchmarks.report import write_results
from benchmarks.torchrun import launch

NOTES = (
    f"{ranks.RANKS} processes on two cores, one thread each besides gloo's; {ranks.GAP_S * 1e3:g} ms of sleep before"
    " each collective; medians. Processor: of all threads of a process, the sleeps' own included (`nothing`)."
)


def figures(raw: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, goal: float | None = None) -> None:
        said, holds = (None, None) if goal is None else (f"<= {goal:g}", value <= goal)
        found.append({"name": name, "value": value, "unit": unit, "goal": said, "holds": holds})

    for what, ways in raw.items():
        for way, measured in ways.items():
            add(f"{what}, {way}: takes", statistics.median(measured["taken_s"]) * 1e3, "ms")
            add(f"{what}, {way}: processor, each rank", statistics.median(measured["used_s"]) * 1e3, "ms")
        for way, other in (("one round", "gloo's"), ("memory", "one round")):
            if way in ways:
                ours, theirs = (statistics.median(ways[one]["taken_s"]) for one in (way, other))
                add(f"{what}: {way} / {other}", ours / theirs, "x", 1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds; under a minute")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    raw = launch("benchmarks.one_round.ranks", ranks.RANKS, 2 if args.quick else 20)
    write_results(args.out, title="Small collectives in one round", figures=figures(raw), raw=raw, notes=NOTES)


if __name__ == "__main__":
    main()
