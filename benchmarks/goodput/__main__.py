"""``python -m benchmarks.goodput [--quick] [--seeds N]``: useful samples while workers are killed and come again.

Four emulated devices of equal speed train for the same time under the same outages: a machine goes (SIGKILL of its
rank), and some seconds later a process can be started on it again. Stock DDP is started again as a whole, as soon as
all machines are there, from its newest checkpoint, as torchrun does with a fixed number of nodes. Under the stale
engine the others go on, and the new process joins them. *Useful* samples count once in the model that is there in the
end; *goodput* is how many there are over those of the same system in the same turn without an outage.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.goodput.jobs import System, run
from benchmarks.goodput.kills import Outage, outages
from benchmarks.goodput.worker import BATCH, EPOCH_STEPS, RANKS, STEP_S
from benchmarks.report import write_results

EPOCH_S = EPOCH_STEPS * STEP_S
OFTEN, SELDOM = (f"DDP, checkpoint every {every * EPOCH_S:g} s" for every in (1, 4))
SYSTEMS = {
    "stale": System(engine="stale", checkpoint_epochs=1),
    OFTEN: System(engine="DDP", checkpoint_epochs=1),
    SELDOM: System(engine="DDP", checkpoint_epochs=4),
}
BETWEEN_S = (40.0, 20.0, 10.0)
MIDDLE_S = 20.0  # for the cases that are made at one rate only
WINDOW_S, START_S, REPAIR_S = 40.0, 4.0, 2.0
GOAL = 0.88  # what Decoupled DiLoCo (arXiv 2604.21428) reports; its outages are other ones


def outages_of(between_s: float, seed: int, *, rank_0: bool = False) -> list[Outage]:
    """Returns a turn's outages."""
    ranks = range(0 if rank_0 else 1, RANKS)
    return outages(list(ranks), between_s, REPAIR_S, WINDOW_S, seed)


def cases(rates: tuple[float, ...]) -> Iterator[tuple[str, str, float, bool]]:
    """Yields the cases of a turn: name, system, mean time between outages [s], whether rank 0's machine goes, too."""
    for system in ("stale", OFTEN):
        yield f"none: {system}", system, float("inf"), False
    for between_s in rates:
        for system in SYSTEMS:
            if system != SELDOM or between_s == MIDDLE_S:
                yield f"every {between_s:g} s: {system}", system, between_s, False
    yield f"every {MIDDLE_S:g} s, rank 0, too: stale", "stale", MIDDLE_S, True


def measure(seeds: int, rates: tuple[float, ...]) -> dict[str, list[dict[str, Any]]]:
    """Returns the jobs of all turns, by case."""
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in cases(rates)}
    for seed in range(seeds):
        for name, system, between_s, rank_0 in cases(rates):
            gone = [] if between_s == float("inf") else outages_of(between_s, seed, rank_0=rank_0)
            job = run(SYSTEMS[system], gone, window_s=WINDOW_S, start_s=START_S)
            raw[name].append({"seed": seed, "outages": len(gone), **asdict(job)})
            print(f"{name}, turn {seed}: {raw[name][-1]}", flush=True)
    return raw


def figures_of(raw: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Turns the jobs into figures: sums over the turns, so that an outage counts the same in each."""

    def total(name: str, what: str = "samples") -> float:
        return sum(job[what] for job in raw[name])

    figures: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, goal: str | None = None, holds: bool | None = None) -> None:
        figures.append({"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds})

    turns = len(raw["none: stale"])
    equal = total("none: stale") / total(f"none: {OFTEN}")
    add("none: stale / DDP", equal, "x", ">= 0.97", equal >= 0.97)
    for name, jobs in raw.items():
        when, _, system = name.partition(": ")
        add(f"{name}: useful samples per second", total(name) / turns / WINDOW_S, "1/s")
        if when == "none":
            continue
        base = f"none: {'stale' if system == 'stale' else OFTEN}"
        goodput = total(name) / total(base)
        if system == "stale" and "rank 0" not in when:
            add(f"{name}: goodput", goodput, "x", f">= {GOAL:g}", goodput >= GOAL)
        else:
            add(f"{name}: goodput", goodput, "x")
        each = [job["samples"] / none["samples"] for job, none in zip(jobs, raw[base], strict=True)]
        add(f"{name}: goodput, worst turn", min(each), "x")
        add(f"{name}: outages per turn", statistics.mean(job["outages"] for job in jobs), "")
        add(f"{name}: steps lost per turn", statistics.mean(job["lost_steps"] for job in jobs), "")
        if system == "stale" and "rank 0" not in when:
            ddp = max(total(other) for other in raw if other.startswith(f"{when}: DDP"))
            to_ddp = total(name) / ddp
            add(f"{when}: stale / the better DDP", to_ddp, "x", ">= 1", to_ddp >= 1.0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one turn of a short job; results are not kept")
    parser.add_argument("--seeds", type=int, default=3, help="turns")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.quick:
        gone = [Outage(rank=1, at_s=9.0, back_s=10.0)]
        for name, system in SYSTEMS.items():
            print(name, run(system, gone, window_s=18.0, start_s=1.0))
        return
    raw = measure(args.seeds, BETWEEN_S)
    notes = (
        f"{RANKS} ranks, {STEP_S * 1e3:g} ms per step, {BATCH} samples per rank and step, {EPOCH_S:g} s per epoch;"
        f" {args.seeds} turns with seeds of their own, all cases in each. A job has {WINDOW_S:g} s from the start of"
        f" its processes on, its first start included. Outages are a Poisson process, *every* is the mean time between"
        f" two in the whole job; the machine is there again after {REPAIR_S:g} s, and a process needs {START_S:g} s to"
        " start (emulated: a sleep, before everything that Lightning and the engine do at a start). Rank 0's machine"
        " stays but in the case that says so: there the others go on, and it cannot come again. A newcomer joins when"
        " an epoch ends. Checkpoints are of a model of 1,153 parameters, so they cost next to nothing; the stale"
        f" engine writes one every {EPOCH_S:g} s, too, and needs it only when nobody is left. Work is emulated."
    )
    write_results(
        Path(__file__).parent, title="Goodput under outages: stale engine against DDP from checkpoints",
        figures=figures_of(raw), raw=raw, notes=notes,
    )  # fmt: skip


if __name__ == "__main__":
    main()
