"""``scripts/soak [--minutes M] [--seed S] [--runs N]``: random faults in real trainings, for as long as it is told.

Every run is a cell of the matrix or one that is not in it: a random engine, launcher, fault and rank, at a random
moment of a random training. What must come of it, and what is checked, is as in the matrix. It ends at the first run
that is not as it should be, or in which nothing is written for 60 s, and says how to play that run again: run number i
of seed S is run 0 of seed S + i.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests import warm
from tests.faults import namespaces
from tests.faults.cells import Cell, launchers_of
from tests.faults.outcomes import expected
from tests.faults.runner import run
from tests.faults.table import ENGINES, FAULTS

_ANYWHERE = ("kill", "segfault", "SIGUSR1", "stop", "exception", "hold the GIL")  # at any place of a batch
_PLACES = ("Model.on_train_batch_start", "Hooks.on_train_batch_start", "Model.on_train_batch_end")


def cell_of(seed: int) -> Cell:
    """Returns the run of a seed; not one of those that are known to fail."""
    draw = random.Random(seed)
    while expected(cell := _drawn(draw)).known:
        pass
    return cell


def _drawn(draw: random.Random) -> Cell:
    engine = draw.choice(ENGINES)
    fault = draw.choice([f for f in FAULTS.values() if engine in f.engines and not namespaces.why_not(f.needs)])
    launcher = draw.choice([way for way in fault.launchers if way in launchers_of(engine)])
    kind, more = fault.asked.get("kind", ""), {}
    if fault.name.startswith("SIGKILL of a worker") or kind == "stop":
        rank = draw.choice((1, 2))
        fault = replace(fault, hit=(rank,), gone=(rank,) if fault.gone else ())
    if kind in _ANYWHERE and "place" not in fault.asked:
        everywhere = ("Model.training_step",) if engine != "pipeline" else ()  # a rank may have a later stage only
        more["place"] = draw.choice((*_PLACES, *everywhere))
    if kind and "call" not in fault.asked and fault.asked.get("place", "Model.training_step") == "Model.training_step":
        more["call"] = draw.randint(2, 5)
    if engine in ("balanced", "sharded") and kind == "out of memory":
        more["options"] = {"min_samples": 2}  # one sample cannot be divided
    if "samples" not in fault.asked:
        more["samples"] = 12 * draw.randint(8, 10)
    more["step_s"] = fault.asked.get("step_s", draw.choice((0.0, 0.01, 0.05)))
    return Cell(engine, launcher, fault, more=more)


def play(seed: int) -> list[str]:
    """Runs it; returns what is not as it should be."""
    cell = cell_of(seed)
    hit = f" rank {', '.join(map(str, cell.fault.hit))}," if cell.asked.get("kind") else ""
    print(f"seed {seed}: {cell},{hit} {cell.more}", end=" ... ", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        outcome = run(cell, Path(folder))
    print(f"{outcome.outcome}, {outcome.seconds:.1f} s, by {outcome.finished or 'nobody'}", flush=True)
    if outcome.violations:
        print(*outcome.screens, sep="\n--------\n")
    return outcome.violations


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; else drawn")
    said = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if said.seed is None else said.seed
    print(f"seed {first}, {said.minutes:g} minutes", flush=True)
    began_s, ran = time.monotonic(), Counter[str]()
    for seed in range(first, first + said.runs):
        if time.monotonic() - began_s > 60.0 * said.minutes:
            break
        if found := play(seed):
            warm.close()
            print("", *found, sep="\n    ")
            sys.exit(f"failed after {ran['runs']} good runs; again: scripts/soak --runs 1 --seed {seed}")
        cell = cell_of(seed)
        ran.update([cell.engine, cell.launcher, cell.fault.name, "runs"])
    warm.close()
    minutes = (time.monotonic() - began_s) / 60.0
    print(f"{ran.pop('runs', 0)} runs in {minutes:.1f} minutes, none failed; first seed {first}")
    print(*(f"    {count:4d} {name}" for name, count in ran.most_common()), sep="\n")


if __name__ == "__main__":
    main()
