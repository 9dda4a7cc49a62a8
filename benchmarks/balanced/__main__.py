"""``python -m benchmarks.balanced [--quick] [--repeats N]``: the balanced engine's claims, measured.

Figures, all of them ratios within one run:

- *ideal*: the global batch over the sum of the devices' speeds, fixed costs included, fractional samples allowed.
- *gross* = ideal / measured step. *net* takes off what a step of stock DDP costs beyond its own theory (framework,
  gradient exchange), because every engine pays that.
- *time saved* = 1 - our median step / DDP's median step.
- *steps to 5 %*: steps after the start or the swap until the shares in use are within 5 % of the ideal three times
  in a row, counted from the samples each rank really got.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.balanced.cases import Case, equal_cases, unequal_cases
from benchmarks.report import write_results


def launch(world_size: int, repeats: int, quick: bool) -> dict[str, Any]:
    """Runs one group of ranks under torchrun and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "benchmarks.balanced.worker", str(world_size), str(repeats)]
        command += ["quick" if quick else "full", str(path)]
        subprocess.run(command, check=True)
        return json.loads(path.read_text())


def makespans(case: Case, samples: list[list[int]]) -> list[float]:
    """Modelled time of each step on the samples the ranks really got, over the ideal of that step."""
    plain = case.scenario.jittered(0.0)
    out = []
    for step, shares in enumerate(samples):
        slowest = max(plain.work_s(rank, step, n) for rank, n in enumerate(shares))
        out.append(slowest / plain.ideal_step_s(case.world_size, case.global_batch, step))
    return out


def steps_to(ratios: list[float], limit: float = 1.05) -> int:
    """Number of leading entries until three in a row are within ``limit``."""
    good = [r <= limit for r in ratios]
    for i in range(len(good)):
        if all(good[i : i + 3]):
            return i
    return len(good)


def summarize(case: Case, raw: dict[str, Any], goals: bool) -> list[dict[str, Any]]:
    """Turns one case's raw steps into figures."""
    plain = case.scenario.jittered(0.0)
    ideal_s = plain.ideal_step_s(case.world_size, case.global_batch, 0)
    even_s = plain.even_step_s(case.world_size, case.global_batch, 0)
    end = case.swap_at or case.steps
    steady = slice(min(10, end // 2), end)

    def median_s(engine: str) -> float:
        return statistics.median(statistics.median(run[steady]) for run in raw[engine]["steps_s"])

    ddp_s, ours_s = median_s("ddp"), median_s("ours")
    cost_s = max(0.0, ddp_s - even_s)  # what a step of stock DDP costs beyond its own theory
    equal = even_s <= ideal_s * 1.001
    heterogeneous_goal = goals and case.scenario.jitter == 0 and not equal

    def figure(
        name: str, value: float, unit: str, goal: str | None = None, holds: bool | None = None
    ) -> dict[str, Any]:
        return {"name": f"{case.name}: {name}", "value": value, "unit": unit, "goal": goal, "holds": holds}

    net = ideal_s / max(1e-9, ours_s - cost_s)
    saved = 100 * (1 - ours_s / ddp_s)
    want_saved = heterogeneous_goal and "1:1:1/2:1/4" in case.name
    figures = [
        figure("ideal step", ideal_s * 1e3, "ms"),
        figure("stock DDP step", ddp_s * 1e3, "ms"),
        figure("our step", ours_s * 1e3, "ms"),
        figure("DDP's cost per step beyond theory", cost_s * 1e3, "ms"),
        figure("speed-up over DDP", ddp_s / ours_s, "x"),
        figure("time saved over DDP", saved, "%", ">= 60" if want_saved else None, saved >= 60 if want_saved else None),
        figure("fraction of ideal, gross", ideal_s / ours_s, ""),
        figure(
            "fraction of ideal, net",
            net,
            "",
            ">= 0.97" if heterogeneous_goal else None,
            net >= 0.97 if heterogeneous_goal else None,
        ),
    ]
    if not equal:
        starts = [steps_to(makespans(case, run)) for run in raw["ours"]["samples"]]
        figures.append(figure("steps to 5% of ideal after start", statistics.median(starts), "steps"))
    if case.swap_at is not None:
        swaps = [steps_to(makespans(case, run)[case.swap_at :]) for run in raw["ours"]["samples"]]
        value = statistics.median(swaps)
        figures.append(figure("steps to 5% of ideal after swap", value, "steps", "<= 2 + lag (0)", value <= 2))
    error = max(raw["ours"]["gradient_error"])
    figures.append(figure("relative gradient error, first step", error, "", "<= 1e-12", error <= 1e-12))
    if raw["folk"]["steps_s"] and not equal:
        figures.append(figure("static uneven sampler, unweighted: step", median_s("folk") * 1e3, "ms"))
        bias = statistics.median(raw["folk"]["gradient_error"])
        figures.append(figure("static uneven sampler, unweighted: relative gradient error", bias, ""))
    return figures


def equal_figures(name: str, raw: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Overhead on equal devices: ours over the DDP run beside it, and DDP over DDP as the noise."""
    ratio = statistics.median(o / d for o, d in zip(raw["ours"], raw["ddp"], strict=True))
    noise = statistics.median(o / d for o, d in zip(raw["ddp again"], raw["ddp"], strict=True))
    limit = 1.05 if name.startswith("3 ms") else 1.01
    goal = "<= 1.05" if name.startswith("3 ms") else "<= 1.00 (+ noise 0.01)"
    return [
        {"name": f"{name}: ours / DDP", "value": ratio, "unit": "x", "goal": goal, "holds": ratio <= limit},
        {"name": f"{name}: DDP / DDP (noise)", "value": noise, "unit": "x", "goal": None, "holds": None},
    ]


def critical_path_figures(raw: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """What the engine adds to a step of DDP at 4 ranks: the slowest rank's median."""
    names = {
        "critical_s": "exchange + decision on the critical path, 4 ranks, gloo",
        "fetch_s": "of it at the fetch",
        "beside_s": "sent and evaluated beside the gradient exchange",
    }
    figures = []
    for kind, name in names.items():
        worst = max(statistics.median(rank) for rank in raw[kind]) * 1e6
        goal = "<= 100" if kind == "critical_s" else None
        holds = worst <= 100 if goal else None
        figures.append({"name": name, "value": worst, "unit": "us", "goal": goal, "holds": holds})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat of short runs on 4 ranks, under a minute")
    parser.add_argument("--repeats", type=int, default=5, help="repeats per engine and case")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    figures: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for world_size in (4,) if args.quick else (2, 4, 8):
        result = raw[f"{world_size} ranks"] = launch(world_size, repeats, args.quick)
        for case in unequal_cases():
            if case.name in result["cases"]:
                chosen = case.quick() if args.quick else case
                figures += summarize(chosen, result["cases"][case.name], goals=True)
        for equal in equal_cases():
            if equal.name in result["equal"]:
                figures += equal_figures(equal.name, result["equal"][equal.name])
        if "critical_path" in result:
            figures += critical_path_figures(result["critical_path"])
    notes = (
        "Compute is emulated by sleeping in proportion to samples, so that more devices than cores run truthfully;"
        " everything else (Lightning, DDP, gloo, data loading) is real. The 1/8 device needs min_samples=1: the"
        " default keeps every rank above a quarter of the equal share."
    )
    write_results(args.out, title="Balanced engine (LB-BSP)", figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
