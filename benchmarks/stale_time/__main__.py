"""``python -m benchmarks.stale_time [--quick]``: what keeps `flexible` from the bound with 4, 8 and 16 workers.

Simulated time, no gradients: every case runs as it is, without transfers, and without transfers and start-ups of
chunks; what is then left is waiting and work done twice. The bound has a start-up per worker and update, and no
transfers, see `lightning_hetero.stale.decide.simulate.speeds.SimulatedSpeeds.ideal_s`. Deterministic but for spells,
whose seeds are given. Then the real half of `benchmarks.stale`, beside stock DDP: three runs per case, ten minutes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.report import write_results
from benchmarks.stale import real
from benchmarks.stale.cases import COSTS, EIGHT, LAUNCH_S, Case
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulate.simulator import Costs, simulate

HERE = Path(__file__).parent
TICKS, EPOCHS = 22, 6
SEEDS, REAL_SEEDS = (800, 801), (0, 1, 2)
REAL_ENGINES = {"ddp": "stock DDP", "flexible": "ours"}
CASES = (
    (Case(name="4 equal", speeds=(1.0,) * 4), 64),
    (Case(name="8 equal", speeds=(1.0,) * 8), 64),
    (Case(name="16 equal", speeds=(1.0,) * 16), 64),
    (Case(name="8, 1 to 1/8", speeds=EIGHT), 64),
    (Case(name="4, spells", speeds=(1.0,) * 4, spells=True), 64),
    (Case(name="8, spells", speeds=(1.0,) * 8, spells=True), 64),
    (Case(name="16, spells", speeds=(1.0,) * 16, spells=True), 64),
    (Case(name="8, spells, 16 samples each", speeds=(1.0,) * 8, spells=True), 128),
)
VARIANTS = {
    "as it is": (COSTS, LAUNCH_S),
    "no transfers": (Costs(), LAUNCH_S),
    "no transfers, no start-ups": (Costs(), 0.0),
}
Row = dict[str, Any]


def to_bound(case: Case, batch: int, seed: int, costs: Costs, launch_s: float, epochs: int) -> float:
    """Returns the time of some epochs over the bound."""
    speeds = case.build(seed, horizon_s=20.0)
    speeds.launch_work = launch_s
    workers = range(len(case.speeds))
    trace = simulate(
        Coordinator(Flexible(), workers=workers),
        lambda rank, step, now_s, samples: speeds.seconds(rank, now_s, launch_s + speeds.sample_work * samples),
        workers=workers,
        epochs=[tuple(range(batch, TICKS * batch + 1, batch))] * epochs,
        costs=costs,
        record=False,
    )
    return trace.makespan_s / speeds.ideal_s([batch] * (TICKS * epochs))


def row_of(case: Case, batch: int, epochs: int) -> Row:
    """Returns what a case loses, in parts of its bound."""
    seeds = SEEDS if case.spells else SEEDS[:1]
    ratios = {
        name: statistics.fmean(to_bound(case, batch, seed, costs, launch_s, epochs) for seed in seeds)
        for name, (costs, launch_s) in VARIANTS.items()
    }
    whole, without, bare = ratios.values()
    return {
        "case": case.name, "batch": batch, "per_worker": batch / len(case.speeds), "to_bound": whole,
        "transfers": whole - without, "start_ups": without - bare, "rest": bare - 1.0,
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [["workers", "samples per worker and update", "time to bound", "transfers", "start-ups of top-up chunks",
              "waiting, work done twice"]]  # fmt: skip
    lines.append(["---"] * len(lines[0]))
    for r in rows:
        parts = [f"{r[name]:+.3f}" for name in ("transfers", "start_ups", "rest")]
        lines.append([r["case"], f"{r['per_worker']:g}", f"{r['to_bound']:.3f}", *parts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def real_rows(cache: Path) -> list[Row]:
    """Trains with real processes; returns what rank 0's time is made of, in parts of the bound, by engine."""
    clusters = {cluster.name for cluster in real.CLUSTERS if not cluster.killed}
    results = real.run_all(cache, quick=False, seeds=REAL_SEEDS, engines=REAL_ENGINES)
    rows = real.summarize(results, quick=False, seeds=REAL_SEEDS)
    return [row for row in rows if row["cluster"] in clusters]


def real_table(rows: list[Row]) -> str:
    """Returns the real rows as a Markdown table."""
    lines = [["real processes", "devices", "engine", "time to bound", *real.PARTS, "server's processor time"]]
    lines.append(["---"] * len(lines[0]))
    for r in rows:
        parts = [*(f"{r['parts'][name]:.3f}" for name in real.PARTS), f"{r['server_cpu']:.3f}"]
        lines.append([r["task"], r["cluster"], REAL_ENGINES[r["engine"]], f"{r['to_bound']:.3f}", *parts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, one epoch")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json, results.md")
    args = parser.parse_args()
    rows: list[Row] = []
    for case, batch in CASES[:2] if args.quick else CASES:
        rows.append(row_of(case, batch, 1 if args.quick else EPOCHS))
        print(rows[-1], flush=True)
    figures = [
        {"name": f"{r['case']}: {words}", "value": r[key], "unit": "x", "goal": goal, "holds": holds}
        for r in rows
        for words, key, goal, holds in (
            ("time to bound", "to_bound", *_goal(r)),
            ("transfers", "transfers", None, None),
            ("waiting, work done twice", "rest", None, None),
        )
    ]
    cache = HERE / ".cache" / f"real-{provenance('stale')['digest']}.jsonl"  # of this code only
    trained = [] if args.quick else real_rows(cache)
    figures += [
        {"name": f"real, {r['task']}, {r['cluster']}, {REAL_ENGINES[r['engine']]}: {words}", "value": value,
         "unit": "x", "goal": None, "holds": None}
        for r in trained
        for words, value in (("time to bound", r["to_bound"]), ("answer", r["parts"]["answer"]),
                             ("rest", r["parts"]["rest"]))
    ]  # fmt: skip
    notes = (
        "Simulated time. Parts of the bound: what the time falls by without transfers, then without start-ups of"
        " chunks, and what is left above 1. A sample takes 1 ms, a pull 1 ms, the part of a push that backward does not"
        " hide 0.2 ms, the start of a chunk 1 ms; one of these per worker and update is in the bound."
        " Real processes: rank 0's time in parts of the bound, medians over three seeds. *work* is emulated (1, if each"
        " rank does its part); *pull* and *write* are the transfers of parameters and gradients; *held*: the server had"
        " the message and no work for it, or made the update; *answer*: the rest from a message to its answer, the"
        " server's work for this rank and those before it, and waiting for one of two cores; *meet*: waiting for all"
        " where an epoch ends; *rest*: Lightning, loaders and all else in that process, under stock DDP also its"
        " all-reduce and the waiting in it. The server's processor time is for all four ranks.\n\n"
    )
    write_results(
        args.out, title="Where the stale engine's time goes beyond the bound", figures=figures,
        raw={"rows": rows, "real": trained}, notes=f"{notes}{table(rows)}\n\n{real_table(trained)}",
    )  # fmt: skip


def _goal(row: Row) -> tuple[str, bool]:
    limit = 1.25 if "spells" in row["case"] else 1.10
    return f"<= {limit:g}", row["to_bound"] <= limit


if __name__ == "__main__":
    main()
