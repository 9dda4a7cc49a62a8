"""The pipeline benchmark's scenarios, its even pipelines, and its arithmetic on raw data made by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.pipeline.figures import case_figures, trained_figures
from benchmarks.pipeline.models import MODELS, costs_of
from benchmarks.pipeline.plans import (
    OURS,
    TEXTBOOK,
    balanced_cuts,
    chain_entry,
    even_entries,
    fits,
    fits_whole,
    our_entry,
    replica_sync_s,
)
from benchmarks.pipeline.scenarios import Case, cases, read
from benchmarks.report import FIELDS
from lightning_hetero.types import AffineCost, Cluster, Device, GroupPlan, LayerCost, Link, ModelCost

FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
ENDS = LayerCost(name="", forward=FREE, backward=FREE)


def model(layers: int, param_bytes: list[float] | None = None) -> ModelCost:
    """Layers of 1 s forward and 2 s backward per sample, 10 bytes of state and 1 byte of activations."""
    sizes = param_bytes or [1.0] * layers
    return ModelCost(
        layers=tuple(
            LayerCost(
                name=f"{i}",
                forward=AffineCost(fixed_s=0.0, per_sample_s=1.0),
                backward=AffineCost(fixed_s=0.0, per_sample_s=2.0),
                param_bytes=sizes[i],
                state_bytes=10.0,
                activation_bytes=1.0,
            )
            for i in range(layers)
        ),
        before=ENDS,
        head=ENDS,
    )


def case(speeds: list[float], mem_bytes: float = float("inf"), **options: Any) -> Case:
    devices = tuple(Device(name=f"d{i}", speed=v, mem_bytes=mem_bytes) for i, v in enumerate(speeds))
    cluster = Cluster(devices=devices, links=((Link(),) * len(speeds),) * len(speeds))
    values = {"name": "c", "model": "mlp", "global_batch": 8, "sample_s": 1.0, "fixed_s": 0.0, **options}
    return Case(cluster=cluster, **values)


# ---- scenarios -------------------------------------------------------------------------------------------------


def test_a_file_gives_a_case_per_model_and_mistakes_are_named() -> None:
    plain = {
        "name": "n", "models": ["mlp", "gpt"], "global_batch": 8, "sample_s": 0.1, "fixed_s": 0.0,
        "cluster": {"devices": [{"count": 2}]}, "less_than_even": 30, "trained": ["gpt"],
    }  # fmt: skip
    assert [(c.title, c.world_size, c.less_than_even, c.trained) for c in read(plain)] == [
        ("n, mlp", 2, 30, False),
        ("n, gpt", 2, 30, True),
    ]
    with pytest.raises(ValueError, match="names \\['cnn'\\]"):
        read({**plain, "trained": ["cnn"]})
    with pytest.raises(ValueError, match="unknown keys \\['speeds'\\]"):
        read({**plain, "speeds": [1.0]})
    with pytest.raises(ValueError, match="lacks \\['models'\\]"):
        read({key: value for key, value in plain.items() if key != "models"})
    with pytest.raises(ValueError, match="global_batch=0"):
        read({**plain, "global_batch": 0})
    with pytest.raises(ValueError, match=r"sample_s=-0\.1"):
        read({**plain, "sample_s": -0.1})


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_a_models_time_is_the_scenarios(name: str) -> None:
    costs = costs_of(name, 0.04, 0.01)
    parts = [cost for part in (costs.before, *costs.layers, costs.head) for cost in (part.forward, part.backward)]
    assert sum(cost.seconds(3) for cost in parts) == pytest.approx(0.01 + 3 * 0.04)
    assert min(layer.forward.per_sample_s for layer in costs.layers) > 0.0
    net = MODELS[name]()
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in net.layers]
    assert [layer.param_bytes for layer in costs.layers] == [4.0 * size for size in sizes]
    assert [layer.state_bytes for layer in costs.layers] == [16.0 * size for size in sizes]  # Adam


@pytest.mark.parametrize("title", [c.title for c in cases() if "memory" in c.name])
def test_no_device_holds_half_of_a_model_that_is_capped(title: str) -> None:
    capped = next(c for c in cases() if c.title == title)
    costs = costs_of(capped.model, capped.sample_s)
    state = sum(part.state_bytes for part in (costs.before, *costs.layers, costs.head))
    assert not fits_whole(capped, costs)
    mem_bytes = max(device.mem_bytes for device in capped.cluster.devices)
    assert state > mem_bytes and len(our_entry(capped, costs).groups) == 1
    assert [count for count, entry in even_entries(capped, costs).items() if entry is not None] == [1]


# ---- even pipelines --------------------------------------------------------------------------------------------


def test_borders_have_the_least_largest_part() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        weights, parts = rng.integers(1, 9, 7).tolist(), int(rng.integers(1, 6))
        cuts = balanced_cuts(weights, parts)

        def largest(ends: tuple[int, ...], weights: list[int] = weights) -> int:
            return max(sum(weights[a:b]) for a, b in itertools.pairwise(ends))

        every = ((0, *inner, 7) for inner in itertools.combinations(range(1, 7), parts - 1))
        assert len(cuts) == parts + 1 and largest(cuts) == min(map(largest, every))
    with pytest.raises(ValueError, match=r"parts=3 must be in 1\.\.2"):
        balanced_cuts([1.0, 1.0], 3)


def test_even_pipelines_by_hand() -> None:
    """12 s per sample and device of speed 1; the slow device makes every even plan wait for it."""
    found = even_entries(case([1.0, 1.0, 1.0, 0.25]), model(4))
    assert list(found) == [1, 2, 4]
    chain, pairs, alone = (found[count] for count in (1, 2, 4))
    assert chain is not None and pairs is not None and alone is not None
    # chain: 8 micro-batches of 1, 3 s per stage, 12 s on the last; fill 3 x 3 s
    assert chain.groups[0].cuts == (0, 1, 2, 3, 4) and chain.modelled_s == pytest.approx(8 * 12.0 + 9.0)
    assert [group.ranks for group in pairs.groups] == [(0, 1), (2, 3)]
    assert pairs.modelled_s == pytest.approx(4 * 24.0 + 6.0)
    assert alone.modelled_s == pytest.approx(2 * 12.0 / 0.25)
    assert sum(group.samples for group in alone.groups) == 8


def test_even_pipelines_choose_borders_by_parameters_where_that_is_better() -> None:
    layers = model(4, [1.0, 1.0, 1.0, 3.0])
    slow_tail = [replace(cost, forward=AffineCost(fixed_s=0.0, per_sample_s=9.0)) for cost in layers.layers[3:]]
    found = even_entries(case([1.0, 1.0]), replace(layers, layers=(*layers.layers[:3], *slow_tail)))
    assert found[1] is not None and found[1].groups[0].cuts == (0, 3, 4) and "by parameters" in found[1].note


def test_even_pipelines_that_do_not_fit_are_none() -> None:
    four = case([1.0] * 4, mem_bytes=25.0)
    found = even_entries(four, model(4))
    assert found[4] is None and found[1] is not None and not fits_whole(four, model(4))
    # two layers on a device: 20 bytes, and 2 in flight of 2 bytes: 1F1B's depth
    assert found[2] is not None and TEXTBOOK in found[2].note and found[2].groups[0].depths == (2, 1)
    assert even_entries(case([1.0] * 4, mem_bytes=23.0), model(4))[2] is None


def test_memory_counts_state_and_what_is_in_flight() -> None:
    group = GroupPlan(ranks=(0, 1), cuts=(0, 1, 4), samples=4, micro_batches=(2, 2), depths=(2, 1))
    exact = case([1.0, 1.0], mem_bytes=30.0 + 6.0).cluster  # 3 layers, one micro-batch of 2 samples
    assert fits(model(4), exact, group)
    assert not fits(model(4), case([1.0, 1.0], mem_bytes=35.0).cluster, group)
    assert not fits(model(4), exact, replace(group, depths=(2, 2)))


def test_our_plan_uses_all_speeds_and_the_bound_holds() -> None:
    entry = our_entry(case([1.0, 1.0, 1.0, 0.25], global_batch=13), model(4))
    assert [group.samples for group in entry.groups] == [4, 4, 4, 1]
    assert entry.modelled_s == pytest.approx(4 * 12.0) == pytest.approx(entry.bound_s)
    with pytest.raises(ValueError, match="c, mlp"):
        our_entry(case([1.0], mem_bytes=1.0), model(4))


def test_synchronisation_is_the_ring_of_all_replicas() -> None:
    slow = case([1.0] * 4)
    links = ((Link(bandwidth_bytes_per_s=2.0),) * 4,) * 4
    slow = replace(slow, cluster=replace(slow.cluster, links=links))
    assert replica_sync_s(slow, model(4)) == pytest.approx(2 * 3 / 4 * 4.0 / 2.0)
    assert replica_sync_s(case([1.0] * 4), model(4)) == 0.0


def test_a_chain_to_compare_engines_by_hand() -> None:
    for policy, samples in ((OURS, 16), (TEXTBOOK, 16)):
        entry = chain_entry(case([1.0] * 4, global_batch=samples), model(4), 8, policy)
        assert entry.groups[0].micro_batches == (2,) * 8 and entry.policy == policy
        assert entry.modelled_s >= (8 + 3) * 6.0 - 1e-9
    ours = chain_entry(case([1.0] * 4, global_batch=16), model(4), 8, OURS)
    assert ours.modelled_s == pytest.approx((8 + 3) * 6.0)


# ---- figures ---------------------------------------------------------------------------------------------------


def by_name(figures: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert all(set(figure) == set(FIELDS) for figure in figures)
    named = {figure["name"].partition(": ")[2]: figure for figure in figures}
    assert len(named) == len(figures)
    return named


def walked(ours_s: float, chain_s: float, pairs_s: float) -> dict[str, Any]:
    def runs(step_s: float) -> list[list[float]]:
        return [[k * step_s, 0.9 * k * step_s, 1.1 * k * step_s] for k in (1.0, 2.0, 0.5)]

    return {
        "steps_s": {
            "even, 1 group": runs(chain_s),
            "even, 2 groups": runs(pairs_s),
            "ours": runs(ours_s),
            "even, 1 group, torch": runs(0.1),
        },
        "modelled_s": {"even, 1 group": 1.0, "even, 2 groups": 0.95, "ours": 0.5},
        "note": {"even, 1 group": "a", "even, 2 groups": "b", "ours": "c"},
        "bound_s": 0.45,
        "does_not_fit": ["even, 4 groups"],
    }


GOALS = case([1.0], less_than_even=30.0, less_than_chain=60.0)


def test_figures_of_a_case_by_hand() -> None:
    """The torch run, over links that cost nothing, is no competitor of plans; runs are compared in pairs."""
    figures = by_name(case_figures(GOALS, walked(0.5, 1.0, 0.9)))
    values = {name: figure["value"] for name, figure in figures.items()}
    assert values == pytest.approx(
        {
            "our step": 500.0,
            "modelled / measured": 1.0,
            "largest error of the model, all plans": 100 * 0.05 / 0.95,
            "bound / measured": 0.9,
            "less time than the best even pipeline (even, 2 groups)": 100 * (1 - 0.5 / 0.9),
            "less time than the even chain": 50.0,
            "the even chain by our walker / by torch.distributed.pipelining": 10.0,
        }
    )
    assert {name: figure["holds"] for name, figure in figures.items()} == dict(
        zip(values, (None, True, True, None, True, False, False), strict=True)
    )


def trained(replicas_s: float, held: float) -> dict[str, Any]:
    times = {"ours": 0.5, "ddp": 1.0, "balanced": 0.6, "replicas": replicas_s}
    return {
        "steps_s": {name: [[value] * 3] * 2 for name, value in times.items()},
        "taken": {name: [1.0, 1.01] for name in times},
        "exchange_s": dict.fromkeys(times, 0.01),
        "modelled_s": 0.48,
        "held_bytes": {"ours": [held, 10.0]},
        "model_bytes": 90.0,
        "mem_bytes": [30.0, 40.0],
    }


@pytest.mark.parametrize(("replicas_s", "held", "holds"), [(0.61, 30.0, True), (0.63, 31.0, False)])
def test_figures_of_engines_by_hand(replicas_s: float, held: float, holds: bool) -> None:
    figures = by_name(trained_figures(GOALS, trained(replicas_s, held)))
    assert figures["less time than stock DDP"]["value"] == pytest.approx(50.0)
    assert figures["less time than the balanced engine"]["value"] == pytest.approx(100 * (1 - 0.5 / 0.6))
    name = "plain data parallelism, ours / balanced engine"
    assert figures[name]["value"] == pytest.approx(replicas_s / 0.6) and figures[name]["holds"] is holds
    memory = "parameters, gradients, optimizer state"
    assert figures[f"{memory}, most held / device's memory"]["value"] == pytest.approx(held / 30.0)
    assert figures[f"{memory}, most held / device's memory"]["holds"] is holds
    assert figures[f"{memory}, whole model / largest memory"]["value"] == pytest.approx(90.0 / 40.0)
