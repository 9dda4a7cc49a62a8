"""``python -m benchmarks.completion [--quick] [--seeds N ...]``: what late contributions count, over a grid of cases.

Both rules of `flexible` train on one simulated schedule per case and seed, so that they differ in nothing but the
server's step; the default is the one that `Flexible(late="auto")` takes for the recipe's optimizer. Seeds that chose
nothing. Losses are final ones, over synchronous training's of the same seed. Two processes; what is done is kept in
``.cache/``.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.completion.runs import RULES, trained
from benchmarks.completion.table import table_of
from benchmarks.kept import Kept
from benchmarks.report import write_results
from benchmarks.stale.cases import CASES
from benchmarks.stale.learning import RECIPES
from benchmarks.stale.simulated import code_digest, geometric
from lightning_hetero.stale.decide.policy import Flexible

HERE = Path(__file__).parent
EDGE = "MLP at the edge, momentum"
MLP = (EDGE, "MLP, momentum", "MLP, Adam")
LARGER = ("CNN, momentum", "CNN, Adam", "transformer, momentum", "transformer, Adam")
PLACES = {
    "1:1:1/2:1/4": MLP,
    "1:1:1:1/8": MLP,
    "spells": (*MLP, *LARGER),
    "jitter 20% on 1:1:1/2:1/4": (*MLP, *LARGER),
    "spells on 1:1:1/2:1/4": MLP,
    "8 workers, 1 to 1/8": MLP,
    "8 workers, spells": (*MLP, *LARGER),
}
SEEDS = tuple(range(620, 632))
MEAN, WORST, TIME = 1.02, 1.05, 1.22
Row = dict[str, Any]


def rows_of(runs: dict[tuple[str, int], Row], seeds: tuple[int, ...]) -> list[Row]:
    """Returns a row per case and recipe: both rules' ratios, the default's, and the new over the old."""
    rows: list[Row] = []
    for case in dict.fromkeys(case for case, _ in runs):
        some = [runs[case, seed] for seed in seeds]
        for recipe in some[0]["losses"]["join"]:
            pairs = {rule: [one["losses"][rule][recipe] for one in some] for rule in RULES}
            ratio = [new / old for old, new in zip(pairs["join"], pairs["complete"], strict=True)]
            late, to_bound = (sum(one[name] for one in some) / len(some) for name in ("late", "to_bound"))
            completes = Flexible().completes(linear=not RECIPES[recipe].adam)
            row: Row = {"recipe": recipe, "case": case, "seeds": len(seeds), "late": late, "to_bound": to_bound}
            row |= {"pairs": pairs, "default": "complete" if completes else "join"}
            for name, values in (*pairs.items(), ("ratio", ratio)):
                row[name], row[f"{name}_error"] = geometric(values)
            rows.append(row)
    return rows


def figures_of(rows: list[Row]) -> list[Row]:
    """Holds the default against the goal, and both rules beside it."""
    figures: list[Row] = []

    def hold(name: str, value: float, goal: float | None) -> None:
        limit, holds = (None, None) if goal is None else (f"<= {goal:g}", value <= goal)
        figures.append({"name": name, "value": value, "unit": "x", "goal": limit, "holds": holds})

    kinds = {
        "at the edge": [r for r in rows if r["recipe"] == EDGE],
        "momentum": [r for r in rows if r["recipe"] != EDGE and not RECIPES[r["recipe"]].adam],
        "Adam": [r for r in rows if RECIPES[r["recipe"]].adam],
    }
    for words, some in kinds.items():
        if some:
            losses = [r[r["default"]] for r in some]
            hold(f"default, {words}: final loss to DDP's, all cases", geometric(losses)[0], MEAN)
            hold(f"default, {words}: final loss to DDP's, worst case", max(losses), WORST)
            for rule in RULES:
                hold(f"{rule}, {words}: final loss to DDP's, all cases", geometric([r[rule] for r in some])[0], None)
    if times := [r["to_bound"] for r in rows if r["case"] == "spells"]:
        hold("time to the bound under spells", max(times), TIME)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a case, one recipe and two seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="which, two at least")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json, results.md")
    args = parser.parse_args()
    places = {"spells": (EDGE,)} if args.quick else PLACES
    seeds = SEEDS[:2] if args.quick else tuple(args.seeds)
    cases = {case.name: case for case in CASES}
    kept = Kept(args.out / ".cache" / "runs.jsonl")
    keys = {
        (name, seed): json.dumps([code_digest(), repr(cases[name]), places[name], seed])
        for seed in seeds for name in places
    }  # fmt: skip
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        under_way = {
            (name, seed): pool.submit(trained, cases[name], places[name], seed)
            for (name, seed), key in keys.items() if key not in kept
        }  # fmt: skip
        runs = {
            which: kept(
                key, lambda which=which: under_way[which].result(), lambda found, which=which: f"{which} {found}"
            )
            for which, key in keys.items()
        }
    rows = rows_of(runs, seeds)
    notes = (
        f"Simulated time, real gradients; {len(seeds)} seeds that chose nothing, geometric means of pairs and their"
        " standard errors. *join*: a late contribution joins the mean of the next update. *complete*: it completes the"
        " mean of the update that it missed. The default, `Flexible(late=\"auto\")`, completes under SGD and joins"
        " under Adam: in bold. Both on one schedule per case and seed, so their times are the same.\n\n"
    )
    write_results(
        args.out, title="Late contributions that complete the update they missed", figures=figures_of(rows),
        raw={"rows": rows}, notes=notes + table_of(rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
