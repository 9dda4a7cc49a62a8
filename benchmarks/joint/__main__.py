"""``python -m benchmarks.joint [--quick] [--only WORDS]``: the online controller at work.

Four processes under Lightning on emulated devices that change, at batches and at times; see `courses` for who runs.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from benchmarks.joint.courses import Course, courses
from benchmarks.joint.figures import course_figures, table
from benchmarks.joint.plans import prepared
from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.ranks import launch

NOTES = (
    "Four processes under Lightning train by each contender in turn; emulated devices sleep for the time of their"
    " layers, real work included, and messages, sums of gradients and layers that move take their time on "
    "emulated links (for stock DDP and the balanced engine, which know of no such links, what they do not hide of"
    " their gradients' exchange: `benchmarks/pipeline/exchange.py`). A step lasts from one batch's end on the "
    "slowest rank to the next one's, a migration before it included; the first ones count. The balanced engine, "
    "the shares alone and the controller train every batch of a scenario, with what they have to find out. All "
    "others are the same whenever a state of the devices holds: they are measured for ten batches of each "
    "state, half of them before and half after those runs, and their time for the whole is made up of these; "
    "their starts, and the oracle's moves, cost nothing. *Even*: equal parts of the batch, layers by number or "
    "parameters, the best over the whole scenario by the model. *Best static plan*: of these, and of the "
    "planner's plans for each state, the best over the whole scenario by the model; *oracle*: the best of them "
    "all in each state. In *fast changes* and *heavy migration* what comes is reported as it is."
)


def measure(stem: str, course: Course, quick: bool) -> dict[str, Any]:
    """Returns what was measured of a scenario."""
    plans = prepared(course)
    extent = "quick" if quick else "full"
    found = launch("benchmarks.joint.training", course.case.world_size, stem, extent, json.dumps(plans))
    return _plain({
        "batches": course.batches,
        "unit": course.unit,
        "states": course.states,
        "phases": course.numbered,
        "modelled_s": plans["modelled_s"],
        "made_up_of": plans["made_up_of"],
        "measured": found,
    })  # fmt: skip


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each scenario."""
    return {stem: partial(measure, stem, course, quick) for stem, course in courses(quick).items()}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    every = courses()
    figures = [figure for stem, one in found.items() for figure in course_figures(every[stem], one)]
    titles = {stem: course.case.name for stem, course in every.items()}
    return figures, found, f"{NOTES}\n\n{table(titles, found)}"


def _plain(value: Any) -> Any:
    """Returns JSON values without numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


BENCHMARK = Benchmark(
    name="joint", title="The online controller: devices that change under a pipeline", repeats=1, cases=cases,
    report=report,
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
