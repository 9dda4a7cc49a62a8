"""Whether plans keep what they promise: makespan of the generated schedule over the time the planner modelled."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.planning.cases import Case, large_case, small_case
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.solvers.placement import place

NOTES = (
    "Random models are planned, the plans' times are taken apart operation by operation, and schedules with the plans' "
    "depths are generated: makespan / modelled time, by pipeline of two stages or more. *small*: 2-5 devices, 12 "
    "layers, 32 samples, slow links, uneven last micro-batches; *large*: 16 devices in islands, 100 layers. *caps*: a "
    "device's memory holds 30-120 % of the model, or a quarter, so that fewer may be in flight than links ask for."
)
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    ", caps": {"capped": True},
    ", caps, low memory": {"capped": True, "depth": "low_memory"},
}

Raw = dict[str, list[float]]


def measure(quick: bool = False) -> Raw:
    """Returns every ratio by the name of its case."""
    raw: Raw = {}
    for row, (kind, options) in enumerate(KINDS.items()):
        plain = {name: value for name, value in options.items() if name != "capped"}
        capped = "capped" in options
        rng = np.random.default_rng([5, row])
        small = [
            small_case(rng, int(rng.integers(2, 6)), 12, sync=0.02, capped=capped, samples=32)
            for _ in range(8 if quick else 40)
        ]
        large = [large_case(rng, 16, 100, fits=0.25 if capped else np.inf) for _ in range(1 if quick else 4)]
        for name, cases in (("small", small), ("large", large)):
            raw[f"{name}{kind}"] = [ratio for case in cases for ratio in ratios(case, **plain)]
    return raw


def ratios(case: Case, **options: Any) -> list[float]:
    """Returns makespan / modelled time of each pipeline of two stages or more in the best plan with a single group.

    None where no such plan fits, or one device alone is better.
    """
    plan = place(case.model, case.cluster, case.samples, max_groups=1, **options)
    found: list[float] = []
    for group in plan.groups:
        if len(group.ranks) > 1:
            times = times_of(case.model, case.cluster, group)
            policy = SchedulePolicy(depths=group.depths)
            found.append(makespan_s(times, policy) / group.total_s)
    return found


def figures(raw: Raw) -> list[dict[str, Any]]:
    """Returns the table: median and maximum by case; a plan should not promise too much by more than a tenth."""
    table: list[dict[str, Any]] = []
    for case, values in raw.items():
        if values:
            for name, value, limit in (
                ("median", statistics.median(values), 1.0),
                ("max", max(values), 1.1),
            ):
                row = {"name": f"{case}, {name} of {len(values)}", "value": round(value, 4), "unit": "x model"}
                table.append({**row, "goal": f"<= {limit:g}", "holds": round(value, 4) <= limit})
    return table


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and returns the figures.

    Args:
        quick: fewer cases (seconds).
    """
    return figures(measure(quick))
