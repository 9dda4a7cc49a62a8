"""`Setup`: what it computes is what solvers compute, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_hetero.plan.setup import whole_step
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.types import AffineCost, GroupPlan
from tests.pure.plan.kit import layered, lines, model

pytestmark = pytest.mark.pure
DEVICES = [{"name": "fast", "count": 2, "mem": 1000}, {"name": "slow", "speed": 0.5, "mem": 400}]
LINK = {"bandwidth": 1e6, "latency": "1 ms"}


def test_a_step_of_replicas_is_what_the_placement_solver_says_of_them() -> None:
    setup = layered(DEVICES, LINK, model=model(step_s=6e-3, param_bytes=1e3), global_batch=12)
    assert setup.model is not None
    planned = evaluate_plan(setup.model, setup.cluster, replicas(4, (4, 4, 4)).groups)
    assert max(cost.seconds(4) for cost in setup.step_costs()) + setup.exchange() == pytest.approx(planned.total_s)
    assert setup.exchange() == pytest.approx(planned.sync_s) and planned.sync_s > 0.0
    assert whole_step(setup.model).seconds(4) == pytest.approx(6e-3 + 4 * 3e-3)


def test_what_memory_holds_is_where_the_placement_solver_begins_to_refuse() -> None:
    setup = layered(DEVICES, model=model(state_bytes=30.0, activation_bytes=7.0))
    most = setup.most_samples()
    assert most == (31, 31, 10) and setup.memory_bytes(10) == 120 + 280
    for rank, n in enumerate(most):
        for samples, ok in ((n, True), ((n or 0) + 1, False)):
            group = GroupPlan(ranks=(rank,), cuts=(0, 4), samples=samples, micro_batches=(samples,), depths=(1,))
            assert evaluate_plan(setup.model, setup.cluster, [group]).ok is ok  # type: ignore[arg-type]


def test_an_exchange_that_is_given_holds_and_one_device_has_none() -> None:
    assert layered(DEVICES, LINK, exchange_s=0.5).exchange() == 0.5
    assert layered([{}], LINK, exchange_s=0.5).exchange() == 0.0


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"global_batch": 0}, ValueError, "global_batch=0 must be a whole number >= 1"),
        ({"global_batch": 2.0}, ValueError, "global_batch=2.0 must be a whole number"),
        ({"costs": ()}, ValueError, "neither model nor costs are given"),
        ({"costs": (1.0,) * 4}, TypeError, "must be lines"),
        ({"costs": (AffineCost(fixed_s=0.0, per_sample_s=1.0),)}, ValueError, "costs has 1 entries; give one per"),
        ({"own_s": -1.0}, ValueError, r"own_s=-1.0 must be a finite number >= 0"),
        ({"exchange_s": math.nan}, ValueError, "exchange_s=nan must be"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lines(**more)
