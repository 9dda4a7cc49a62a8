"""Rules for late contributions: what a step of each comes to, by hand, and that today's is the benchmark's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.late_weights.rules import TODAY, LateLearner, Rule
from benchmarks.stale.cases import CASES, COSTS, JitteredWork
from benchmarks.stale.learning import RECIPES, Learner, Training
from benchmarks.stale.simulated import ENDS
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Flexible
from lightning_hetero.stale.decide.simulate.simulator import simulate

pytest.importorskip("sklearn")
EDGE = RECIPES["MLP at the edge, momentum"]
FRESH, LATE = 48, 16  # samples, of 64


def test_todays_rule_is_what_the_simulated_half_trains() -> None:
    case = next(c for c in CASES if c.name == "spells")
    learners: list[Learner] = [Learner(EDGE, 3), LateLearner(EDGE, 3, TODAY)]
    trace = simulate(
        Coordinator(Flexible(), workers=range(4)),
        JitteredWork(case.build(3), 4, 0.0, 3),
        workers=range(4),
        epochs=[ENDS] * 2,
        costs=COSTS,
        hooks=Training(learners, 3),
    )
    assert max(trace.staleness) > 0, "nothing was late"
    np.testing.assert_allclose(learners[1].weights, learners[0].weights, rtol=2e-3, atol=2e-5)


def moved(rule: Rule, *, fresh: float, late: float, staleness: int) -> tuple[float, float]:
    """Returns by how much the first weight and its momentum move, in learning rates.

    Mean gradients of 48 fresh samples and of 16 late ones are ``fresh`` and ``late`` in the first entry, else 0.
    """
    learner = LateLearner(EDGE, 0, rule)
    before = learner.weights.copy()

    def gradient_of(value: float) -> Any:
        gradient = np.zeros_like(before)
        gradient[0] = value
        return lambda weights, images, labels: (0.0, gradient)

    learner.take(1)
    learner.steps += staleness
    learner.take(2)
    for lease, samples, value in ((2, FRESH, fresh), (1, LATE, late)):
        learner.gradient = gradient_of(value)  # type: ignore[method-assign]
        learner.give(lease, np.zeros((samples, 64), np.float32), np.zeros(samples, np.int64), 1.0)
    learner.step(FRESH + LATE, 1.0, True)
    return float(before[0] - learner.weights[0]) / EDGE.lr, float(learner.first[0])


@pytest.mark.parametrize(
    ("rule", "weight", "momentum"),
    [
        (TODAY, 0.75 + 0.5, 0.75 + 0.5),  # (48 * 1 + 16 * 2) / 64
        (Rule(name="", age=0.5), 56 / 52, 56 / 52),  # two versions: a quarter of 16 samples
        (Rule(name="", age=0.5, divide="greater"), 56 / 64, 56 / 64),
        (Rule(name="", age=0.0), 1.0, 1.0),
        (Rule(name="", age=0.0, divide="greater"), 0.75, 0.75),
        (Rule(name="", into="weights"), 1.25, 0.75),
        (Rule(name="", into="catch-up"), 0.75 + 0.5 * (1 + 0.9 + 0.81), 0.75 + 0.5 * 0.81),
        (Rule(name="", cap=0.25), 0.75 * 1.25, 0.75 * 1.25),
        (Rule(name="", agree=True), 1.25, 1.25),
    ],
    ids=str,
)
def test_a_step_by_hand(rule: Rule, weight: float, momentum: float) -> None:
    found = moved(rule, fresh=1.0, late=2.0, staleness=2)
    assert found == (pytest.approx(weight, rel=1e-4), pytest.approx(momentum, rel=1e-4))


def test_what_disagrees_does_not_count() -> None:
    rule = Rule(name="", agree=True, divide="greater")
    assert moved(rule, fresh=1.0, late=-2.0, staleness=1)[1] == pytest.approx(0.75)
    assert math.isclose(moved(TODAY, fresh=1.0, late=-2.0, staleness=1)[1], 0.25, rel_tol=1e-4)
