"""Four policies on eight clients of unequal speed: emulated time to a target accuracy, final accuracy, waiting."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import fmean, median
from typing import Any

from benchmarks.federated.training import POLICIES, Course, runs_of
from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw

DEVICES = ("steady", "drifting")
TARGET, MOST_TIME, MOST_LOSS = 0.90, 0.7, 0.005
ROUNDS, MOST_ROUNDS = 36, 90
NOTES = (
    "Digits (1440 images, 357 held out) among 8 clients, each label by a Dirichlet distribution of 0.3; a CNN of 8 and"
    " 16 channels, plain SGD at 0.1, batches of 16 to begin with, 10 local steps (adaptive_steps: on average). Speeds"
    " 1:1:1:1:1/2:1/2:1/4:1/8; *drifting*: from there each walks at random, by 10 % per round. Training is real, in one"
    " process per run, with the engine's own policies, own data and averages; time is that of the emulated devices"
    " (3 ms per sample and 4 ms per step at speed 1, jitter 5 %, 20 ms per exchange), which no process waits for: no"
    " network, no Lightning. `fedavg` makes 36 rounds and begins small data again (`FedAvg(again=True)`), as the others"
    " do; they end with its emulated time, or after 90 rounds, which is earlier. *Time to target*: until the mean of"
    " three rounds' accuracies is 0.90, over fedavg's with the same seed. *Final accuracy*: mean of a run's last ten"
    " rounds. *After as many rounds*: mean of the ten rounds up to the 36th, when all have trained on as many samples."
    " *Waiting*: part of the clients' time. Medians over seeds, for accuracies means."
)


def measure(devices: str, seeds: int, rounds: int, most_rounds: int) -> dict[str, list[dict[str, list[float]]]]:
    """Returns the courses by policy, one per seed; two runs at a time."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(runs_of, devices, seed, rounds, most_rounds) for seed in range(seeds)]
        done = [job.result() for job in jobs]
    return {name: [courses[name].plain() for courses in done] for name in POLICIES}


def figures_of(courses: Mapping[str, Mapping[str, list[Course]]], target: float) -> list[dict[str, Any]]:
    """Returns the figures; goals are LB-BSP's."""
    figures: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, goal: str | None = None, holds: bool | None = None) -> None:
        figures.append({"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "holds": holds})

    for devices, by_policy in courses.items():
        base = by_policy["fedavg"]
        reached = [course.time_to(target) for course in base]
        for name, mine in by_policy.items():
            case, ours = f"{devices}: {name}", name == "lb-bsp"
            times = [course.time_to(target) for course in mine]
            both = [(a, b) for a, b in zip(times, reached, strict=True) if a is not None and b is not None]
            missed = sum(time is None for time in times)
            add(f"{case}, runs that reach the target", len(times) - missed, f"of {len(times)}")
            if name == "fedavg":
                if both:
                    add(f"{case}, time to target", median(b for _, b in both), "s, emulated")
            else:
                if both:
                    ratio = median(a / b for a, b in both)
                    holds = ratio <= MOST_TIME and not missed
                    goal = f"<= {MOST_TIME}" if ours else None
                    add(f"{case}, time to target", ratio, "of fedavg's", goal, holds if ours else None)
                lost = fmean(b.final() - a.final() for a, b in zip(mine, base, strict=True))
                goal = f"<= {100 * MOST_LOSS}" if ours else None
                add(f"{case}, final accuracy lost to fedavg", 100 * lost, "points", goal,
                    lost <= MOST_LOSS if ours else None)  # fmt: skip
                alike = fmean(b.final() - a.after(len(b.accuracy)) for a, b in zip(mine, base, strict=True))
                add(f"{case}, accuracy lost after as many rounds", 100 * alike, "points")
            add(f"{case}, final accuracy", 100 * fmean(course.final() for course in mine), "%")
            add(f"{case}, rounds", median(len(course.accuracy) for course in mine), "")
            add(f"{case}, waiting", median(fmean(course.waiting) for course in mine), "of the time")
    return figures


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each kind of devices."""
    rounds = (4, 8) if quick else (ROUNDS, MOST_ROUNDS)
    return {devices: partial(measure, devices, repeats, *rounds) for devices in DEVICES[: 1 if quick else None]}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    courses = {d: {n: [Course(**run) for run in runs] for n, runs in by.items()} for d, by in found.items()}
    return figures_of(courses, 0.1 if quick else TARGET), found, NOTES


BENCHMARK = Benchmark(
    name="federated", title="Federated clients on unequal devices: time to a target accuracy", repeats=4, cases=cases,
    report=report,
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
