"""From raw steps to figures and tables; no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.balanced.cases import Case, EqualCase
from benchmarks.kit.figures import SETTLED, TAKEN, Figure, named, paired, percentile
from lightning_hetero import Scenario

Runs = Sequence[Sequence[float]]


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


def summarize(case: Case, raw: Mapping[str, Any]) -> list[Figure]:
    """Turns one case's raw steps into figures."""
    plain = case.scenario.jittered(0.0)
    end = case.swap_at or case.steps
    steady = slice(min(SETTLED, end // 2), end)
    at = range(*steady.indices(case.steps))
    ideal_s = statistics.fmean(ideal_step_s(plain, case.world_size, case.global_batch, step) for step in at)
    even_s = statistics.fmean(even_step_s(plain, case.world_size, case.global_batch, step) for step in at)
    ddp, ours = raw["ddp"]["steps_s"], raw["ours"]["steps_s"]
    ddp_s, ours_s = over_runs(case, ddp, steady), over_runs(case, ours, steady)
    cost_s = max(0.0, ddp_s - even_s)  # what a step of stock DDP costs beyond its own theory
    held, put = case.calm and not case.equal, named(case.name)
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
            ratio = paired(*([sum(run) for run in raw[name]["steps_s"]] for name in (engine, "folk")))
            name = f"ours / static parts that are best in hindsight, whole run, {words}"
            figures.append(put(name, ratio, "x", most=most if engine != "ours" else None))
        fast_s = fast_step_s(plain, case.world_size, case.global_batch)
        figures.append(put("the fast devices alone, ideal step", fast_s * 1e3, "ms"))
        figures.append(put("our step / the fast devices alone, ideal step", ours_s / fast_s, "x"))
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
    put, medians_s = named(case.name), raw["median_s"]

    def ratio(engine: str, of: str = "median_s") -> float:
        return paired(raw[of][engine], raw[of]["ddp"])

    ddp_s = statistics.median(medians_s["ddp"])
    fits = abs(ddp_s / case.ddp_step_s - 1) <= 0.1
    fit = {"goal": f"{case.ddp_step_s * 1e3:g} +- 10 %", "holds": fits}
    most = 1.05 if case.ddp_step_s < 0.005 else 1.01
    taken = max(value for each in raw["taken"].values() for value in each)
    return [
        {**put("stock DDP step", ddp_s * 1e3, "ms"), **fit},
        put("our step", statistics.median(medians_s["ours"]) * 1e3, "ms"),
        put("ours / DDP", ratio("ours"), "x", most=most),
        put("DDP / DDP (noise)", ratio("ddp again"), "x"),
        put("ours / DDP, p95 step", ratio("ours", "p95_s"), "x"),
        put("DDP / DDP (noise), p95 step", ratio("ddp again", "p95_s"), "x"),
        put("stock DDP, longest step", max(raw["longest_s"]["ddp"]) * 1e3, "ms"),
        put("ours, longest step", max(raw["longest_s"]["ours"]) * 1e3, "ms"),
        put("emulated work of a step", raw["emulated_s"] * 1e3, "ms"),
        put("emulated work, taken / asked, greatest of all engines and ranks", taken, "x"),
    ]
