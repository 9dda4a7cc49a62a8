"""``python -m benchmarks.faults [--quick] [--repeats THOUSANDS] [--replay SEED]``: random faults, simulated.

Each schedule is one training of one to five ranks under the stale engine: the real server, coordinator, meetings,
admission and workers on a virtual clock, see ``tests/ranks/stale/simulated``. A seed is all there is to a schedule:
``--replay`` shows what happened in one, message by message.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.kit.figures import Figure, figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from tests.ranks.stale.simulated.cases import case_of
from tests.ranks.stale.simulated.simulation import simulate

PART, QUICK = 1000, 10  # schedules of a case
NOTES = """Failures: schedules in which a sample was applied twice, or never though training ended well; a contribution
was older than the policy's bound; a rank, or the server, had no answer within the schedule's time; a rank ended though
nothing had happened that ends a run, or ended with a cause while another trained to the end. What ends a run: an error
in the user's code, the server's death, or a death before there is a server. Virtual time: what the schedules would have
taken."""


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
    return {f"seeds {part.start} to {part.stop - 1}": partial(measure, part) for part in parts}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    sums = {name: sum((Counter(one[name]) for one in found.values()), Counter[str]()) for name in ("totals", "faults")}
    totals, seconds = sums["totals"], sum(one["seconds"] for one in found.values())
    failed = {seed: words for one in found.values() for seed, words in one["failed"].items()}
    figures = [
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
    return figures, {"ranks by how they ended": dict(sorted(ended.items())), "failed": failed}, NOTES


BENCHMARK = Benchmark(
    name="faults", title="Faults under the stale engine, simulated", repeats=6, cases=cases, report=report
)

if __name__ == "__main__":
    if "--replay" in sys.argv:
        replay(int(sys.argv[sys.argv.index("--replay") + 1]))
    else:
        BENCHMARK.main()
