"""``python -m benchmarks.comparators [--quick] [--seeds N ...]``: training loss against time for every policy.

Simulated time, real gradients, DDP's recipe untouched: the policies on three clusters (calm, one straggler, slow
spells), each trained with momentum SGD and with Adam on the same schedule. A curve has a point per epoch: the mean
training loss over the epoch's samples, at the parameters they were computed with, and when the epoch ended; curves and
ratios are means over seeds. Settings of the policies: those that `benchmarks.stale` has tuned. What is done is kept in
``.cache/``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept
from benchmarks.report import write_results
from benchmarks.stale.cases import CASES, COSTS, Case, Contender, JitteredWork, contender
from benchmarks.stale.learning import BATCH, RECIPES, TRAINING_SAMPLES, Learner, Training
from benchmarks.stale.simulated import ENDS, code_digest, geometric
from benchmarks.stale.simulator import simulate
from lightning_hetero.stale.decide.coordinator import Coordinator

HERE = Path(__file__).parent
DDP = "bsp (stock DDP)"
CONTENDERS = (
    contender("bsp", DDP),
    contender("flexible"),
    contender("joining"),
    contender("aged"),
    contender("quorum"),
    contender("backup", spares=1),
    contender("buffered", k=2, bound=4),
    contender("ssp", bound=8),
    contender("asp"),
    contender("dynsgd"),
)
SCENARIOS = {"equal": "calm", "1:1:1:1/8": "one straggler, 8 times slower", "spells": "slow spells"}
MODELS = ("MLP, momentum", "MLP, Adam", "MLP at the edge, momentum")
TICKS = TRAINING_SAMPLES // BATCH
EPOCHS = 30
SEEDS = tuple(range(700, 706))
MOST = 100.0  # of a loss: diverged
Run = dict[str, Any]
Row = dict[str, Any]


def curve_of(learner: Learner, ticks_s: Sequence[float]) -> Run:
    """Returns the mean loss of each epoch and its end [s], the final loss, and when the target was reached [s]."""
    epochs = range(0, len(learner.tick_losses), TICKS)
    means = (statistics.fmean(learner.tick_losses[k : k + TICKS]) for k in epochs)
    result = learner.result(ticks_s)
    return {
        "losses": [x if x < MOST else MOST for x in means],
        "t_s": [ticks_s[k + TICKS - 1] for k in epochs],
        "final": min(result["loss"], MOST),
        "target_s": result["target_s"],
    }


def trained(case: Case, policy: Contender, seed: int, epochs: int) -> Run:
    """Simulates a policy and trains on its schedule; returns a curve per recipe."""
    decides, workers, speeds = policy.policy(), range(len(case.speeds)), case.build(seed)
    learners = [Learner(RECIPES[model], seed, completes=decides.completes) for model in MODELS]
    training = Training(learners, seed)
    trace = simulate(
        Coordinator(decides, workers=workers),
        JitteredWork(speeds, len(workers), case.jitter, seed),
        workers=workers,
        epochs=[ENDS] * epochs,
        costs=COSTS,
        hooks=training,
    )
    return {
        "time_s": trace.makespan_s,
        "to_bound": trace.makespan_s / speeds.ideal_s([BATCH] * (TICKS * epochs)),
        "staleness": trace.mean_staleness,
        "curves": {learner.recipe.name: curve_of(learner, training.ticks_s) for learner in learners},
    }


def row_of(case: str, policy: str, model: str, runs: Sequence[Run], ddp: Sequence[Run]) -> Row:
    """Returns a policy's curve and its ratios to DDP's on one cluster, for one model."""
    mine, theirs = ([run["curves"][model] for run in some] for some in (runs, ddp))
    pairs = [a["final"] / b["final"] for a, b in zip(mine, theirs, strict=True)]
    mean, error = geometric(pairs)
    reached = [
        math.inf if a["target_s"] is None else a["target_s"] / (b["target_s"] or math.nan)
        for a, b in zip(mine, theirs, strict=True)
    ]
    target = statistics.median(reached)
    return {
        "case": case, "policy": policy, "model": model,
        "time_to_ddp": statistics.median(a["time_s"] / b["time_s"] for a, b in zip(runs, ddp, strict=True)),
        "to_bound": statistics.median(a["to_bound"] for a in runs),
        "target_to_ddp": target if math.isfinite(target) else None,
        "reached": sum(map(math.isfinite, reached)), "loss_to_ddp": mean, "error": error, "pairs": pairs,
        "staleness": statistics.fmean(a["staleness"] for a in runs),
        "t_s": [statistics.fmean(some) for some in zip(*(one["t_s"] for one in mine), strict=True)],
        "losses": [geometric(some)[0] for some in zip(*(one["losses"] for one in mine), strict=True)],
    }  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    head = ["model", "devices", "policy", "whole schedule, to DDP", "to bound", "time to target, to DDP",
            "reached it", "final loss, to DDP", "+-", "mean staleness"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for r in rows:
        target = "never" if r["target_to_ddp"] is None else f"{r['target_to_ddp']:.2f}"
        lines.append([
            r["model"], r["case"], r["policy"], f"{r['time_to_ddp']:.2f}", f"{r['to_bound']:.2f}", target,
            f"{r['reached']} of {len(r['pairs'])}", f"{r['loss_to_ddp']:.2f}", f"{r['error']:.2f}",
            f"{r['staleness']:.2f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures_of(rows: Sequence[Row]) -> list[Row]:
    """Returns the figures that tables and pages name; a comparison has no goals."""
    return [
        {"name": f"{r['model']}, {r['case']}, {r['policy']}: {words}", "value": r[key], "unit": "x", "goal": None,
         "holds": None}
        for r in rows
        for words, key in (("time to target, to DDP's", "target_to_ddp"), ("final loss to DDP's", "loss_to_ddp"))
        if r[key] is not None
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster, two seeds, two epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="which, two at least")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json, results.md")
    args = parser.parse_args()
    seeds = SEEDS[:2] if args.quick else tuple(args.seeds)
    cases = [case for case in CASES if case.name in list(SCENARIOS)[-1 if args.quick else 0 :]]
    kept = Kept(args.out / ".cache" / "runs.jsonl")
    epochs = 2 if args.quick else EPOCHS

    def run_of(case: Case, policy: Contender, seed: int) -> Run:
        key = json.dumps([code_digest(), repr(case), policy.kind, policy.settings, seed, epochs])
        return kept(key, lambda: trained(case, policy, seed, epochs), lambda _: f"{case.name} {policy.name} {seed}")

    runs = {
        (case.name, policy.name, seed): run_of(case, policy, seed)
        for seed in seeds for case in cases for policy in CONTENDERS
    }  # fmt: skip
    rows = [
        row_of(
            case.name, policy.name, model,
            *([runs[case.name, name, s] for s in seeds] for name in (policy.name, DDP)),
        )
        for model in MODELS for case in cases for policy in CONTENDERS
    ]  # fmt: skip
    notes = (
        f"Simulated time, real gradients; digits, a multilayer perceptron, {EPOCHS} epochs, batches of {BATCH}, a"
        f" recipe tuned for synchronous training and left as it is; {len(seeds)} seeds that chose nothing, in pairs."
        " *Target*: mean training loss of 0.02 over an epoch's worth of samples; medians of the ratios, *never* where"
        " half of the seeds or more do not reach it. Final losses are over all training samples, geometric means.\n\n"
    )
    write_results(
        args.out, title="The stale engine's policies: loss against time", figures=figures_of(rows), raw={"rows": rows},
        notes=notes + table(rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
