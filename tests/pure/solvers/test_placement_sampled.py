"""Seeds of very many groups, judged by some of them; and equal devices, planned once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.solvers.placement import evaluate_plan, pipes, place
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.sampled import drafted, in_full, sampled_s
from lightning_hetero.solvers.placement.seeds import Groups
from lightning_hetero.types import Cluster, ModelCost

pytestmark = pytest.mark.pure
DEVICES, LAYERS, SAMPLES = 96, 24, 384
MICRO = [1, 2, 4, 8, 16]


def cards(*speeds: float) -> Cluster:
    """Nodes of eight; each card has room for the model."""
    cost = model()
    parts = (cost.before, *cost.layers, cost.head)
    mem = 20 * math.fsum(part.state_bytes + part.activation_bytes for part in parts)
    devices = [{"speed": speed, "mem": mem} for speed in speeds]
    node = {"bandwidth": "50 GB/s", "latency": "5 us"}
    nodes = [{"name": f"n{i}", "devices": devices[i : i + 8], "link": node} for i in range(0, len(devices), 8)]
    return cluster_from_plain({"nodes": nodes, "link": {"bandwidth": "5 GB/s", "latency": "20 us"}})


def model() -> ModelCost:
    sizes = {"kind": "transformer", "layers": LAYERS, "width": 256, "window": 512, "flops_per_s": 5e13}
    return model_from_formula(sizes)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the number of stages of each chain that is split."""
    stages: list[int] = []
    real = pipes.split

    def split(chain: pipes.Chain, *, tolerance: float) -> object:
        stages.append(len(chain))
        return real(chain, tolerance=tolerance)

    monkeypatch.setattr(pipes, "split", split)
    return stages


def test_a_sampled_search_splits_less_and_finds_a_whole_plan_nearly_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [0.2 + 0.8 * (0.618034 * i % 1.0) for i in range(DEVICES)]
    cost, cluster, stages = model(), cards(*speeds), counted(monkeypatch)
    full = place(cost, cluster, SAMPLES, micro_samples=MICRO, budget=0)
    in_all = sum(stages)
    stages.clear()
    monkeypatch.setattr("lightning_hetero.solvers.placement.sampled._EFFORT", 0)  # as for very many devices
    found = place(cost, cluster, SAMPLES, micro_samples=MICRO, budget=0, sampled=True)
    assert sum(stages) < 0.5 * in_all
    assert full.lower_bound_s <= found.total_s <= 1.1 * full.total_s
    assert sum(group.samples for group in found.groups) == SAMPLES
    assert found == place(cost, cluster, SAMPLES, micro_samples=MICRO, budget=0, sampled=True)
    assert evaluate_plan(cost, cluster, found.groups).total_s == found.total_s
    assert found.judged > 10 and full.judged > 10


def test_equal_devices_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = counted(monkeypatch)
    some = [1.0, 1.0, 0.5, 0.25] * 24
    place(model(), cards(*some), SAMPLES, micro_samples=MICRO, budget=0)
    of_kinds = len(stages)
    stages.clear()
    place(model(), cards(*[v * (1.0 + 1e-6 * i) for i, v in enumerate(some)]), SAMPLES, micro_samples=MICRO, budget=0)
    assert 0 < of_kinds < 0.5 * len(stages)


def test_equal_pipelines_share_their_costs_and_others_do_not() -> None:
    problem = Problem(model(), cards(*([1.0, 0.5, 0.5, 1.0] * 4)), 64, (1, 2, 4))
    first = problem.cost(Pipe((0, 1), (0, 9, LAYERS)))
    assert problem.cost(Pipe((3, 2), (0, 9, LAYERS))) is first
    others = [Pipe((1, 0), (0, 9, LAYERS)), Pipe((0, 1), (0, 8, LAYERS)), Pipe((0, 9), (0, 9, LAYERS))]
    assert all(problem.cost(pipe) is not first for pipe in others)  # order, borders, a slower link
    assert problem.split((0, 1), 2, 8) != problem.split((3, 2), 2, 8)
    one, two = problem.split((0, 1), 2, 8), problem.split((3, 2), 2, 8)
    assert one is not None and two is not None and one.cuts == two.cuts and two.ranks == (3, 2)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), tuple(range(LAYERS)), (5, 9, 30)])
def test_a_draft_has_a_layer_or_more_per_stage(ranks: tuple[int, ...]) -> None:
    speeds = [1e-6 if i % 3 else 1.0 for i in range(40)]
    problem = Problem(model(), cards(*speeds), 64, (1, 2, 4))
    pipe = drafted(problem, ranks)
    assert pipe.ranks == ranks and (pipe.cuts[0], pipe.cuts[-1]) == (0, LAYERS)
    assert len(pipe.cuts) == len(ranks) + 1 and all(np.diff(pipe.cuts) >= 1)


def test_a_seed_that_does_not_fit_gives_way_to_the_next() -> None:
    seeds: list[Groups] = [((0,), (1,)), ((0, 1),), ((1,),), ((0,),)]
    whole = {seeds[0]: math.inf, seeds[1]: 4.0, seeds[2]: 3.0, seeds[3]: 1.0}
    assert in_full(seeds, 1000, lambda groups, count: 1.0 / len(groups), lambda groups: whole[groups]) == [
        (1.0, seeds[3]),
        (4.0, seeds[1]),
    ]


def test_a_sample_that_does_not_fit_counts_as_infinite() -> None:
    problem = Problem(model(), cards(*([1.0] * 8)), 64, (1, 2, 4))
    assert sampled_s(problem, ((0,), (1,)), lambda ranks: None, 1) == math.inf
