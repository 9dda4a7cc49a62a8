"""``python -m benchmarks.faults [--schedules N] [--seed S] [--minutes M] [--replay SEED]``: random faults, simulated.

Each schedule is one training of one to five ranks under the stale engine: the real server, coordinator, meetings,
admission and workers on a virtual clock, see ``benchmarks/faults/__init__.py``. Schedule number i has the seed S + i,
and a seed is all there is to a schedule: ``--replay`` shows what happened in one, message by message.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.cases import case_of
from benchmarks.faults.simulation import Outcome, simulate
from benchmarks.report import write_results

_SHOWN = 20  # failures that are worth reading
_NOTES = """Failures: schedules in which a sample was applied twice, or never though training ended well; a contribution
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


def figures(totals: Counter[str], seconds: float, faults: Counter[str], failed: int) -> list[dict[str, Any]]:
    """Returns the figures of a run."""
    rows = [
        ("schedules", totals["schedules"], "1", None),
        ("schedules that failed", failed, "1", "0"),
        ("schedules in which something may end the run", totals["excused"], "1", None),
        ("processor time", seconds, "s", None),
        ("schedules per second of it", totals["schedules"] / seconds, "1/s", None),
        ("events", totals["events"], "1", None),
        ("virtual time", totals["virtual_s"] / 3600, "h", None),
        ("samples applied", totals["applied"], "1", None),
        ("of these on older parameters", totals["stale"], "1", None),
        *((f"faults: {kind}", count, "1", None) for kind, count in sorted(faults.items())),
    ]
    return [
        {"name": name, "value": value, "unit": unit, "goal": goal, "holds": None if goal is None else value == 0}
        for name, value, unit, goal in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long, whatever is left")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show one schedule, and measure nothing")
    said = parser.parse_args()
    torch.set_num_threads(1)
    if said.replay is not None:
        replay(said.replay)
        return
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    totals, faults, ended = Counter[str](), Counter[str](), Counter[str]()
    failed: list[Outcome] = []
    for seed in range(said.seed, said.seed + said.schedules):
        if time.perf_counter() - began_s > 60.0 * said.minutes:
            break
        outcome = simulate(case_of(seed))
        totals.update(schedules=1, excused=outcome.excused, events=outcome.events)
        totals.update(applied=outcome.applied, stale=outcome.stale)
        totals["virtual_s"] += outcome.virtual_s  # type: ignore[assignment]
        faults += outcome.faults
        ended += outcome.ended
        if outcome.violations:
            failed.append(outcome)
            if len(failed) <= _SHOWN:
                print(f"seed {seed}:", *outcome.violations, sep="\n    ", flush=True)
    seconds = time.process_time() - began_cpu_s
    write_results(
        Path(__file__).parent,
        title="Faults under the stale engine, simulated",
        figures=figures(totals, seconds, faults, len(failed)),
        raw={
            "first seed": said.seed,
            "ranks by how they ended": dict(sorted(ended.items())),
            "failed": {str(outcome.seed): list(outcome.violations) for outcome in failed[:_SHOWN]},
        },
        notes=_NOTES,
    )
    if failed:
        again = f"python -m benchmarks.faults --replay {failed[0].seed}"
        sys.exit(f"{len(failed)} schedules failed; {again} shows the first")


if __name__ == "__main__":
    main()
