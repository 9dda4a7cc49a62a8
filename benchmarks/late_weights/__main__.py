"""``python -m benchmarks.late_weights [--quick]``: what a late contribution should be worth at the edge of stability.

All rules train on one and the same simulated schedule of ``flexible`` per case and seed, so that they differ in nothing
but the server's step. All rules are tried on twelve seeds of the recipe at the edge of stability; today's and the best
three of the others are then trained on twelve other seeds, which chose nothing, other recipes under spells only.

Losses are final ones, over synchronous training's of the same seed; *chance* is synchronous training against itself
with initial weights moved by 1e-4. One process; what is done is kept in ``.cache/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import Kept
from benchmarks.late_weights.rules import RULES, TODAY, LateLearner, Rule
from benchmarks.report import write_results
from benchmarks.stale.cases import CASES, COSTS, Case, JitteredWork
from benchmarks.stale.learning import BATCH, RECIPES, TRAINING_SAMPLES, Training
from benchmarks.stale.simulated import ENDS, geometric
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Granted
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulate.simulator import simulate

HERE = Path(__file__).parent
EDGE = "MLP at the edge, momentum"
OTHERS = ("MLP, momentum", "MLP, Adam")
NAMES = ("spells", "jitter 20% on 1:1:1/2:1/4", "8 workers, spells")
SEEDS, MORE_SEEDS = tuple(range(400, 412)), tuple(range(500, 512))
GOAL, WORST = 1.02, 1.05
ALL, AGAIN = "all rules", "other seeds"
Losses = dict[str, float]


def trained(case: Case, seed: int, rules: list[Rule], recipe: str) -> Losses:
    """Returns the final loss of each rule on one schedule."""
    learners = [LateLearner(RECIPES[recipe], seed, rule) for rule in rules]
    workers = range(len(case.speeds))
    simulate(
        Coordinator(Flexible(), workers=workers),
        JitteredWork(case.build(seed), len(case.speeds), case.jitter, seed),
        workers=workers,
        epochs=[ENDS] * RECIPES[recipe].epochs,
        costs=COSTS,
        hooks=Training(learners, seed),
        record=False,
    )
    return {learner.rule.name: learner.final_loss() for learner in learners}


def synchronous(recipe: str, seed: int) -> Losses:
    """Returns the final loss of one process, of one with other initial weights, and the mean cosine at its updates."""
    one, other = (LateLearner(RECIPES[recipe], seed, TODAY) for _ in range(2))
    moved = np.random.default_rng([11, seed]).standard_normal(len(other.weights)).astype(np.float32)
    other.weights = other.weights + np.float32(1e-4) * moved
    training = Training([one, other], seed)
    for epoch in range(RECIPES[recipe].epochs):
        training.begin(epoch, 0.0)
        for start in range(0, TRAINING_SAMPLES, BATCH):
            granted = Granted(rank=0, lease=0, tick=0, base=0, spans=((start, start + BATCH),))
            training.granted(granted, 0.0)
            training.accepted(
                Accepted(rank=0, lease=0, samples=BATCH, staleness=0), granted, granted.spans, 0.0
            )
            for learner in (one, other):
                learner.step(BATCH, 1.0, True)
    return {"loss": one.final_loss(), "moved": other.final_loss(), "cosine": float(np.mean(one.cosines))}


def row(stage: str, recipe: str, case: str, rule: str, pairs: list[float]) -> dict[str, Any]:
    mean, error = geometric(pairs)
    return {
        "stage": stage, "recipe": recipe, "case": case, "rule": rule, "seeds": len(pairs), "loss_to_ddp": mean,
        "standard_error": error, "pairs": pairs,
    }  # fmt: skip


def stage_of(
    stage: str, recipes: tuple[str, ...], cases: list[Case], seeds: tuple[int, ...], rules: list[Rule], kept: Kept
) -> list[dict[str, Any]]:
    """Trains everything and returns one row per recipe, case and rule."""

    def cache(key: str, compute: Callable[[], Losses]) -> Losses:
        return kept(key, compute, lambda found: f"{key} { {k: round(v, 4) for k, v in found.items()} }")

    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        alone = [cache(f"{recipe}/{s}", lambda r=recipe, s=s: synchronous(r, s)) for s in seeds]
        chance = [a["moved"] / a["loss"] for a in alone]
        rows.append(row(stage, recipe, "synchronous", "chance", chance))
        rows[-1]["cosine"] = float(np.mean([a["cosine"] for a in alone]))
        for case in cases:
            losses = [
                cache(
                    f"{recipe}/{s}/{case.name}/{[r.name for r in rules]}",
                    lambda c=case, s=s, r=recipe: trained(c, s, rules, r),
                )
                for s in seeds
            ]
            for rule in rules:
                pairs = [
                    min(mine[rule.name], 100.0) / one["loss"] for mine, one in zip(losses, alone, strict=True)
                ]
                rows.append(row(stage, recipe, case.name, rule.name, pairs))
    return rows


def at_edge(rows: list[dict[str, Any]], rule: str, stage: str = ALL) -> tuple[float, float]:
    """Returns a rule's loss at the edge over all cases, and in the worst."""
    losses = [r["loss_to_ddp"] for r in rows if (r["stage"], r["recipe"], r["rule"]) == (stage, EDGE, rule)]
    return geometric(losses)[0], max(losses)


def best(rows: list[dict[str, Any]]) -> list[Rule]:
    """Returns today's rule and the best three others at the edge."""
    others = sorted((r for r in RULES if r is not TODAY), key=lambda r: at_edge(rows, r.name))
    return [TODAY, *others[:3]]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["stage", "recipe", "case", "rule", "seeds", "loss to DDP", "+-"], ["---"] * 7]
    for r in rows:
        numbers = [f"{r['loss_to_ddp']:.3f}", f"{r['standard_error']:.3f}"]
        lines.append([r["stage"], r["recipe"], r["case"], r["rule"], str(r["seeds"]), *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Holds today's rule and the best ones against the goal, on seeds that did not choose them."""
    return [
        {"name": f"{rule.name}: final loss to DDP's at the edge, {words}", "value": value, "unit": "x",
         "goal": f"<= {goal:g}", "holds": value <= goal}
        for rule in best(rows)
        for words, value, goal in zip(
            ("all cases", "worst case"), at_edge(rows, rule.name, AGAIN), (GOAL, WORST), strict=True
        )
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a case and two seeds")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json, results.md")
    args = parser.parse_args()
    cases = [case for case in CASES if case.name in NAMES[: 1 if args.quick else None]]
    seeds, more = (SEEDS[:2], MORE_SEEDS[:2]) if args.quick else (SEEDS, MORE_SEEDS)
    kept = Kept(args.out / ".cache" / "losses.jsonl")
    rows = stage_of(ALL, (EDGE,), cases, seeds, list(RULES), kept)
    rules = best(rows)
    rows += stage_of(AGAIN, (EDGE,), cases, more, rules, kept)
    rows += stage_of(AGAIN, OTHERS, cases[:1], more, rules, kept)
    cosines = ", ".join(f"{r['recipe']} {r['cosine']:.3f}" for r in rows if "cosine" in r and r["stage"] == AGAIN)
    notes = (
        "Simulated time, real gradients; final losses over those of synchronous training with the same seed, geometric"
        " means of pairs and their standard errors. The schedule is that of `flexible` as it is, so times are those of"
        f" `benchmarks.stale`. {len(RULES)} rules were tried on {len(seeds)} seeds at the edge; today's and the best"
        f" three of the others were then trained on {len(more)} other seeds, other recipes under spells. Under Adam the"
        " late part always moves the momentum. *chance*: synchronous training against itself, initial weights moved by"
        f" 1e-4. Mean cosine of the gradients of consecutive synchronous updates: {cosines}.\n\n"
    )
    write_results(
        args.out, title="What a late contribution should be worth", figures=figures_of(rows), raw={"rows": rows},
        notes=notes + table(rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
