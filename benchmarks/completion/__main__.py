"""``python -m benchmarks.completion [--quick] [--seeds N ...]``: late contributions complete a mean, or join the next.

Both rules of `flexible` train on one simulated schedule per case and seed, so that they differ in nothing but the
server's step. Seeds that chose nothing; the recipe at the edge of stability, and four away from it. Losses are
final ones, over synchronous training's of the same seed. One process; what is done is kept in ``.cache/``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept
from benchmarks.report import write_results
from benchmarks.stale.cases import CASES, COSTS, Case, JitteredWork
from benchmarks.stale.learning import RECIPES, Learner, Training
from benchmarks.stale.simulated import ENDS, code_digest, geometric, synchronously
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulate.simulator import simulate

HERE = Path(__file__).parent
EDGE = "MLP at the edge, momentum"
MLP = (EDGE, "MLP, momentum", "MLP, Adam")
CNN = ("CNN, momentum", "CNN, Adam")
PLACES = {
    "spells": (*MLP, *CNN),
    "jitter 20% on 1:1:1/2:1/4": MLP,
    "8 workers, spells": MLP,
}
SEEDS = tuple(range(600, 612))
RULES = {"join": False, "complete": True}
MEAN, WORST = 1.02, 1.05
Row = dict[str, Any]


def trained(case: Case, recipes: tuple[str, ...], seed: int) -> Row:
    """Returns time to the bound, the late fraction, and the final losses to DDP's by rule and recipe."""
    torch.set_num_threads(1)  # the batches are tiny
    learners = {
        rule: {recipe: Learner(RECIPES[recipe], seed, completes=completes) for recipe in recipes}
        for rule, completes in RULES.items()
    }
    workers, speeds = range(len(case.speeds)), case.build(seed)
    epochs = max(RECIPES[recipe].epochs for recipe in recipes)
    trace = simulate(
        Coordinator(Flexible(), workers=workers),
        JitteredWork(speeds, len(workers), case.jitter, seed),
        workers=workers,
        epochs=[ENDS] * epochs,
        costs=COSTS,
        hooks=Training([learner for some in learners.values() for learner in some.values()], seed),
        record=False,
    )
    alone = {recipe: synchronously(recipe, seed, RECIPES[recipe].epochs)["loss"] for recipe in recipes}
    return {
        "late": 1.0 - trace.staleness.get(0, 0) / sum(trace.staleness.values()),
        "losses": {
            rule: {recipe: min(learner.final_loss(), 100.0) / alone[recipe] for recipe, learner in some.items()}
            for rule, some in learners.items()
        },
    }


def rows_of(runs: dict[tuple[str, int], Row], seeds: tuple[int, ...]) -> list[Row]:
    """Returns a row per case and recipe: both rules' ratios, and the new over the old of the same schedule."""
    rows: list[Row] = []
    for case in dict.fromkeys(case for case, _ in runs):
        some = [runs[case, seed] for seed in seeds]
        for recipe in some[0]["losses"]["join"]:
            pairs = {rule: [one["losses"][rule][recipe] for one in some] for rule in RULES}
            ratio = [new / old for old, new in zip(pairs["join"], pairs["complete"], strict=True)]
            late = sum(one["late"] for one in some) / len(some)
            row: Row = {"recipe": recipe, "case": case, "seeds": len(seeds), "late": late, "pairs": pairs}
            for name, values in (*pairs.items(), ("ratio", ratio)):
                row[name], row[f"{name}_error"] = geometric(values)
            rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [["recipe", "case", "late samples", "join: loss to DDP", "complete: loss to DDP", "complete to join"]]
    lines.append(["---"] * len(lines[0]))
    for r in rows:
        cells = [f"{r[name]:.3f} +- {r[f'{name}_error']:.3f}" for name in ("join", "complete", "ratio")]
        lines.append([r["recipe"], r["case"], f"{100 * r['late']:.0f} %", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures_of(rows: list[Row]) -> list[Row]:
    """Holds both rules against the goal."""
    figures: list[Row] = []
    for rule in RULES:
        for words, some in (
            ("at the edge", [r for r in rows if r["recipe"] == EDGE]),
            ("away from it", [r for r in rows if r["recipe"] != EDGE]),
        ):
            losses = [r[rule] for r in some]
            for what, value, goal in (
                ("all cases", geometric(losses)[0] if losses else 1.0, MEAN),
                ("worst case", max(losses, default=1.0), WORST),
            ):
                figures.append(
                    {"name": f"{rule}: final loss to DDP's {words}, {what}", "value": value, "unit": "x",
                     "goal": f"<= {goal:g}", "holds": value <= goal}
                )  # fmt: skip
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

    def run_of(case: Case, recipes: tuple[str, ...], seed: int) -> Row:
        key = json.dumps([code_digest(), repr(case), recipes, seed])
        return kept(key, lambda: trained(case, recipes, seed), lambda found: f"{case.name} {seed} {found}")

    runs = {(name, seed): run_of(cases[name], places[name], seed) for seed in seeds for name in places}
    rows = rows_of(runs, seeds)
    notes = (
        f"Simulated time, real gradients; {len(seeds)} seeds that chose nothing, geometric means of pairs and their"
        " standard errors. *join*: a late contribution joins the mean of the next update, the default. *complete*: it"
        " completes the mean of the update that it missed, `Flexible(late=\"complete\")`. Both on one schedule per case"
        " and seed, so their times are the same.\n\n"
    )
    write_results(
        args.out, title="Late contributions that complete the update they missed", figures=figures_of(rows),
        raw={"rows": rows}, notes=notes + table(rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
