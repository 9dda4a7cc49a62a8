"""``python -m benchmarks.stale [--quick] [--part simulated|real|both]``: the stale engine's claims, measured.

Two halves, one report:

- *simulated*: every policy, and the balanced engine's barrier, with real gradients on simulated time; twelve seeds.
- *real*: four processes on emulated devices under Lightning; everything but the devices' speed is real; three seeds.

DDP's recipe is left untouched throughout. Times are ratios within one run: to stock DDP, to the balanced engine, and to
the *bound*, the time all devices together need for the work, without waiting or transfers. Losses are paired with DDP's
of the same seed. Both halves keep what they have in ``.cache/`` and go on from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.report import write_results
from benchmarks.stale import real, simulated
from benchmarks.stale.cases import CASES, FINAL_SEEDS

OURS = "flexible"
SEEDS = (0, 1, 2)
Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, goal: float | None = None) -> Figure:
    """Returns one figure; a goal is an upper limit."""
    limit = None if goal is None else f"<= {goal:g}"
    return {"name": name, "value": value, "unit": unit, "goal": limit, "holds": None if goal is None else value <= goal}


def simulated_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Holds the default policy against the goals, case by case."""
    figures: list[Figure] = []
    calm = {case.name: case.calm for case in CASES}
    for row in (r for r in rows if r["policy"] == OURS):
        case = row["case"]
        name = f"simulated, {case}"
        figures.append(figure(f"{name}: time to bound", row["to_bound"], "x", 1.10 if calm[case] else 1.25))
        figures.append(figure(f"{name}: time to balanced", row["to_balanced"], "x", 0.70 if "spells" in case else 1.02))
        for recipe in (key.partition(":")[0] for key in row if key.endswith("loss to DDP")):
            figures.append(figure(f"{name}, {recipe}: final loss to DDP's", row[f"{recipe}: loss to DDP"], "x", 1.05))
            field = f"{recipe}: time to target_s"
            reached = [r[field] for r in rows if r["case"] == case and r[field] is not None]
            if row[field] is not None:
                value = row[field] / min(reached)
                figures.append(figure(f"{name}, {recipe}: time to target, to the best policy's", value, "x", 1.05))
    return figures


def real_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """The same for real processes."""
    figures: list[Figure] = []
    for row in (r for r in rows if r["engine"] == OURS):
        name, cluster = f"real, {row['task']}, {row['cluster']}", row["cluster"]
        figures.append(figure(f"{name}: time to bound", row["to_bound"], "x", 1.25 if cluster == "spells" else None))
        if row["to_ddp"] is not None:
            figures.append(figure(f"{name}: time to DDP", row["to_ddp"], "x", 1.03 if cluster == "equal" else None))
            goal = 0.70 if cluster == "spells" else 1.02
            figures.append(figure(f"{name}: time to balanced", row["to_balanced"], "x", goal))
            figures.append(figure(f"{name}: final loss to DDP's", row["loss_to_ddp"], "x", 1.05))
        figures.append(figure(f"{name}: greatest staleness", row["max_staleness"], "versions", 2))
    return figures


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Returns rows as a Markdown table; ``columns``: key -> heading."""

    def cell(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [[*columns.values()], ["---"] * len(columns), *([cell(row.get(key)) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(simulated_rows: list[dict[str, Any]], real_rows: list[dict[str, Any]]) -> str:
    """Returns all rows for readers, wins and losses."""
    parts: list[str] = []
    if simulated_rows:
        keys = dict.fromkeys(key for row in simulated_rows for key in row)  # not every case trains every recipe
        recipes = [key.partition(":")[0] for key in keys if key.endswith("loss to DDP")]
        columns = {
            "case": "simulated", "policy": "policy", "time_s": "time [s]", "time_spread_s": "+-", "to_ddp": "to DDP",
            "to_balanced": "to balanced", "to_bound": "to bound",
            **{f"{r}: loss to DDP": f"loss/DDP {r}" for r in recipes},
            **{f"{r}: time to target_s": f"to target [s] {r}" for r in recipes},
            "max_staleness": "max stale", "mean_staleness": "mean", "recomputed": "recomputed", "waiting": "waiting",
        }  # fmt: skip
        parts.append(table(simulated_rows, columns))
    if real_rows:
        columns = {
            "task": "real", "cluster": "devices", "engine": "engine", "seeds": "seeds", "fit_s": "time [s]",
            "spread_s": "range [s]", "p95_s": "p95 batch [s]", "longest_s": "longest [s]", "taken": "taken / asked",
            "to_ddp": "to DDP", "to_balanced": "to balanced", "to_bound": "to bound",
            "simulated": "simulated: to bound", "loss_to_ddp": "loss/DDP", "stale_fraction": "stale",
            "max_staleness": "max", "recomputed": "recomputed [samples]", "hold_s": "held [s]",
        }  # fmt: skip
        parts.append(table(real_rows, columns))
    return "\n\n".join(parts)


def beside(real_rows: list[dict[str, Any]], simulated_rows: list[dict[str, Any]]) -> None:
    """Puts the simulated ratio of the same policy and speeds beside each real one."""
    named = {"ddp": "bsp (stock DDP)", "balanced": "balanced (>= 1 sample)", "backup": "backup spares=1"}
    known = {(r["case"], r["policy"]): r["to_bound"] for r in simulated_rows}
    for row in real_rows:
        row["simulated"] = known.get((row["cluster"], named.get(row["engine"], row["engine"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases, seeds and steps; under a minute")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the simulated half")
    parser.add_argument("--part", choices=("simulated", "real", "both"), default="both")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    simulated_rows = simulated.run(quick=args.quick, jobs=args.jobs) if args.part != "real" else []
    real_rows: list[dict[str, Any]] = []
    if args.part != "simulated":
        cache = Path(__file__).parent / ".cache" / f"real-{provenance('stale')['digest']}.jsonl"  # of this code only
        results = real.run_all(cache, quick=args.quick, seeds=SEEDS)
        real_rows = real.summarize(results, quick=args.quick, seeds=SEEDS)
    beside(real_rows, simulated_rows)
    notes = (
        f"Simulated: {len(FINAL_SEEDS)} seeds that chose nothing, medians; losses are geometric means of pairs. Real:"
        f" four processes on two cores, {len(SEEDS)} seeds, medians of ratios; compute is emulated by sleeping in"
        " proportion to samples, real forward and backward included; Lightning, data loading and transfers come on top,"
        " so ratios to the bound are not those of the simulation. Batches, p95 and longest, and what emulated work took"
        " to what the scenario asks, are rank 0's. Slow spells follow the clock. `asp`, `drop`, `ssp`, `saps` and"
        " `buffered` make smaller updates, `backup` trains on fewer samples.\n\n"
    )
    figures = simulated_figures(simulated_rows) + real_figures(real_rows)
    raw = {"simulated": simulated_rows, "real": real_rows}
    text = notes + tables(simulated_rows, real_rows)
    write_results(args.out, title="Stale engine (after SaPS)", figures=figures, raw=raw, notes=text)


if __name__ == "__main__":
    main()
