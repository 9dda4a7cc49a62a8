"""``python -m benchmarks.auto [--quick] [--repeats N] [--only WORDS]``: `AutoStrategy` against the best of the engines.

Emulated devices, whole trainings in turns, timed from `fit` on: set-up, trial and planning count. *best* is the engine
whose median run is the shortest, which nobody knows beforehand. *predicted / measured* is the step of the engine that
was taken, as its line says it, and as it came behind the first ten.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from functools import partial
from typing import Any

from benchmarks.auto.cases import CASES, QUICK, Case
from benchmarks.kit.figures import SETTLED, TAKEN, Figure, figure, markdown, named, paired
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.ranks import launch

TO_BEST, WITHIN = 1.05, 0.15
STEPS, QUICK_STEPS = 150, 25
NOTES = (
    f" steps of each training, {SETTLED} of which count for no step. Work is emulated and includes the real"
    " forward and backward; four ranks, or two, on the cores named below, gloo. *slow link*: links of 5 MB/s are"
    " emulated, between stages and as the time of sums of gradients, and told to who measures them; the stale engine is"
    " left out, as its messages on one machine cross no link that could be slow."
)


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case: runs by engine, one per repeat."""

    def measure(case: Case) -> dict[str, Any]:
        setting = {"case": case.name, "repeats": repeats, "steps": QUICK_STEPS if quick else STEPS}
        return launch("benchmarks.auto.worker", case.ranks, json.dumps(setting))

    return {case.name: partial(measure, case) for case in CASES if not quick or case.name in QUICK}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes; of several repeats medians, of ratios of the same repeat."""
    figures: list[Figure] = []
    rows: list[list[Any]] = []
    for case, runs in found.items():
        put = named(case)
        values = {(e, key): [run[key] for run in one] for e, one in runs.items() for key in one[0]}
        middle = {key: statistics.median(of) for key, of in values.items() if isinstance(of[0], float)}
        best = min((e for e in runs if e != "auto"), key=lambda e: middle[e, "whole_s"])
        ratio = paired(values["auto", "whole_s"], values[best, "whole_s"])
        said = paired(values["auto", "predicted_s"], values["auto", "step_s"])
        took = ", ".join(f"{name} {n}x" for name, n in Counter(values["auto", "took"]).items())
        rows.append([case, took, best, middle["auto", "whole_s"], middle[best, "whole_s"], ratio, said])
        figures.append(put("auto / best engine, whole run", ratio, "x", most=TO_BEST))
        figures.append(put("step, predicted / measured", said, "x", within=WITHIN))
        for engine in runs:
            figures.append(put(f"{engine}, whole run", middle[engine, "whole_s"], "s"))
            figures.append(put(f"{engine}, set-up", middle[engine, "set_up_s"], "s"))
            figures.append(put(f"{engine}, step", 1e3 * middle[engine, "step_s"], "ms"))
        taken = max(max(values[engine, "taken"]) for engine in runs)
        figures.append(put("emulated work, taken / asked, greatest of all engines", taken, "x", most=TAKEN))
    close = sum(row[5] <= TO_BEST for row in rows)
    figures.append(figure("cases within 5 % of the best engine", float(close), f"of {len(rows)}", least=len(rows)))
    head = ["devices", "taken", "best engine", "whole run, auto [s]", "best [s]", "auto / best", "predicted / measured"]
    return figures, found, f"{QUICK_STEPS if quick else STEPS}{NOTES}\n\n{markdown(head, rows)}"


BENCHMARK = Benchmark(name="auto", title="An engine chosen for you", repeats=1, cases=cases, report=report)

if __name__ == "__main__":
    BENCHMARK.main()
