"""Part *real*: processes under Lightning on emulated devices that change; see `courses` for who runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.joint.real import figures as made
from benchmarks.joint.real.courses import Course, courses
from benchmarks.joint.real.plans import prepared

NOTES = (
    "Four processes under Lightning train by each contender in turn; emulated devices sleep for the time of their"
    " layers, real work included, and messages, sums of gradients and layers that move take their time on "
    "emulated links (for stock DDP and the balanced engine, which know of no such links, what they do not hide of"
    " their gradients' exchange: `benchmarks/pipeline/exchange.py`). A step lasts from one batch's end on the "
    "slowest rank to the next one's, a migration before it included; the first ones count. The balanced engine, "
    "the shares alone and the controller train every batch of a scenario, with what they have to find out. All "
    "others are the same whenever a state of the devices holds: they are measured for twelve batches of each "
    "state, half of them before and half after those runs, and their time for the whole is made up of these; "
    "their starts, and the oracle's moves, cost nothing. *Even*: equal parts of the batch, layers by number or "
    "parameters, the best over the whole scenario by the model. *Best static plan*: of these, and of the "
    "planner's plans for each state, the best over the whole scenario by the model; *oracle*: the best of them "
    "all in each state. In *fast changes* and *heavy migration* what comes is reported as it is."
)


def measure(quick: bool) -> dict[str, dict[str, Any]]:
    """Returns what was measured, by scenario."""
    found: dict[str, dict[str, Any]] = {}
    for stem, course in courses(quick).items():
        plans = prepared(course)
        found[stem] = {
            "batches": course.batches,
            "unit": course.unit,
            "states": course.states,
            "phases": course.numbered,
            "modelled_s": plans["modelled_s"],
            "made_up_of": plans["made_up_of"],
            "load_before": os.getloadavg()[0],
            "measured": launch(stem, course, plans, quick),
        }
    return found


def launch(stem: str, course: Course, plans: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    """Runs one scenario's group of ranks under torchrun and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "plans.json", Path(folder) / "result.json"
        given.write_text(json.dumps(plans))
        ranks = f"--nproc-per-node={course.case.world_size}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
        command += ["-m", "benchmarks.joint.real.worker", stem, "quick" if quick else "full", str(given), str(result)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return _plain(json.loads(result.read_text()))


def figures(raw: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the figures of all scenarios."""
    every = courses()
    return [figure for stem, one in raw.items() for figure in made.course_figures(every[stem], one)]


def table(raw: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns all contenders' times."""
    return made.table({stem: course.case.name for stem, course in courses().items()}, raw)


def _plain(value: Any) -> Any:
    """Returns JSON values without numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
