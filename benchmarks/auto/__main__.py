"""``python -m benchmarks.auto [--quick] [--repeats N]``: `AutoStrategy` against the best of the engines.

Emulated devices, whole trainings in turns, timed from `fit` on: set-up, trial and planning count. *best* is the engine
whose median run is the shortest, which nobody knows beforehand. *predicted / measured* is the step of the engine that
was taken, as its line says it, and as it came behind the first ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.auto.cases import CASES, QUICK, Case, Times
from benchmarks.auto.worker import WARM_UP
from benchmarks.report import write_results
from benchmarks.torchrun import launch

HERE = Path(__file__).parent
TO_BEST, WITHIN = 1.05, 0.15
STEPS, QUICK_STEPS = 150, 25
NOTES = (
    "Work is emulated and includes the real forward and backward; four ranks, or two, on the cores named below, gloo."
    " *slow link*: links of 5 MB/s are emulated in sums of gradients and between stages, and told to who measures them;"
    " the stale engine is left out, as its messages on one machine cross no link that could be slow."
)


def best_of(runs: Times) -> str:
    """Returns the engine whose median run is the shortest."""
    return min((e for e in runs if e != "auto"), key=lambda e: statistics.median(run["whole_s"] for run in runs[e]))


def figures_of(raw: dict[str, Times]) -> list[dict[str, Any]]:
    """Turns the runs into figures: medians of ratios of the same repeat."""
    found: list[dict[str, Any]] = []

    def figure(name: str, value: Any, unit: str, goal: str | None = None, holds: bool | None = None) -> None:
        found.append({"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds})

    close = 0
    for case, runs in raw.items():
        best, auto = best_of(runs), runs["auto"]
        ratio = statistics.median(a["whole_s"] / b["whole_s"] for a, b in zip(auto, runs[best], strict=True))
        close += ratio <= TO_BEST
        figure(f"{case}: auto / best engine ({best}), whole run", ratio, "x", f"<= {TO_BEST:g}", ratio <= TO_BEST)
        took = Counter(run["took"] for run in auto)
        figure(f"{case}: took", ", ".join(f"{name} {n}x" for name, n in took.most_common()), "")
        said = [run["predicted_s"] / run["step_s"] for run in auto if run["predicted_s"] is not None]
        if said:
            middle = statistics.median(said)
            holds = abs(middle - 1.0) <= WITHIN
            figure(f"{case}: step, predicted / measured", middle, "x", f"{1 - WITHIN:g} to {1 + WITHIN:g}", holds)
        for engine, one in runs.items():
            figure(f"{case}, {engine}: whole run", statistics.median(run["whole_s"] for run in one), "s")
            figure(f"{case}, {engine}: set-up", statistics.median(run["set_up_s"] for run in one), "s")
            figure(f"{case}, {engine}: step", 1e3 * statistics.median(run["step_s"] for run in one), "ms")
            figure(f"{case}, {engine}: emulated work, taken / wanted", max(run["taken"] for run in one), "x")
    figure("scenarios within 5 % of the best engine", close, f"of {len(raw)}", f"{len(raw)}", close == len(raw))
    return found


def run(cases: Iterable[Case], repeats: int, steps: int) -> dict[str, Times]:
    """Trains the cases, those with as many ranks in the same processes."""
    raw: dict[str, Times] = {}
    by_ranks: dict[int, list[str]] = {}
    for case in cases:
        by_ranks.setdefault(case.ranks, []).append(case.name)
    for ranks, names in by_ranks.items():
        setting = json.dumps({"cases": names, "repeats": repeats, "steps": steps})
        raw |= launch("benchmarks.auto.worker", ranks, setting, environment={"OMP_NUM_THREADS": "1"})
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two scenarios, one short repeat; see --out")
    parser.add_argument("--repeats", type=int, default=3, help="trainings of each engine on each scenario")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--only", help="one scenario; see --out")
    parser.add_argument("--out", type=Path, help="folder for results; else this one, .cache if not all")
    args = parser.parse_args()
    names = (args.only,) if args.only else QUICK if args.quick else [case.name for case in CASES]
    steps = QUICK_STEPS if args.quick else args.steps
    raw = run((case for case in CASES if case.name in names), 1 if args.quick else args.repeats, steps)
    write_results(
        args.out or (HERE / ".cache" / HERE.name if args.quick or args.only else HERE),
        title="An engine chosen for you",
        figures=figures_of(raw),
        raw=raw,
        notes=f"{steps} steps of each training, {WARM_UP} of which count for no step. {NOTES}",
    )


if __name__ == "__main__":
    main()
