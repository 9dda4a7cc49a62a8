"""``python -m benchmarks.items [--quick] [--repeats N] [--steps N]``: batches of skewed lengths on equal devices.

Paragraphs of Python's help topics on two equal emulated devices, whose time is in proportion to a batch's characters:
*padded* to the longest of the part, or *packed*, one behind the other. *ours* counts them (``batch_cost``), *samples*
does not, *cut by cost* knows the lengths before (``sample_costs``). Time is that of all steps but the first ten, of
runs in turns. *Named*: what a `StragglerMonitor` takes for slow, over all repeats; then rank 1 takes 1.3 times as long.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.items.worker import RANKS, SLOW_FROM, SLOW_RANK, SLOWER
from benchmarks.report import write_results
from benchmarks.torchrun import launch


def figures_of(raw: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Turns the ranks' runs into figures."""
    rows: list[tuple[str, Any, str, str | None, bool | None]] = []
    for kind in ("padded", "packed"):
        runs = raw[kind]
        total_s = {engine: [run["total_s"] for run in of] for engine, of in runs.items()}
        mean_s = statistics.median(total_s["DDP"]) / (steps - 10)
        rows.append((f"{kind}: stock DDP, mean step", mean_s * 1e3, "ms", None, None))
        for engine, times in total_s.items():
            if engine != "DDP":
                ratio = statistics.median(a / b for a, b in zip(times, total_s["DDP"], strict=True))
                goal = ("<= 1.02", ratio <= 1.02) if engine == "ours" else (None, None)
                rows.append((f"{kind}: {engine} / DDP", ratio, "x", *goal))
        for engine in ("DDP", "ours"):
            named = sum(len(run["found"]) for run in runs[engine])
            seen = sum(run["seen"] for run in runs[engine])
            rows.append((f"{kind}: {engine}: ranks named slow, equal devices", named, "", "0", named == 0))
            rows.append((f"{kind}: {engine}: measurements looked at", seen, "", None, None))
    late: list[int] = []
    for run in raw["slow"]:
        right = [at for at, rank, _ in run["found"] if rank == SLOW_RANK and at >= SLOW_FROM]
        late.append(right[0] - SLOW_FROM + 1 if right else SLOW_FROM)
        wrong = len(run["found"]) - len(right)
        rows.append((f"slow by {SLOWER}: named wrongly, run {len(late)}", wrong, "", "0", wrong == 0))
    rows.append((f"slow by {SLOWER}: steps until named, longest", max(late), "steps", "<= 20", max(late) <= 20))
    return [dict(zip(("name", "value", "unit", "goal", "holds"), row, strict=True)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of 200 steps each, under a minute")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=1000, help="steps per run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats, steps = (1, 200) if args.quick else (args.repeats, args.steps)
    raw = launch("benchmarks.items.worker", RANKS, repeats, steps)
    number, middle, tenth, longest = raw["lengths"]
    notes = (
        f"{number} paragraphs of up to {longest} characters, half of them below {middle}, a tenth above {tenth}."
        " Compute is emulated by sleeping, real work included; Lightning, DDP, gloo and the loader are real. The engine"
        " exchanges measurements every few steps where these are short, so it looks at fewer of them than stock DDP's"
        " monitor, which sees every step."
    )
    title = "Work is items: skewed lengths on equal devices"
    write_results(args.out, title=title, figures=figures_of(raw, steps), raw=raw, notes=notes)


if __name__ == "__main__":
    main()
