"""The plans that stay, chosen by the model with the whole scenario known, and the oracle's, one for each state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.joint.courses import CHAIN, EVEN, ORACLE, STATIC, Course, played
from benchmarks.joint.machine import Machine, Phase
from benchmarks.pipeline.models import costs_of
from benchmarks.pipeline.plans import described, even_entries
from lightning_hetero.pipeline.decide.plans import best_plan
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.types import PipelinePlan


class Judged:
    """What the model says of plans in a scenario.

    Args:
        course: the scenario.
    """

    def __init__(self, course: Course) -> None:
        case = course.case
        self.course, self.model = course, costs_of(case.model, case.sample_s, case.fixed_s)
        self._machine = Machine(self.model, case.cluster)
        described_as = [device.speed for device in case.cluster.devices]
        self._states = [
            Phase(start=0.0, slowness=tuple(a / b for a, b in zip(described_as, speeds, strict=True)))
            for speeds in course.states
        ]

    def batch_s(self, plan: PipelinePlan) -> list[float]:
        """Returns the time of a batch in each state [s]."""
        return [self._machine.batch(plan, state).seconds for state in self._states]

    def mean_s(self, plan: PipelinePlan) -> float:
        """Returns the mean time of a batch over the whole scenario, if the plan stays [s]."""
        return _mean(self.course, self.batch_s(plan))


def prepared(course: Course) -> dict[str, Any]:
    """Returns what is to be run, as JSON values.

    *Even* plans are the best of their kind for any of the states; *static* is the best of them, of the planner's plans
    for each state, and of its plan for the first; the *oracle* has the best of all these in each state.

    Returns:
        ``plans``: by contender. ``oracle``: by state. ``modelled_s``: mean batch of the whole scenario, by contender.
        ``made_up_of``: the plans in words.
    """
    judged, case = Judged(course), course.case
    cases = [course.case_in(speeds) for speeds in course.states]
    even: dict[int, list[PipelinePlan]] = {}
    for one in cases:
        for groups, entry in even_entries(one, judged.model).items():
            if entry is not None:
                even.setdefault(groups, []).append(PipelinePlan(groups=entry.groups, total_s=entry.modelled_s))
    chains, evens = even.get(1, []), [plan for plans in even.values() for plan in plans]
    planned = [best_plan(judged.model, one.cluster, case.global_batch) for one in cases]
    every = [*(plan for plan in planned if plan.ok), *evens]
    oracle = [min(every, key=lambda plan: judged.batch_s(plan)[i]) for i in range(len(cases))]
    known = {CHAIN: chains, EVEN: evens, STATIC: every}
    plans = {
        name: min(some, key=judged.mean_s) for name, some in known.items() if some and name in course.contenders
    }
    best_s = [judged.batch_s(plan)[i] for i, plan in enumerate(oracle)]
    return {
        "plans": {name: plan_to_plain(plan) for name, plan in plans.items()},
        "oracle": [plan_to_plain(plan) for plan in oracle],
        "modelled_s": {name: judged.mean_s(plan) for name, plan in plans.items()}
        | {ORACLE: _mean(course, best_s)},
        "made_up_of": {name: described(plan.groups) for name, plan in plans.items()}
        | {ORACLE: [described(plan.groups) for plan in oracle]},
    }


def _mean(course: Course, by_state_s: Sequence[float]) -> float:
    steps = played(course.numbered, course.unit, course.batches, [[seconds] for seconds in by_state_s])
    return sum(steps) / len(steps)
