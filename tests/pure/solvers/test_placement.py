"""Plans against brute force over everything, and what must come out right whatever the search does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.solvers.chain.chain import chain_of
from lightning_hetero.solvers.chain.model import evaluate as evaluate_chain
from lightning_hetero.solvers.placement import evaluate_plan, place
from lightning_hetero.types import AffineCost, Cluster, Device, GroupPlan, LayerCost, Link, ModelCost, PipelinePlan
from tests.pure.solvers.brute_force import BruteForce
from tests.pure.solvers.drawn_cases import Case, large_case, small_case

SIZES = (1, 2, 3, 4, 6, 8, 12)
FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
ENDS = LayerCost(name="ends", forward=FREE, backward=FREE)


def work(per_sample_s: float, **bytes_: float) -> LayerCost:
    return LayerCost(
        name="layer", forward=FREE, backward=AffineCost(fixed_s=0.0, per_sample_s=per_sample_s), **bytes_
    )


def model_of(*layers: LayerCost) -> ModelCost:
    return ModelCost(layers=layers, before=ENDS, head=ENDS)


def cluster_of(*devices: Device, link: Link | None = None) -> Cluster:
    n = len(devices)
    return Cluster(devices=devices, links=tuple((link or Link(),) * n for _ in range(n)))


def check(case: Case, plan: PipelinePlan, **options: Any) -> None:
    """A plan is whole, and its numbers are the model's."""
    assert plan.ok, plan.reason
    used = [rank for group in plan.groups for rank in group.ranks]
    assert len(set(used)) == len(used)
    assert sum(group.samples for group in plan.groups) == case.samples
    for group in plan.groups:
        assert group.cuts[0] == 0 and group.cuts[-1] == len(case.model.layers)
        assert len(group.cuts) == len(group.ranks) + 1 == len(group.depths) + 1
        assert all(a < b for a, b in zip(group.cuts, group.cuts[1:], strict=False))
        assert sum(group.micro_batches) == group.samples
    again = evaluate_plan(case.model, case.cluster, plan.groups, **options)
    assert plan == replace(again, lower_bound_s=plan.lower_bound_s, judged=plan.judged)
    assert plan.lower_bound_s <= plan.total_s


# ---- the model ----------------------------------------------------------------------------------------------


def test_a_plan_by_hand() -> None:
    # Two pipelines of two devices with other borders, so three tuples of owners: layer 0, layer 1, layer 2 and 3.
    model = model_of(
        work(1.0, param_bytes=10.0),
        work(1.0, param_bytes=20.0),
        work(1.0, param_bytes=30.0),
        work(1.0, param_bytes=0.0),
    )
    model = replace(model, before=replace(ENDS, param_bytes=6.0), head=replace(ENDS, param_bytes=4.0))
    cluster = cluster_of(
        *[Device(name=f"{i}") for i in range(4)], link=Link(bandwidth_bytes_per_s=10.0, latency_s=1.0)
    )
    groups = [
        GroupPlan(ranks=(0, 1), cuts=(0, 1, 4), samples=5, micro_batches=(2, 2, 1), depths=()),
        GroupPlan(ranks=(2, 3), cuts=(0, 2, 4), samples=4, micro_batches=(4,), depths=()),
    ]
    plan = evaluate_plan(model, cluster, groups)
    # Group 0, micro-batches of 2: stages 2 and 6 s, four crossings of 1 s (of nothing, latency only). Fill 12, then a
    # period of 6 and one of 3. Group 1: 8 + 8 + 4.
    assert [group.total_s for group in plan.groups] == [21.0, 20.0]
    # All-reduce of b bytes by two: b / 10 + 2 latencies. (0, 2): 10 of the leaders + 10: 4 s. (1, 2): 20: 4 s.
    # (1, 3): 30 + 0: 5 s. Device 1 has the last two.
    assert plan.sync_s == pytest.approx(9.0)
    assert plan.total_s == pytest.approx(30.0)
    assert (
        plan.groups[0].depths
        == evaluate_chain(
            chain_of(model, cluster, (0, 1), micro_samples=2, micro_batches=3), (0, 1, 4)
        ).depths
    )


def test_a_plan_that_does_not_fit_names_group_and_stage() -> None:
    model = model_of(*[work(1.0, state_bytes=1.0)] * 4)
    cluster = cluster_of(Device(name="a"), Device(name="b", mem_bytes=2.5), Device(name="c"))
    groups = [
        GroupPlan(ranks=(2,), cuts=(0, 4), samples=1, micro_batches=(1,), depths=()),
        GroupPlan(ranks=(0, 1), cuts=(0, 1, 4), samples=1, micro_batches=(1,), depths=()),
    ]
    plan = evaluate_plan(model, cluster, groups)
    assert not plan.ok and plan.groups == () and plan.total_s == math.inf
    assert plan.reason.startswith("group 1: stage 1, layers 1 to 3, needs 3.0 B at least, against 2.5 B of 'b'")


# ---- against brute force ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capped", [False, True], ids=["roomy", "capped"])
@pytest.mark.parametrize("sync", [0.02, 0.2, 1.0], ids=["light", "medium", "heavy"])
@pytest.mark.parametrize(("devices", "layers", "seeds"), [(3, 7, 4), (4, 6, 1)])
@pytest.mark.short("medium")
def test_the_mean_gap_to_brute_force_is_below_half_a_percent(
    devices: int, layers: int, seeds: int, sync: float, capped: bool
) -> None:
    gaps: list[float] = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, devices])
        case = small_case(rng, devices, layers, sync=sync, capped=capped)
        sizes = [size for size in SIZES if size <= case.samples]
        best_s, _ = BruteForce(case.model, case.cluster, case.samples, sizes).best()
        plan = place(case.model, case.cluster, case.samples, micro_samples=sizes)
        if best_s == math.inf:
            assert not plan.ok and plan.reason
            continue
        check(case, plan)
        assert plan.lower_bound_s <= best_s * (1.0 + 1e-9)
        assert best_s * (1.0 - 1e-9) <= plan.total_s <= 1.05 * best_s
        gaps.append(plan.total_s / best_s - 1.0)
    assert sum(gaps) <= 0.005 * len(gaps), gaps


@settings(max_examples=25)
@given(data=st.data())
def test_within_two_percent_of_brute_force_for_drawn_options(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sync, capped = data.draw(st.sampled_from([0.0, 0.1, 0.5])), data.draw(st.booleans())
    case = small_case(
        rng, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), sync=sync, capped=capped
    )
    sizes = sorted(data.draw(st.sets(st.integers(1, case.samples), min_size=1, max_size=3)))
    options: dict[str, Any] = {
        "depth": data.draw(st.sampled_from(["per_link", "low_memory"])),
    }
    best_s, _ = BruteForce(case.model, case.cluster, case.samples, sizes, **options).best()
    plan = place(case.model, case.cluster, case.samples, micro_samples=sizes, **options)
    assert plan.ok == (best_s < math.inf)
    if plan.ok:
        check(case, plan, **options)
        assert plan.lower_bound_s <= best_s * (1.0 + 1e-9)
        assert best_s * (1.0 - 1e-9) <= plan.total_s <= 1.02 * best_s


# ---- answers that are known -----------------------------------------------------------------------------------


def test_where_all_fits_and_sync_is_cheap_it_is_plain_data_parallelism() -> None:
    model = model_of(*[work(1.0, param_bytes=1.0, output_bytes=1e3, state_bytes=4.0)] * 6)
    speeds = (1.0, 1.0, 0.5, 0.25)
    devices = [Device(name=f"{i}", speed=s, mem_bytes=100.0) for i, s in enumerate(speeds)]
    plan = place(
        model,
        cluster_of(*devices, link=Link(bandwidth_bytes_per_s=1e6)),
        44,
        max_groups=None,
    )
    assert [(g.ranks, g.cuts, g.samples) for g in plan.groups] == [
        ((0,), (0, 6), 16), ((1,), (0, 6), 16), ((2,), (0, 6), 8), ((3,), (0, 6), 4),
    ]  # fmt: skip
    assert all(len(group.micro_batches) == 1 for group in plan.groups)


def test_one_device_is_one_group() -> None:
    plan = place(
        model_of(work(1.0), work(2.0)), cluster_of(Device(name="a", speed=0.5)), 5
    )
    assert [(g.ranks, g.cuts, g.samples, g.micro_batches, g.depths) for g in plan.groups] == [
        ((0,), (0, 2), 5, (5,), (1,))
    ]
    assert plan.total_s == 30.0 and plan.sync_s == 0.0
    assert plan.lower_bound_s == pytest.approx(30.0)


def test_memory_forces_one_long_pipeline() -> None:
    model = model_of(*[work(1.0, state_bytes=1.0)] * 8)
    plan = place(
        model, cluster_of(*[Device(name=f"{i}", mem_bytes=2.0) for i in range(4)]), 16
    )
    assert [(sorted(g.ranks), g.cuts) for g in plan.groups] == [([0, 1, 2, 3], (0, 2, 4, 6, 8))]
    assert plan.groups[0].micro_batches == (1,) * 16
    assert plan.total_s == 8.0 + 15 * 2.0


def test_a_device_that_would_only_hold_others_up_rests() -> None:
    devices = [Device(name="a"), Device(name="b"), Device(name="snail", speed=1e-3)]
    plan = place(model_of(*[work(1.0)] * 4), cluster_of(*devices), 8)
    assert [g.ranks for g in plan.groups] == [(0,), (1,)]


def test_pipelines_keep_inside_islands() -> None:
    # Each model needs two devices; links between {0, 2} and {1, 3} are 100 times slower.
    model = model_of(*[work(1.0, state_bytes=1.0, output_bytes=1e-3)] * 4)
    near, far = Link(bandwidth_bytes_per_s=1e-2), Link(bandwidth_bytes_per_s=1e-4)
    links = tuple(tuple(near if a % 2 == b % 2 else far for b in range(4)) for a in range(4))
    devices = tuple(Device(name=f"{i}", mem_bytes=2.5) for i in range(4))
    plan = place(model, Cluster(devices=devices, links=links), 16)
    assert sorted(sorted(group.ranks) for group in plan.groups) == [[0, 2], [1, 3]]


def test_max_groups_holds() -> None:
    model, cluster = model_of(*[work(1.0)] * 6), cluster_of(*[Device(name=f"{i}") for i in range(4)])
    for most in (1, 2):
        assert len(place(model, cluster, 12, max_groups=most).groups) <= most


def test_more_devices_than_layers_or_samples() -> None:
    case = large_case(np.random.default_rng(0), 12, 3)
    check(replace(case, samples=2), plan := place(case.model, case.cluster, 2))
    assert all(len(group.ranks) <= 3 for group in plan.groups) and len(plan.groups) <= 2


@pytest.mark.parametrize("fits", [math.inf, 0.3])
def test_a_search_over_more_devices_is_sound_and_repeatable(fits: float) -> None:
    case = large_case(np.random.default_rng(3), 16, 40, fits=fits)
    plan = place(case.model, case.cluster, case.samples, budget=30)
    check(case, plan)
    assert plan.total_s <= 1.4 * plan.lower_bound_s
    assert plan == place(case.model, case.cluster, case.samples, budget=30)


@pytest.mark.long
def test_a_thousand_devices_are_planned() -> None:
    case = large_case(np.random.default_rng(0), 1000, 400)
    plan = place(case.model, case.cluster, case.samples, budget=60)
    check(case, plan)
    assert plan.total_s <= 1.4 * plan.lower_bound_s


# ---- impossible and malformed ---------------------------------------------------------------------------------


def test_why_nothing_fits() -> None:
    gib = 1024.0**3
    layers = [work(1.0, state_bytes=gib)] * 3 + [work(1.0, state_bytes=3.0 * gib, activation_bytes=0.1 * gib)]
    small = cluster_of(*[Device(name=f"{i}", mem_bytes=2.0 * gib) for i in range(4)])
    plan = place(model_of(*layers), small, 8)
    assert not plan.ok and plan.groups == () and plan.total_s == math.inf
    assert "layer 3 ('layer') fits no device: 3." in plan.reason and "against 2.0 GiB" in plan.reason
    assert "what helps: " in plan.reason
    few = cluster_of(*[Device(name=f"{i}", mem_bytes=3.5 * gib) for i in range(2)])
    plan = place(model_of(*[work(1.0, state_bytes=gib)] * 8), few, 8)
    assert plan.reason.startswith("the layers need 8.0 GiB at least, all devices have 7.0 GiB together")
