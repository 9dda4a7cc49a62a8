"""``python -m benchmarks.stale [--quick] [--only WORDS]``: the stale engine's claims, measured.

Two halves, one report:

- *simulated*: every policy, and the balanced engine's barrier, with real gradients on simulated time; 24 seeds, five
  for policies that are not the default.
- *real*: four processes on emulated devices under Lightning; everything but the devices' speed is real; three seeds.

DDP's recipe is left untouched throughout. Times are ratios within one run: to stock DDP, to the balanced engine, and to
the *bound*, the time all devices together need for the work, without waiting or transfers. Losses are paired with DDP's
of the same seed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.kit.figures import Figure, columns, named
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.stale import real, simulated
from benchmarks.stale.cases import CASES, FEW, SEEDS

OURS = "flexible"
QUICK = ("1:1:1/2:1/4",)
Row = dict[str, Any]


def simulated_figures(rows: list[Row]) -> list[Figure]:
    """Holds the default policy against the goals, case by case."""
    figures: list[Figure] = []
    calm = {case.name: case.calm for case in CASES}
    for row in (r for r in rows if r["policy"] == OURS):
        case = row["case"]
        put = named(f"simulated, {case}")
        figures.append(put("time to bound", row["to_bound"], "x", most=1.10 if calm[case] else 1.25))
        figures.append(put("time to balanced", row["to_balanced"], "x", most=0.70 if "spells" in case else 1.02))
        for recipe in (key.partition(":")[0] for key in row if key.endswith("loss to DDP")):
            put = named(f"simulated, {case}, {recipe}")
            figures.append(put("final loss to DDP's", row[f"{recipe}: loss to DDP"], "x", most=1.05))
            field = f"{recipe}: time to target_s"
            reached = [r[field] for r in rows if r["case"] == case and r.get(field) is not None]
            if row[field] is not None:
                value = row[field] / min(reached)
                figures.append(put("time to target, to the best policy's", value, "x", most=1.05))
    return figures


def real_figures(rows: list[Row]) -> list[Figure]:
    """The same for real processes."""
    figures: list[Figure] = []
    for row in (r for r in rows if r["engine"] == OURS):
        put, cluster = named(f"real, {row['task']}, {row['cluster']}"), row["cluster"]
        figures.append(put("time to bound", row["to_bound"], "x", most=1.25 if cluster == "spells" else None))
        if row["to_ddp"] is not None:
            figures.append(put("time to DDP", row["to_ddp"], "x", most=1.03 if cluster == "equal" else None))
            goal = 0.70 if cluster == "spells" else 1.02
            figures.append(put("time to balanced", row["to_balanced"], "x", most=goal))
            figures.append(put("final loss to DDP's", row["loss_to_ddp"], "x", most=1.05))
        figures.append(put("greatest staleness", row["max_staleness"], "versions", most=2))
    return figures


def tables(simulated_rows: list[Row], real_rows: list[Row]) -> str:
    """Returns all rows for readers, wins and losses."""
    parts: list[str] = []
    if simulated_rows:
        keys = dict.fromkeys(key for row in simulated_rows for key in row)  # not every case trains every recipe
        recipes = [key.partition(":")[0] for key in keys if key.endswith("loss to DDP")]
        headings = {
            "case": "simulated", "policy": "policy", "time_s": "time [s]", "time_spread_s": "+-", "to_ddp": "to DDP",
            "to_balanced": "to balanced", "to_bound": "to bound",
            **{f"{r}: loss to DDP": f"loss/DDP {r}" for r in recipes},
            **{f"{r}: time to target_s": f"to target [s] {r}" for r in recipes},
            "max_staleness": "max stale", "mean_staleness": "mean", "recomputed": "recomputed", "waiting": "waiting",
        }  # fmt: skip
        parts.append(columns(simulated_rows, headings))
    if real_rows:
        headings = {
            "task": "real", "cluster": "devices", "engine": "engine", "seeds": "seeds", "fit_s": "time [s]",
            "spread_s": "range [s]", "p95_s": "p95 batch [s]", "longest_s": "longest [s]", "taken": "taken / asked",
            "to_ddp": "to DDP", "to_balanced": "to balanced", "to_bound": "to bound",
            "simulated": "simulated: to bound", "loss_to_ddp": "loss/DDP", "stale_fraction": "stale",
            "max_staleness": "max", "recomputed": "recomputed [samples]", "hold_s": "held [s]",
        }  # fmt: skip
        parts.append(columns(real_rows, headings))
    return "\n\n".join(parts)


def beside(real_rows: list[Row], simulated_rows: list[Row]) -> None:
    """Puts the simulated ratio of the same policy and speeds beside each real one."""
    policies = {"ddp": "bsp (stock DDP)", "balanced": "balanced (>= 1 sample)"}
    known = {(r["case"], r["policy"]): r["to_bound"] for r in simulated_rows}
    for row in real_rows:
        row["simulated"] = known.get((row["cluster"], policies.get(row["engine"], row["engine"])))


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case: first the simulated ones."""
    found: dict[str, Any] = {
        f"simulated, {case.name}": partial(simulated.measure, case, quick)
        for case in CASES
        if not quick or case.name in QUICK
    }
    for task in real.TASKS[:1] if quick else real.TASKS:
        for cluster in real.CLUSTERS:
            if not quick or cluster.name in QUICK:
                found[f"real, {task.name}, {cluster.name}"] = partial(real.measure, task, cluster, quick)
    return found


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    simulated_rows = [row for case in CASES for row in found.get(f"simulated, {case.name}", ())]
    real_rows = [
        row
        for task in real.TASKS
        for cluster in real.CLUSTERS
        for row in real.rows_of(task, cluster, found.get(f"real, {task.name}, {cluster.name}", ()))
    ]
    beside(real_rows, simulated_rows)
    notes = (
        f"Simulated: {len(SEEDS)} seeds that chose nothing ({FEW} of policies that are not the default), medians;"
        " losses are geometric means of pairs. Real:"
        f" four processes on two cores, {len(real.SEEDS)} seeds, medians of ratios; compute is emulated by sleeping in"
        " proportion to samples, real forward and backward included; Lightning, data loading and transfers come on top,"
        " so ratios to the bound are not those of the simulation. Batches, p95 and longest, and what emulated work took"
        " to what the scenario asks, are rank 0's. Slow spells follow the clock. `asp`, `drop`, `ssp`, `saps` and"
        " `buffered` make smaller updates, `backup` trains on fewer samples."
    )
    figures = simulated_figures(simulated_rows) + real_figures(real_rows)
    raw = {"simulated": simulated_rows, "real": real_rows}
    return figures, raw, f"{notes}\n\n{tables(simulated_rows, real_rows)}"


BENCHMARK = Benchmark(name="stale", title="Stale engine (after SaPS)", repeats=1, cases=cases, report=report)

if __name__ == "__main__":
    BENCHMARK.main()
