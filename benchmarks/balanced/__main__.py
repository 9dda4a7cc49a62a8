"""``python -m benchmarks.balanced [--quick] [--repeats N] [--only WORDS]``: the balanced engine's claims, measured.

Figures, all of them ratios within one run:

- *ideal*: the global batch over the sum of the devices' speeds, fixed costs included, fractional samples allowed.
- *step*: median of the steady ones, from the tenth on and before a swap; their mean where slow spells come and go.
- *gross* = ideal / measured step. *net* takes off what a step of stock DDP costs beyond its own theory (framework,
  gradient exchange), because every engine pays that.
- *time saved* = 1 - our step / DDP's step; *whole run*: of all steps, those included in which shares are not right yet.
- *steps to 5 %*: steps after the start or the swap until the shares in use are within 5 % of the ideal three times
  in a row, counted from the samples each rank really got.
- *3, 10, 30 ms steps*: what a step of stock DDP takes, all in all, on these ranks; the emulated work is fitted to it.
- *busy loops*: real work, nothing emulated, beside programs on one rank's core; see `contention`.
- *predictors*: simulated, see `predictors`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.balanced import contention, predictors
from benchmarks.balanced.cases import contended, equal_cases, unequal_cases
from benchmarks.balanced.figures import equal_figures, summarize
from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.ranks import launch

NOTES = (
    "Compute is emulated by sleeping, real work included, in proportion to samples, so that more devices than cores"
    " run truthfully; everything else (Lightning, DDP, gloo, data loading) is real. The 1/8 device needs"
    " min_samples=1: the default keeps every rank above a quarter of the equal share. Python's garbage is"
    " collected before every run, of every engine."
)
QUICK = ("4 ranks 1:1:1/2:1/4", "CNN, two busy loops, all the time")
PREDICTORS = "predictors"


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case."""
    found: dict[str, Any] = {}
    for case in (*unequal_cases(), *equal_cases(), *contended()):
        if not quick or case.name in QUICK:
            found[case.name] = partial(
                launch, "benchmarks.balanced.worker", case.world_size, case.name, repeats, "quick" if quick else "full"
            )
    return {**found, PREDICTORS: partial(predictors.measure, quick)}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    figures: list[Figure] = []
    raw: Raw = {}
    for case in unequal_cases():
        if case.name in found:
            figures += summarize(case.quick() if quick else case, found[case.name])
            raw.setdefault(f"{case.world_size} ranks", {}).setdefault("cases", {})[case.name] = found[case.name]
    for equal in equal_cases():
        if equal.name in found:
            figures += equal_figures(equal, found[equal.name])
            ranks = raw.setdefault(f"{equal.world_size} ranks", {"cases": {}})
            ranks.setdefault("equal", {})[equal.name] = found[equal.name]
    notes = [NOTES]
    if busy := {case.name: found[case.name] for case in contended() if case.name in found}:
        raw["busy"] = busy
        figures += contention.figures(busy)
        notes += [contention.NOTES, contention.table(busy)]
    if PREDICTORS in found:
        raw[PREDICTORS] = found[PREDICTORS]
        figures += predictors.figures(found[PREDICTORS])
        notes += [predictors.NOTES, predictors.table(found[PREDICTORS])]
    return figures, raw, "\n\n".join(notes)


BENCHMARK = Benchmark(name="balanced", title="Balanced engine (LB-BSP)", repeats=3, cases=cases, report=report)

if __name__ == "__main__":
    BENCHMARK.main()
