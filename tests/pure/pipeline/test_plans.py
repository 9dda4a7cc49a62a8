"""Plans as plain values, as text, and checked against a model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.cluster import equal_cluster, override_cluster
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.decide.costs import times_of, work_s
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate
from lightning_hetero.pipeline.decide.plans import best_plan, check_plan, describe_plan, emulated, resting, unit_costs
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.plans import plan_from_plain, plan_to_plain, replicas
from lightning_hetero.types import Cluster, GroupPlan, PipelinePlan, Status
from tests.pure.pipeline.schedule_kit import execute

DEPTH_RULES: tuple[DepthRule, ...] = ("per_link", "low_memory")

PLAIN: dict[str, Any] = {
    "groups": [
        {"ranks": [2, 0], "cuts": [0, 2, 6], "samples": 11, "micro_samples": 3, "depths": [3, 2]},
        {"ranks": [1], "cuts": [0, 6], "micro_batches": [5]},
    ],
    "total_s": 0.25,
    "sync_s": 0.01,
}


def test_a_plan_survives_json() -> None:
    plan = plan_from_plain(PLAIN)
    assert plan.groups[0].micro_batches == (3, 3, 3, 2) and plan.groups[0].depths == (3, 2)
    assert plan.groups[1].depths == (1,) and math.isnan(plan.groups[1].total_s)
    plain = json.loads(json.dumps(plan_to_plain(plan), allow_nan=False))
    assert plan_to_plain(plan_from_plain(plain)) == plain
    assert plan_from_plain(plan) is plan


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"groups": []}, ValueError, "list of one or more groups"),
        ({"group": 1}, ValueError, r"unknown keys \['group'\]"),
        ({"groups": [3]}, TypeError, "must be a mapping"),
        ({"groups": [{"ranks": [0]}]}, ValueError, r"lacks \['cuts'\]"),
        ({"groups": [{"ranks": [0], "cuts": [0, 2]}]}, ValueError, "lacks micro_batches, or samples"),
        ({"groups": [{"ranks": [0], "cuts": [0, 2], "size": 3}]}, ValueError, r"unknown keys \['size'\]"),
        ({"groups": [{"ranks": [0], "cuts": [0, 2], "samples": 4, "micro_samples": -1}]}, ValueError, "must be >= 1"),
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan_from_plain({**PLAIN, **change})


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"cuts": (0, 3, 5)}, "from 0 to 6, the number of layers"),
        ({"cuts": (0, 6)}, "must be 3 rising numbers"),
        ({"cuts": (0, 6, 6)}, "rising numbers"),
        ({"micro_batches": (4, 4)}, "add up to 16"),
        ({"depths": (1,)}, "one per rank"),
        ({"ranks": (0, 4)}, r"different ones of 0\.\.3"),
        ({"samples": 8, "micro_batches": (8,)}, "divides 8 samples, but the global batch has 16"),
    ],
)
def test_a_plan_for_something_else_is_refused(group: dict[str, Any], words: str) -> None:
    good = {"ranks": (0, 1), "cuts": (0, 3, 6), "samples": 16, "micro_batches": (8, 8), "depths": (2, 2)}
    check_plan(PipelinePlan(groups=(GroupPlan(**good),)), layers=6, ranks=4, global_batch=16)
    with pytest.raises(ValueError, match=words):
        check_plan(PipelinePlan(groups=(GroupPlan(**{**good, **group}),)), layers=6, ranks=4, global_batch=16)


def test_no_plan_says_why() -> None:
    plan = PipelinePlan(groups=(), status=Status.INFEASIBLE, reason="layer 3 fits no device")
    with pytest.raises(ValueError, match="layer 3 fits no device"):
        check_plan(plan, layers=6, ranks=4)


def test_replicas_and_who_rests() -> None:
    plan = replicas(6, [4, 0, 2])
    assert [(g.ranks, g.samples) for g in plan.groups] == [((0,), 4), ((2,), 2)]
    assert resting(plan, 4) == (1, 3)
    check_plan(plan, layers=6, ranks=4, global_batch=6)


def test_the_description_names_devices_layers_and_times() -> None:
    text = describe_plan(plan_from_plain(PLAIN), equal_cluster(3), [f"net.{i}" for i in range(6)])
    first, second, last = text.splitlines()
    assert first.startswith("group 0: 11 samples in 4 x 3 (last 2); rank 2 (")
    assert "net.0..net.1 -> rank 0" in first and first.endswith("net.2..net.5")
    assert second.startswith("group 1: 5 samples in 1 x 5; rank 1")
    assert last == "modelled: 250.0 ms per global batch, 10.0 ms of it to synchronise"
    cluster = equal_cluster(5)
    idle = describe_plan(plan_from_plain(PLAIN), cluster).splitlines()[2]
    assert idle == f"idle: rank 3 ({cluster.devices[3].name}), rank 4 ({cluster.devices[4].name})"


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (2, 0, 1)])
def test_several_calls_of_the_backbone_are_further_stages_on_the_same_devices(ranks: tuple[int, ...]) -> None:
    cuts = (0, *range(1, len(ranks)), 6)
    group = GroupPlan(ranks=ranks, cuts=cuts, samples=4, micro_batches=(2, 1, 1), depths=(3,) * len(ranks))
    once, twice = (times_of(unit_costs([f"{i}" for i in range(6)]), equal_cluster(3), group, n) for n in (1, 2))
    assert twice.stages == 2 * once.stages and twice.devices == once.devices * 2
    schedule = generate(twice, SchedulePolicy(depths=(3,) * twice.stages))
    execute(schedule, seed=0)
    assert sum(op.kind.value == "F" for ops in schedule.operations for op in ops) == 3 * twice.stages


def capped(ranks: int, mem_bytes: float) -> Cluster:
    devices = equal_cluster(ranks).devices
    return replace(equal_cluster(ranks), devices=tuple(replace(device, mem_bytes=mem_bytes) for device in devices))


def test_the_best_plan_keeps_spans_together_and_leaves_no_single_sample() -> None:
    model = unit_costs("abcdef", [4.0] * 6)
    cluster = capped(2, 20.0)  # a device cannot hold all of it
    plan = best_plan(model, cluster, 9, spans=[(1, 3)], micro_batch_size=4)
    check_plan(plan, layers=6, ranks=2, global_batch=9)
    (group,) = plan.groups
    assert group.cuts[1] in (1, 4, 5) and group.micro_batches == (4, 3, 2)


def test_the_best_plan_is_the_better_one_of_both_depth_rules_where_memory_is_short() -> None:
    model = unit_costs("abcdef", [4.0] * 6)
    model = replace(model, layers=tuple(replace(layer, activation_bytes=2.0) for layer in model.layers))
    for mem_bytes in (math.inf, 60.0, 45.0, 40.0):
        cluster = capped(2, mem_bytes)
        found = best_plan(model, cluster, 8, micro_batch_size=1)
        times_s = [best_plan(model, cluster, 8, micro_batch_size=1, depth=rule).total_s for rule in DEPTH_RULES]
        assert found.total_s == (times_s[0] if mem_bytes == math.inf else min(times_s))


def test_no_plan_is_a_status() -> None:
    plan = best_plan(unit_costs("ab", [8.0, 8.0]), capped(2, 1.0), 4)
    assert not plan.ok and plan.reason


def test_emulated_costs_are_the_scenarios_in_the_measured_proportions() -> None:
    model = unit_costs("abc", [1.0, 2.0, 3.0])
    scenario = Scenario(speeds=[1.0], step_s=0.5, sample_s=0.1)
    found = emulated(model, scenario)
    costs = [cost for layer in found.layers for cost in (layer.forward, layer.backward)]
    assert sum(cost.seconds(7) for cost in costs) == pytest.approx(0.5 + 7 * 0.1)
    assert costs[3].seconds(7) / costs[0].seconds(7) == pytest.approx(4.0)  # twice as large, and backward


def test_own_work_is_each_stages_share_at_its_devices_speed() -> None:
    model = unit_costs("abcd")
    plan = plan_from_plain({"groups": [{"ranks": [1, 0], "cuts": [0, 1, 4], "samples": 6, "micro_samples": 2}]})
    cluster = override_cluster(equal_cluster(3), speeds=[1.0, 0.5, 1.0])
    assert work_s(plan, model, cluster, ranks=3) == (3 * 3 * 6, 3 * 6 / 0.5, 0.0)
    assert all(map(math.isnan, work_s(plan, None, cluster, ranks=3)))
