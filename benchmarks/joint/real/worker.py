"""One rank of one scenario; started by torchrun, writes what it measured as JSON on rank 0.

All contenders run in turns within one group of processes, so that a busy machine slows all of them alike: those that do
not answer changes for some batches of each state, before those that do and after them.

``torchrun ... -m benchmarks.joint.real.worker SCENARIO quick|full PREPARED RESULT``
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.joint.real.courses import ORACLE, REACTING, Course, courses
from benchmarks.joint.real.training import train
from lightning_hetero.solvers.plans import plan_from_plain

TURNS, STEPS = 2, 6  # of those that do not answer changes: turns, and measured batches of each state in a turn
SKIPPED = 1  # batches of a state that do not count before them; of a run, besides, as many as of a state


def steady(name: str, course: Course, prepared: dict[str, Any], steps: int) -> dict[str, Any]:
    """Runs a contender that does not answer changes; returns its step times by state."""
    if name == ORACLE:
        found = [
            _run(name, course, [speeds], steps, plan=plan)
            for speeds, plan in zip(course.states, prepared["oracle"], strict=True)
        ]
        return {"by_state_s": [one["by_state_s"][0] for one in found], "taken": max(one["taken"] for one in found)}
    return _run(name, course, course.states, steps, plan=prepared["plans"].get(name))


def _run(name: str, course: Course, states: list[tuple[float, ...]], steps: int, *, plan: Any) -> dict[str, Any]:
    each = steps + SKIPPED
    scenario = course.steady([states[0], *states], each)  # the first one again, for the warm-up
    gc.collect()
    found = train(
        name,
        course,
        scenario,
        batches=each * (len(states) + 1),
        cluster=course.case_in(states[0]).cluster,
        plan=None if plan is None else plan_from_plain(plan),
    )
    times = found["steps_s"][each:]
    by_state = [times[i * each + SKIPPED : (i + 1) * each] for i in range(len(states))]
    return {"by_state_s": by_state, "taken": found["taken"]}


def compare(course: Course, prepared: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Runs all contenders; returns what was measured, by contender."""
    found: dict[str, Any] = {}
    for turn in range(1 if quick else TURNS):
        if turn == 1 or quick:
            for name in (name for name in course.contenders if name in REACTING):
                gc.collect()
                found[name] = train(name, course, course.scenario, batches=course.batches)
        for name in (name for name in course.contenders if name not in REACTING):
            more = steady(name, course, prepared, STEPS)
            before = found.setdefault(name, {"by_state_s": [[] for _ in course.states], "taken": 0.0})
            before["by_state_s"] = [a + b for a, b in zip(before["by_state_s"], more["by_state_s"], strict=True)]
            before["taken"] = max(before["taken"], more["taken"])
    return {name: found[name] for name in course.contenders}


def main() -> None:
    stem, quick = sys.argv[1], sys.argv[2] == "quick"
    prepared, path = json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # Lightning keeps an existing group
    found = compare(courses(quick)[stem], prepared, quick)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
