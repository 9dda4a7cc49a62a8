"""``python -m benchmarks.auto [--quick] [--repeats N]``: `AutoStrategy` against stock DDP and the engines.

Four emulated devices, whole trainings in turns, the same seed for all engines. *train* is from the first batch to the
last; *warm-up* is what set-up takes longer than the balanced engine's. Which engine it took is said for every repeat.
The pipeline engine is in question, but nothing here is worth dividing; emulated links are known to that engine only.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.auto.worker import ENGINES, RANKS, SCENARIOS
from benchmarks.report import write_results
from benchmarks.torchrun import launch

TO_DDP, TO_BEST = 1.02, 1.05


def figures_of(raw: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Turns the runs into figures: medians of ratios of the same turn."""
    rows: list[tuple[str, Any, str, str | None, bool | None]] = []
    for name, runs in raw.items():
        train_s = {engine: [run["train_s"] for run in runs[engine]] for engine in ENGINES}
        own = ("balanced", "stale")
        best = min(own, key=lambda engine: statistics.median(train_s[engine]))
        to_ddp = statistics.median(a / b for a, b in zip(train_s["auto"], train_s["DDP"], strict=True))
        to_best = statistics.median(a / b for a, b in zip(train_s["auto"], train_s[best], strict=True))
        rows.append((f"{name}: auto / DDP", to_ddp, "x", f"<= {TO_DDP:g}", to_ddp <= TO_DDP))
        rows.append((f"{name}: auto / best engine ({best})", to_best, "x", f"<= {TO_BEST:g}", to_best <= TO_BEST))
        took = Counter(run["took"] for run in runs["auto"])
        rows.append((f"{name}: took", ", ".join(f"{k} {n}x" for k, n in took.most_common()), "", None, None))
        for engine in own:
            ratio = statistics.median(a / b for a, b in zip(train_s[engine], train_s["DDP"], strict=True))
            rows.append((f"{name}: {engine} / DDP", ratio, "x", None, None))
    every = [(a, b) for runs in raw.values() for a, b in zip(runs["auto"], runs["balanced"], strict=True)]
    warm_up_s = statistics.median(a["set_up_s"] - b["set_up_s"] for a, b in every)
    rows.append(("warm-up", warm_up_s, "s", None, None))
    return [{"name": n, "value": v, "unit": u, "goal": g, "holds": h} for n, v, u, g, h in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short turn; results are not kept")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    args = parser.parse_args()
    repeats, steps = (1, 40) if args.quick else (args.repeats, 200)
    raw = launch("benchmarks.auto.worker", RANKS, repeats, steps, environment={"OMP_NUM_THREADS": "1"})
    figures = figures_of(raw)
    if args.quick:
        for figure in figures:
            print(f"{figure['name']}: {figure['value']}")
        return
    notes = (
        f"{RANKS} ranks, {steps} steps, {repeats} turns of {len(SCENARIOS)} scenarios; a rank of speed 1 works 18 ms"
        " per step. Work is emulated and includes the real forward and backward."
    )
    write_results(Path(__file__).parent, title="An engine chosen for you", figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
