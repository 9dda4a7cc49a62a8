"""The pipeline engine's estimate: its planner's plan, its schedule's time, and overrides that train so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_hetero
from lightning_hetero.pipeline.decide.plans import best_plan
from lightning_hetero.plan.estimate import Estimate
from lightning_hetero.plan.paste import snippet
from lightning_hetero.plan.pipelines import pipeline
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.solvers.placement import evaluate_plan
from tests.pure.plan.kit import layered, model

pytestmark = pytest.mark.pure
CONF = Path(lightning_hetero.__file__).parent / "cli" / "conf"
SMALL = [{"name": "fast", "mem": 200}, {"name": "slow", "speed": 0.5, "mem": 200}]
BIG_MODEL = model(state_bytes=60.0, activation_bytes=2.0, param_bytes=10.0, output_bytes=1.0)


def test_it_is_the_engines_plan_and_the_time_of_its_schedule() -> None:
    setup = layered(SMALL, {"bandwidth": 1e4}, model=BIG_MODEL)
    found = pipeline(setup)
    planned = best_plan(BIG_MODEL, setup.cluster, 32)
    assert found.plan == planned and len(planned.groups) == 1 and planned.groups[0].ranks == (0, 1)
    assert found.bound_s <= found.step_s <= 1.2 * planned.total_s
    assert sum(found.shares) == pytest.approx(32) and all(0.0 < m <= 200 for m in found.memory_bytes)
    assert any("groups by number of devices: 1 of 2" in reason for reason in found.reasons)


def test_replicas_that_rest_are_said() -> None:
    slow = [{"count": 2}, {"name": "far", "speed": 0.01}]
    found = pipeline(layered(slow, {"bandwidth": 1e4, "latency": "10 ms"}, model=BIG_MODEL))
    assert any("rank 2 (far) rest" in reason for reason in found.reasons)
    assert found.work_s[2] == 0.0 and found.shares[2] == 0.0


def test_a_search_says_what_it_leaves_open() -> None:
    many = pipeline(layered([{"count": 5}, {"name": "slow", "speed": 0.5, "count": 4}], {"bandwidth": 1e9}))
    assert many.plan is not None and many.plan.judged > 0
    gap = 100.0 * (1.0 - many.plan.lower_bound_s / many.plan.total_s)
    (said,) = [reason for reason in many.reasons if "groupings of the devices were compared, not all" in reason]
    assert said.startswith(str(many.plan.judged)) and f"takes up to {gap:.1f} % less" in said
    few = pipeline(layered(SMALL, {"bandwidth": 1e4}))
    assert few.ok and not any("were compared" in reason for reason in few.reasons)


def test_what_no_device_holds_is_refused_with_the_planners_reason() -> None:
    setup = layered([{"mem": 50, "count": 2}], model=BIG_MODEL)
    assert not pipeline(setup).ok and pipeline(setup).reasons[0] == best_plan(BIG_MODEL, setup.cluster, 32).reason
    answer = plan(setup)
    assert answer.chosen is None and answer.verdict.startswith("no engine can train this: ")


@pytest.mark.parametrize("engine", ["ddp", "balanced", "stale", "pipeline"])
def test_the_python_makes_that_strategy(engine: str) -> None:
    setup = layered([{"name": "fast"}, {"name": "slow", "speed": 0.5}], {"bandwidth": 1e6}, model=BIG_MODEL)
    found = next(e for e in plan(setup).estimates if e.engine == engine)
    made: dict[str, Any] = {}
    exec(snippet(found, {"accelerator": "cpu", "logger": False}), made)
    check(made["trainer"].strategy, found, setup)
    assert made["trainer"].num_devices == 2


def check(strategy: Any, found: Estimate, setup: Setup) -> None:
    """It is the strategy of this estimate, with its settings."""
    engine = found.engine
    if engine == "ddp":
        assert type(strategy) is DDPStrategy
    if engine == "pipeline":
        assert found.plan is not None
        given = strategy.plan_settings.plan
        assert [(g.ranks, g.cuts, g.samples, g.micro_batches, g.depths) for g in given.groups] == [
            (g.ranks, g.cuts, g.samples, g.micro_batches, g.depths) for g in found.plan.groups
        ]
        assert evaluate_plan(BIG_MODEL, setup.cluster, given.groups).ok
    if engine != "ddp":
        assert strategy.shared.global_batch_size == 32 and strategy.engine == engine
