"""Four policies on eight clients of unequal speed: emulated time to a target accuracy, final accuracy, waiting."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.federated.training import POLICIES, Course, runs_of
from benchmarks.report import write_results

DEVICES = ("steady", "drifting")
TARGET, MOST_TIME, MOST_LOSS = 0.90, 0.7, 0.005
SEEDS, ROUNDS, MOST_ROUNDS = 5, 36, 90
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


def measure(seeds: int, rounds: int, most_rounds: int) -> dict[str, dict[str, list[Course]]]:
    """Returns the courses by devices and policy, one per seed; two runs at a time."""
    every = list(product(DEVICES, range(seeds)))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(runs_of, devices, seed, rounds, most_rounds) for devices, seed in every]
        done = [job.result() for job in jobs]
    found: dict[str, dict[str, list[Course]]] = {d: {name: [] for name in POLICIES} for d in DEVICES}
    for (devices, _), courses in zip(every, done, strict=True):
        for name, course in courses.items():
            found[devices][name].append(course)
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, few rounds")
    quick = parser.parse_args().quick
    courses = measure(1, 4, 8) if quick else measure(SEEDS, ROUNDS, MOST_ROUNDS)
    raw = {d: {n: [c.plain() for c in runs] for n, runs in by.items()} for d, by in courses.items()}
    write_results(
        Path(__file__).parent,
        title="Federated clients on unequal devices: time to a target accuracy",
        figures=figures_of(courses, 0.1 if quick else TARGET),
        raw=raw,
        notes=NOTES,
    )


if __name__ == "__main__":
    main()
