"""From raw steps to figures and tables; no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.balanced.cases import Case, EqualCase
from benchmarks.steps import percentile
from lightning_hetero import Scenario

Figure = dict[str, Any]
Runs = Sequence[Sequence[float]]
SETTLED = 10  # steps after the start, and after a swap, before a step is called steady
TAKEN = 1.02  # emulated work may have taken so much of what the scenario says, or the devices are not those described


def figure(name: str, value: float, unit: str, *, least: float | None = None, most: float | None = None) -> Figure:
    """Returns one figure; with a limit at most one of ``least`` and ``most`` is given."""
    goal = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else None
    holds = value >= least if least is not None else value <= most if most is not None else None
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds}


def ideal_step_s(scenario: Scenario, world_size: int, global_batch: int, step: int = 0) -> float:
    """Returns the least time of a step over all fractional splits of the global batch [s], no jitter.

    With a: sample_s, c: step_s, v: speed, n: world_size, B: global_batch that is max(max_i c / v_i, (a B + n c) /
    sum_i v_i): no rank has a cap of memory.
    """
    speeds, a, c = [scenario.speed(r, step) for r in range(world_size)], scenario.sample_s or 0.0, scenario.step_s
    return max(c / min(speeds), (a * global_batch + world_size * c) / math.fsum(speeds))


def even_step_s(scenario: Scenario, world_size: int, global_batch: int, step: int = 0) -> float:
    """Returns the time of a step if every rank gets global_batch / world_size samples [s], no jitter."""
    slowest = min(scenario.speed(r, step) for r in range(world_size))
    return (scenario.step_s + (scenario.sample_s or 0.0) * global_batch / world_size) / slowest


def fast_step_s(scenario: Scenario, world_size: int, global_batch: int) -> float:
    """Returns the least time of a step if the slower devices are left out, and the others get equal parts [s]."""
    speeds = sorted((scenario.speed(r, 0) for r in range(world_size)), reverse=True)
    a, c = scenario.sample_s or 0.0, scenario.step_s
    return min((c + a * global_batch / n) / speeds[n - 1] for n in range(1, world_size + 1))


def makespans(case: Case, samples: Sequence[Sequence[int]]) -> list[float]:
    """Modelled time of each step on the samples the ranks really got, over the ideal of that step."""
    plain = case.scenario.jittered(0.0)
    out: list[float] = []
    for step, shares in enumerate(samples):
        slowest = max(plain.work_s(rank, step, n) for rank, n in enumerate(shares))
        out.append(slowest / ideal_step_s(plain, case.world_size, case.global_batch, step))
    return out


def steps_to(ratios: Sequence[float], limit: float = 1.05) -> int:
    """Number of leading entries until three in a row are within ``limit``."""
    good = [r <= limit for r in ratios]
    for i in range(len(good)):
        if all(good[i : i + 3]):
            return i
    return len(good)


def typical(case: Case) -> Callable[[Sequence[float]], float]:
    """Returns what stands for many steps: their median; their mean where some are meant to be much slower."""
    return statistics.median if case.scenario.spells is None else statistics.fmean


def over_runs(case: Case, runs: Runs, part: slice) -> float:
    """Returns the median over runs of what a step of this part of a run takes."""
    return statistics.median(typical(case)(run[part]) for run in runs)


def saved(ours: Runs, ddp: Runs, of: Callable[[Sequence[float]], float]) -> float:
    """Returns how much less time ours takes than the run of DDP's before it, median over the pairs [%]."""
    return 100 * (1 - statistics.median(of(a) / of(b) for a, b in zip(ours, ddp, strict=True)))


def summarize(case: Case, raw: Mapping[str, Any], goals: bool, cores: int) -> list[Figure]:
    """Turns one case's raw steps into figures; ``cores``: that all ranks shared."""
    plain = case.scenario.jittered(0.0)
    end = case.swap_at or case.steps
    steady = slice(min(SETTLED, end // 2), end)
    at = range(*steady.indices(case.steps))
    ideal_s = statistics.fmean(ideal_step_s(plain, case.world_size, case.global_batch, step) for step in at)
    even_s = statistics.fmean(even_step_s(plain, case.world_size, case.global_batch, step) for step in at)
    ddp, ours = raw["ddp"]["steps_s"], raw["ours"]["steps_s"]
    ddp_s, ours_s = over_runs(case, ddp, steady), over_runs(case, ours, steady)
    cost_s = max(0.0, ddp_s - even_s)  # what a step of stock DDP costs beyond its own theory
    framework_s = {name: statistics.median(raw[name]["framework_s"]) for name in ("ddp", "ours")}
    allowed_s = ideal_s + framework_s["ddp"] / cores
    held = goals and case.calm and not case.equal

    def put(name: str, value: float, unit: str, **goal: float | None) -> Figure:
        return figure(f"{case.name}: {name}", value, unit, **goal)

    least = 60.0 if held and "1:1:1/2:1/4" in case.name else None
    figures = [
        put("ideal step", ideal_s * 1e3, "ms"),
        put("stock DDP step", ddp_s * 1e3, "ms"),
        put("our step", ours_s * 1e3, "ms"),
        put("DDP's cost per step beyond theory", cost_s * 1e3, "ms"),
        put("speed-up over DDP", ddp_s / ours_s, "x"),
        put("time saved over DDP", 100 * (1 - ours_s / ddp_s), "%", least=least),
        put("time saved over DDP, whole run", saved(ours, ddp, sum), "%"),
        put("stock DDP, whole run", statistics.median(map(sum, ddp)), "s"),
        put("ours, whole run", statistics.median(map(sum, ours)), "s"),
        put("fraction of ideal, gross", ideal_s / ours_s, ""),
        put("fraction of ideal, net", ideal_s / max(1e-9, ours_s - cost_s), "", least=0.97 if held else None),
        put("the framework's processor time in a step, all ranks, DDP", framework_s["ddp"] * 1e3, "ms"),
        put("the framework's processor time in a step, all ranks, ours", framework_s["ours"] * 1e3, "ms"),
        put(f"ideal step on {cores} cores", allowed_s * 1e3, "ms"),
        put(f"fraction of ideal on {cores} cores, gross", allowed_s / ours_s, ""),
    ]
    for engine, runs in (("stock DDP", ddp), ("ours", ours)):
        every = [step_s for run in runs for step_s in run[steady]]
        figures.append(put(f"{engine}, p95 step", percentile(every, 95) * 1e3, "ms"))
        figures.append(put(f"{engine}, longest step", max(every) * 1e3, "ms"))
    if case.calm and not case.equal:
        starts = [steps_to(makespans(case, run)) for run in raw["ours"]["samples"]]
        figures.append(put("steps to 5% of ideal after start", statistics.median(starts), "steps"))
    if case.swap_at is not None:
        figures += _swap_figures(case, case.swap_at, raw, put)
    error = max(raw["ours"]["gradient_error"])
    figures.append(put("relative gradient error, first step", error, "", most=1e-12))
    if raw["folk"]["steps_s"]:
        folk_s = over_runs(case, raw["folk"]["steps_s"], steady)
        figures.append(put("static uneven sampler, unweighted: step", folk_s * 1e3, "ms"))
        most = None if not held else 0.9 if case.swap_at else 1.0
        for engine, words in (("ours", "a first run"), ("ours again", "with the last run's speeds")):
            ratio = statistics.median(
                sum(a) / sum(b) for a, b in zip(raw[engine]["steps_s"], raw["folk"]["steps_s"], strict=True)
            )
            name = f"ours / static parts that are best in hindsight, whole run, {words}"
            figures.append(put(name, ratio, "x", most=most if engine != "ours" else None))
        fast_s = fast_step_s(plain, case.world_size, case.global_batch)
        figures.append(put("the fast devices alone, ideal step", fast_s * 1e3, "ms"))
        bias = statistics.median(raw["folk"]["gradient_error"])
        figures.append(put("static uneven sampler, unweighted: relative gradient error", bias, ""))
    taken = max(value for engine in raw.values() for value in engine["taken"])
    figures.append(put("emulated work, taken / asked, greatest of all engines and ranks", taken, "x", most=TAKEN))
    return figures


def _swap_figures(case: Case, swap_at: int, raw: Mapping[str, Any], put: Callable[..., Figure]) -> list[Figure]:
    """What a change of speeds costs: the steps until the shares are right again, and the steady ones behind them."""
    after = slice(min(swap_at + SETTLED, (swap_at + case.steps) // 2), case.steps)
    ddp, ours = raw["ddp"]["steps_s"], raw["ours"]["steps_s"]
    ddp_s, ours_s = over_runs(case, ddp, after), over_runs(case, ours, after)
    between = [steps_to(makespans(case, run)[swap_at:]) for run in raw["ours"]["samples"]]
    lost_s = [sum(run[swap_at : swap_at + n]) - n * ours_s for run, n in zip(ours, between, strict=True)]
    longest_s = [max(run[swap_at : swap_at + n], default=0.0) for run, n in zip(ours, between, strict=True)]
    return [
        put("steps to 5% of ideal after swap", statistics.median(between), "steps", most=2.0),
        put("longest of these steps", statistics.median(longest_s) * 1e3, "ms"),
        put("lost in these steps, to as many steady ones", statistics.median(lost_s) * 1e3, "ms"),
        put("stock DDP step, steady after swap", ddp_s * 1e3, "ms"),
        put("our step, steady after swap", ours_s * 1e3, "ms"),
        put("time saved over DDP, steady after swap", 100 * (1 - ours_s / ddp_s), "%"),
    ]


def equal_figures(case: EqualCase, raw: Mapping[str, Any]) -> list[Figure]:
    """Overhead on equal devices: ours over the DDP run beside it, and DDP over DDP as the noise."""
    name, medians_s = case.name, raw["median_s"]

    def ratio(engine: str, of: str = "median_s") -> float:
        return statistics.median(a / b for a, b in zip(raw[of][engine], raw[of]["ddp"], strict=True))

    ddp_s = statistics.median(medians_s["ddp"])
    fits = abs(ddp_s / case.ddp_step_s - 1) <= 0.1
    fit = {"goal": f"{case.ddp_step_s * 1e3:g} +- 10 %", "holds": fits}
    most = 1.05 if case.ddp_step_s < 0.005 else 1.01
    taken = max(value for each in raw["taken"].values() for value in each)
    return [
        {**figure(f"{name}: stock DDP step", ddp_s * 1e3, "ms"), **fit},
        figure(f"{name}: our step", statistics.median(medians_s["ours"]) * 1e3, "ms"),
        figure(f"{name}: ours / DDP", ratio("ours"), "x", most=most),
        figure(f"{name}: DDP / DDP (noise)", ratio("ddp again"), "x"),
        figure(f"{name}: ours / DDP, p95 step", ratio("ours", "p95_s"), "x"),
        figure(f"{name}: DDP / DDP (noise), p95 step", ratio("ddp again", "p95_s"), "x"),
        figure(f"{name}: stock DDP, longest step", max(raw["longest_s"]["ddp"]) * 1e3, "ms"),
        figure(f"{name}: ours, longest step", max(raw["longest_s"]["ours"]) * 1e3, "ms"),
        figure(f"{name}: emulated work of a step", raw["emulated_s"] * 1e3, "ms"),
        figure(f"{name}: emulated work, taken / asked, greatest of all engines and ranks", taken, "x"),
    ]


KINDS = {
    "critical_s": "exchange + decision on the critical path",
    "fetch_s": "of it at the fetch",
    "beside_s": "sent and evaluated beside the gradient exchange",
}
LIMITS_US = {"mean": 50.0, "p50": 100.0}  # of the critical path
PUBLISHED = "exchange + decision on the critical path, 4 ranks, gloo"  # the first case's median, in README.md
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "p50": lambda values: percentile(values, 50),
    "p99": lambda values: percentile(values, 99),
}


def critical_path_figures(raw: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """What the engine adds to a step of DDP: mean, median and p99 of the rank on which each is greatest."""
    figures: list[Figure] = []
    for case, found in raw.items():
        for kind, words in KINDS.items():
            for name, of in STATISTICS.items():
                worst_us = max(of(rank) for rank in found[kind]) * 1e6
                most = LIMITS_US.get(name) if kind == "critical_s" else None
                known = PUBLISHED if name == "p50" and most and case == next(iter(raw)) else f"{case}: {words}, {name}"
                figures.append(figure(known, worst_us, "us", most=most))
        hidden = min(statistics.fmean(map(float, rank)) for rank in found["hidden"])
        figures.append(figure(f"{case}: steps whose gradient exchange hid that, least of all ranks", 100 * hidden, "%"))
    return figures


def critical_path_table(raw: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the same rank by rank, as a Markdown table."""
    head = ["critical path [us]: mean / p50 / p99", "rank", *KINDS.values(), "hidden [% of steps]"]
    lines = [head, ["---"] * len(head)]
    for case, found in raw.items():
        for rank, hidden in enumerate(found["hidden"]):
            cells = [" / ".join(f"{of(found[kind][rank]) * 1e6:.0f}" for of in STATISTICS.values()) for kind in KINDS]
            lines.append([case, str(rank), *cells, f"{100 * statistics.fmean(map(float, hidden)):.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
