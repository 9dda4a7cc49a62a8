"""``python -m benchmarks.monitor [--quick] [--repeats N]``: what a `StragglerMonitor` costs that reports every step.

Four ranks, steps of 20 ms, ``log_every_n_steps=1``, a `CSVLogger`, and one value that the module logs itself. In one
run the monitor is off for 8 steps, on for 8 and off for 8, in cycles, so that whatever else the machine does is the
same for all. *cost* is the median over the cycles of (median step with) / (mean of the two medians without) - 1;
*noise* is half of the spread of the middle half of (without again) / (without) - 1. A cost is resolved to about
noise / sqrt(cycles).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.monitor.worker import ENGINES, RANKS, STEP_S
from benchmarks.report import write_results
from benchmarks.torchrun import launch

GOAL = 2.0  # percent


def figures_of(engine: str, raw: dict[str, list[list[float]]], goals: bool) -> list[dict[str, Any]]:
    """Turns one engine's steps into figures."""
    medians = {kind: [statistics.median(steps) for steps in blocks] for kind, blocks in raw.items()}
    triples = list(zip(medians["without"], medians["with"], medians["without again"], strict=True))
    costs = [100 * (with_s / ((one_s + two_s) / 2) - 1) for one_s, with_s, two_s in triples]
    low, _, high = statistics.quantiles([100 * (two_s / one_s - 1) for one_s, _, two_s in triples], n=4)
    cost, limit_s = statistics.median(costs), GOAL / 100 * STEP_S
    goal, holds = (f"<= {GOAL:g}", cost <= GOAL) if goals else (None, None)
    without_s = statistics.median(medians["without"] + medians["without again"])
    hooks_s = statistics.median(medians["hooks"])
    rows: list[tuple[str, float | str, str, str | None, bool | None]] = [
        ("step without a monitor", without_s * 1e3, "ms", None, None),
        ("step with a monitor", statistics.median(medians["with"]) * 1e3, "ms", None, None),
        ("cost of the monitor, median", cost, "%", goal, holds),
        ("noise of a cycle", (high - low) / 2, "%", None, None),
        ("cycles", len(costs), "", None, None),
        ("in the monitor's own hooks, rank 0, per step", hooks_s * 1e6, "us", None, None),
        ("the same of a step of 20 ms", 100 * hooks_s / STEP_S, "%", goal, hooks_s <= limit_s if goals else None),
    ]
    return [
        {"name": f"{engine}: {name}", "value": value, "unit": unit, "goal": goal, "holds": holds}
        for name, value, unit, goal, holds in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run per engine, under a minute")
    parser.add_argument("--repeats", type=int, default=3, help="runs per engine")
    parser.add_argument("--cycles", type=int, default=20, help="cycles per run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats, cycles = (1, 3) if args.quick else (args.repeats, args.cycles)
    raw = launch("benchmarks.monitor.worker", RANKS, repeats, cycles)
    figures = [figure for engine in ENGINES for figure in figures_of(engine, raw[engine], goals=not args.quick)]
    notes = (
        "Compute is emulated by sleeping 20 ms per step, so that four devices fit on fewer cores; Lightning, engines,"
        " gloo and the logger are real, and what they cost is on top. While it is off, the monitor is still a callback"
        " that Lightning calls. The *cost* is all there is; the monitor's own hooks leave out what a report adds to the"
        " stale engine's server and its answer."
    )
    title = "Cost of StragglerMonitor at log_every_n_steps=1"
    write_results(args.out, title=title, figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
