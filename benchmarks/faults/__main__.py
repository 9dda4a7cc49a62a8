"""``python -m benchmarks.faults [--quick] [--repeats THOUSANDS] [--replay SEED]``: outages, and simulated faults.

**Outages**: four processes train, and every 20 s one of ranks 1 to 3 is killed; its machine is there again two seconds
later, and a new process is started on it. `hetero_balanced` with ``min_ranks=2`` and `hetero_stale` go on meanwhile,
and so does torchft's manager, which is left out where it is not installed (``pip install torchft``). Stock DDP is
started again as a whole from its newest checkpoint, as torchrun does with a fixed number of nodes. *Goodput* is how
many samples are in the model, over those of the same system without outages.

**Simulated**: each schedule is one training of one to five ranks under the stale engine: the real server, coordinator,
meetings, admission and workers on a virtual clock, see ``tests/ranks/stale/simulated``. A seed is all there is to a
schedule: ``--replay`` shows what happened in one, message by message.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.faults import outages
from benchmarks.faults.outages import BATCH, EPOCH_STEPS, EVERY_S, RANKS, SAMPLE_S, START_S, System
from benchmarks.kit.figures import Figure, figure, named
from benchmarks.kit.runner import Benchmark, Cases, Raw
from tests.ranks.stale.simulated.cases import case_of
from tests.ranks.stale.simulated.simulation import simulate

PART, QUICK = 1000, 10  # schedules of a case
OUTAGES = 3  # each rank that may be lost once
GOODPUT = 0.88  # as Decoupled DiLoCo reports (arXiv 2604.21428); its outages are other ones
NOTES = f"""Outages: {RANKS} processes, {SAMPLE_S * BATCH:g} s of emulated work per step, {BATCH} samples per rank and
step, {EPOCH_STEPS} steps an epoch; {OUTAGES} outages, one every {EVERY_S:g} s, from when all train. A process takes
{START_S:g} s to start (emulated: four machines would not share two cores), sets up and joins in real time. DDP writes
a checkpoint each epoch of a model so small that this costs next to nothing. torchft has the settings of its own
example, but joins after 1 s and not 10.

Simulated faults. Failures: schedules in which a sample was applied twice, or never though training ended well; a
contribution was older than the policy's bound; a rank, or the server, had no answer within the schedule's time; a rank
ended though nothing had happened that ends a run, or ended with a cause while another trained to the end. What ends a
run: an error in the user's code, the server's death, or a death before there is a server. Virtual time: what the
schedules would have taken."""


def replay(seed: int) -> None:
    """Prints what happens in a schedule."""
    case = case_of(seed)
    outcome = simulate(case)
    print(case.policy(), case, sep="\n")
    print(*outcome.trace, sep="\n")
    print(*outcome.violations or ["all promises are kept"], sep="\n")
    print(f"digest {outcome.digest}")


def measure(seeds: Sequence[int]) -> dict[str, Any]:
    """Plays these schedules; returns sums, and what was violated by seed."""
    torch.set_num_threads(1)
    began_s, totals, faults, ended = time.process_time(), Counter[str](), Counter[str](), Counter[str]()
    failed: dict[str, list[str]] = {}
    virtual_s = 0.0
    for seed in seeds:
        outcome = simulate(case_of(seed))
        totals.update(schedules=1, excused=outcome.excused, events=outcome.events)
        totals.update(applied=outcome.applied, stale=outcome.stale)
        virtual_s += outcome.virtual_s
        faults += outcome.faults
        ended += outcome.ended
        if outcome.violations:
            failed[str(seed)] = list(outcome.violations)
            print(f"seed {seed}:", *outcome.violations, sep="\n    ", flush=True)
    counts = {"totals": totals, "faults": faults, "ended": ended}
    return {**counts, "failed": failed, "virtual_s": virtual_s, "seconds": time.process_time() - began_s}


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what plays each thousand of schedules."""
    parts = [range(QUICK)] if quick else [range(i * PART, (i + 1) * PART) for i in range(repeats)]
    systems = [one for one in System if one is not System.TORCHFT or find_spec("torchft")]
    found: Cases = {
        f"{'outages' if lost else 'no outage'}: {one.value}": partial(outages.run, one, lost, lost or 1)
        for one in (systems[-2:-1] if quick else systems)
        for lost in ((1,) if quick else (0, OUTAGES))
    }
    return {**found, **{f"seeds {part.start} to {part.stop - 1}": partial(measure, part) for part in parts}}


def goodput(found: Raw) -> list[Figure]:
    """Returns the figures of outages."""
    figures: list[Figure] = []
    for system in System:
        without, lost = (found.get(f"{when}: {system.value}") for when in ("no outage", "outages"))
        if without is None or lost is None:
            continue
        rate = sum(without["samples"]) / len(without["samples"])
        least = GOODPUT if system in (System.BALANCED, System.STALE) else None
        add = named(system.value)
        figures += [
            add("useful samples per second without outages", rate / EVERY_S, "1/s"),
            add(f"goodput, an outage every {EVERY_S:g} s", sum(lost["samples"]) / rate / OUTAGES, "", least=least),
            add("goodput of the worst outage", min(lost["samples"]) / rate, ""),
        ]
    return figures


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    lost = {name: one["samples"] for name, one in found.items() if "outage" in name}
    gains, found = goodput(found), {name: one for name, one in found.items() if name not in lost}
    sums = {name: sum((Counter(one[name]) for one in found.values()), Counter[str]()) for name in ("totals", "faults")}
    totals, seconds = sums["totals"], sum(one["seconds"] for one in found.values())
    failed = {seed: words for one in found.values() for seed, words in one["failed"].items()}
    figures = [
        *gains,
        figure("schedules", totals["schedules"], "1"),
        figure("schedules that failed", len(failed), "1", most=0),
        figure("schedules in which something may end the run", totals["excused"], "1"),
        figure("processor time", seconds, "s"),
        figure("schedules per second of it", totals["schedules"] / seconds, "1/s"),
        figure("events", totals["events"], "1"),
        figure("virtual time", sum(one["virtual_s"] for one in found.values()) / 3600, "h"),
        figure("samples applied", totals["applied"], "1"),
        figure("of these on older parameters", totals["stale"], "1"),
        *(figure(f"faults: {kind}", count, "1") for kind, count in sorted(sums["faults"].items())),
    ]
    if failed:
        print(f"python -m benchmarks.faults --replay {next(iter(failed))} shows the first that failed", flush=True)
    ended = sum((Counter(one["ended"]) for one in found.values()), Counter[str]())
    raw = {"samples by period": lost, "ranks by how they ended": dict(sorted(ended.items())), "failed": failed}
    return figures, raw, NOTES


BENCHMARK = Benchmark(
    name="faults", title="Outages, and simulated faults under the stale engine", repeats=4, cases=cases, report=report
)

if __name__ == "__main__":
    if "--replay" in sys.argv:
        replay(int(sys.argv[sys.argv.index("--replay") + 1]))
    else:
        BENCHMARK.main()
