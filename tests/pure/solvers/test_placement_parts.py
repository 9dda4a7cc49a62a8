"""The planner's parts, each against something plain: time by samples, shares, synchronisation, bound, groupings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.planning.brute_force import BruteForce
from benchmarks.planning.cases import large_case, small_case
from lightning_hetero.solvers import minimax
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of
from lightning_hetero.solvers.placement.all_groupings import groupings
from lightning_hetero.solvers.placement.order import (
    all_orders,
    improved,
    in_order,
    nearest_chain,
    nearness,
    some_orders,
)
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.refine import estimate_s, exact_s, refine
from lightning_hetero.solvers.placement.seeds import clusters, counts, dealt, islands, neighbours
from lightning_hetero.solvers.placement.shares import level, share
from lightning_hetero.solvers.placement.sync import sync_loads_s, sync_s
from lightning_hetero.types import Cluster, Device, GroupPlan, Link


@st.composite
def problems(draw: st.DrawFn, most_devices: int = 4) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    devices, layers = draw(st.integers(1, most_devices)), draw(st.integers(4, 7))
    case = small_case(rng, devices, layers, sync=0.2, capped=draw(st.booleans()))
    sizes = draw(st.sets(st.integers(1, case.samples), min_size=1, max_size=4))
    return Problem(
        case.model,
        case.cluster,
        case.samples,
        tuple(sorted(sizes)),
        overlap=draw(st.booleans()),
        depth=draw(st.sampled_from(["per_link", "low_memory"])),
    )


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, tuple[Pipe, ...]]:
    """A problem and some pipelines, at random."""
    problem = draw(problems())
    ranks = draw(st.permutations(range(problem.n_devices)))
    pipes: list[Pipe] = []
    while ranks:
        n = draw(st.integers(1, len(ranks)))
        inner = draw(st.sets(st.integers(1, problem.n_layers - 1), min_size=n - 1, max_size=n - 1))
        pipes.append(Pipe(tuple(ranks[:n]), (0, *sorted(inner), problem.n_layers)))
        ranks = ranks[n:]
    return problem, tuple(pipes)


# ---- time by samples ------------------------------------------------------------------------------------------


@given(placed())
def test_the_time_of_a_pipeline_is_that_of_the_best_micro_batches(
    drawn: tuple[Problem, tuple[Pipe, ...]],
) -> None:
    problem, pipes = drawn
    cost = problem.cost(pipes[0])
    for samples in range(1, problem.samples + 1):
        times: dict[int, float] = {}
        for size in problem.sizes:
            group = GroupPlan(
                ranks=pipes[0].ranks,
                cuts=pipes[0].cuts,
                samples=samples,
                micro_batches=micro_batches_of(samples, size),
                depths=(),
            )
            plan = evaluate_plan(
                problem.model, problem.cluster, [group], overlap=problem.overlap, depth=problem.depth
            )
            times[min(size, samples)] = plan.total_s
        assert cost.seconds(samples) == pytest.approx(min(times.values()), rel=1e-9)
        if cost.seconds(samples) < math.inf:
            assert times[cost.size(samples)] == pytest.approx(cost.seconds(samples), rel=1e-9)
            assert samples <= cost.most


def test_between_two_devices_the_loop_shares_the_links() -> None:
    case = small_case(np.random.default_rng(0), 2, 4, sync=0.0, samples=8)
    slow = tuple((Link(bandwidth_bytes_per_s=1e6),) * 2 for _ in range(2))
    cluster = Cluster(devices=case.cluster.devices, links=slow)
    problem = Problem(case.model, cluster, 8, (1,))
    group = GroupPlan(ranks=(0, 1), cuts=(0, 2, 4), samples=8, micro_batches=(1,) * 8, depths=())
    period_s = (case.model.layers[1].output_bytes + case.model.layers[3].output_bytes) / 1e6
    cost = problem.cost(Pipe((0, 1), (0, 2, 4)))
    assert cost.bottleneck(1) == pytest.approx(period_s)
    assert cost.seconds(8) == pytest.approx(evaluate_plan(case.model, cluster, [group]).total_s)
    assert cost.seconds(8) - cost.seconds(7) == pytest.approx(period_s)


@given(placed())
def test_time_never_falls_and_its_inverse_is_never_too_small(drawn: tuple[Problem, tuple[Pipe, ...]]) -> None:
    problem, pipes = drawn
    cost = problem.cost(pipes[0])
    times = [cost.seconds(n) for n in range(problem.samples + 1)]
    for n in range(1, problem.samples + 1):
        assert times[n] >= times[n - 1] * (1.0 - 1e-12)
        if times[n] < math.inf and not problem.capped:
            assert cost.most_samples(times[n]) >= n * (1.0 - 1e-9)
    assert cost.most == max(n for n in range(problem.samples + 1) if times[n] < math.inf)


# ---- shares ---------------------------------------------------------------------------------------------------


@given(placed(), st.integers(1, 40))
def test_shares_are_as_good_as_the_exact_split_of_any_costs(
    drawn: tuple[Problem, tuple[Pipe, ...]], samples: int
) -> None:
    problem, pipes = drawn
    costs = [problem.cost(pipe) for pipe in pipes]
    samples = min(samples, problem.samples)
    shares, time_s = share(costs, samples)
    if not shares:
        assert time_s == math.inf
        assert len(costs) > samples or any(c.most < 1 for c in costs) or sum(c.most for c in costs) < samples
        assert level(costs, samples) == math.inf
        return
    oracle = minimax(costs, samples, lower=1, upper=[cost.most for cost in costs])
    assert sum(shares) == samples and min(shares) >= 1
    assert time_s == max(c.seconds(n) for c, n in zip(costs, shares, strict=True))
    assert time_s == pytest.approx(oracle.makespan_s, rel=1e-12)
    if not problem.capped:
        assert level(costs, samples) <= time_s * (1.0 + 1e-9)


def test_the_level_is_near_where_samples_are_many() -> None:
    case = large_case(np.random.default_rng(0), 16, 30)
    problem = Problem(case.model, case.cluster, 4096, (1, 2, 4, 8, 16, 4096))
    costs = [problem.cost(Pipe((i, i + 1), (0, 12, 30))) for i in range(0, 16, 2)]
    assert share(costs, 4096)[1] == pytest.approx(level(costs, 4096), rel=5e-3)


# ---- synchronisation --------------------------------------------------------------------------------------------


@given(placed())
def test_synchronisation_is_that_of_each_layers_owners(drawn: tuple[Problem, tuple[Pipe, ...]]) -> None:
    problem, pipes = drawn
    plain = BruteForce(problem.model, problem.cluster, problem.samples, problem.sizes)
    assert sync_s(problem, pipes) == pytest.approx(plain.sync_s([(p.ranks, p.cuts) for p in pipes]), rel=1e-9)


def test_equal_borders_make_fewer_tuples_of_owners() -> None:
    case = small_case(np.random.default_rng(2), 4, 6, sync=0.5)
    links = tuple((Link(latency_s=1.0),) * 4 for _ in range(4))
    problem = Problem(case.model, Cluster(devices=case.cluster.devices, links=links), 8, (1,))
    same = [Pipe((0, 1), (0, 3, 6)), Pipe((2, 3), (0, 3, 6))]
    other = [Pipe((0, 1), (0, 3, 6)), Pipe((2, 3), (0, 4, 6))]
    assert sync_loads_s(problem, same).tolist() == [2.0, 2.0, 2.0, 2.0]
    assert sync_loads_s(problem, other).tolist() == [2.0, 4.0, 4.0, 2.0]


# ---- order ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(problems(most_devices=3))
def test_the_best_of_all_orders_is_the_best(problem: Problem) -> None:
    plain = BruteForce(
        problem.model,
        problem.cluster,
        problem.samples,
        problem.sizes,
        overlap=problem.overlap,
        depth=problem.depth,
    )
    best_s = min(
        [float(times[-1]) for _, times in plain.pipelines(range(problem.n_devices))], default=math.inf
    )
    found = all_orders(problem, range(problem.n_devices), problem.samples)
    if best_s == math.inf:
        assert found == []
        return
    assert best_s * (1.0 - 1e-9) <= found[0].time_s <= 1.02 * best_s
    assert found == sorted(found, key=lambda planned: float(f"{planned.time_s:.8e}"))


def test_nearest_neighbours_stay_in_their_island() -> None:
    near, far = Link(bandwidth_bytes_per_s=1e9), Link(bandwidth_bytes_per_s=1e8)
    links = tuple(tuple(near if a % 3 == b % 3 else far for b in range(9)) for a in range(9))
    devices = tuple(Device(name=f"{i}", speed=1.0 + i // 3) for i in range(9))
    case = small_case(np.random.default_rng(0), 9, 9, sync=0.0)
    problem = Problem(case.model, Cluster(devices=devices, links=links), 8, (1, 2, 4, 8))
    far_s = nearness(problem, 2)
    assert nearest_chain(problem, range(9), 8, far_s) == (8, 5, 2, 6, 3, 0, 7, 4, 1)
    assert islands(problem, far_s) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert clusters(problem, neighbours(problem, range(9), far_s), 3) == ((0, 3, 6), (1, 4, 7), (2, 5, 8))
    for order in some_orders(problem, range(9), far_s, most=7):
        assert sorted(order) == list(range(9))


def test_a_bad_order_is_improved() -> None:
    # A zigzag between two islands, over links that are ten times too slow for that.
    near, far = Link(bandwidth_bytes_per_s=1e9), Link(bandwidth_bytes_per_s=2e6)
    links = tuple(tuple(near if a // 4 == b // 4 else far for b in range(8)) for a in range(8))
    case = small_case(np.random.default_rng(0), 8, 24, sync=0.0, samples=64)
    devices = tuple(Device(name=f"{i}") for i in range(8))
    problem = Problem(case.model, Cluster(devices=devices, links=links), 64, (1, 2, 4, 8))
    start = in_order(problem, (0, 4, 1, 5, 2, 6, 3, 7), 64)
    good = in_order(problem, tuple(range(8)), 64)
    assert start is not None and good is not None and start.time_s > 1.05 * good.time_s
    found = improved(problem, start, 64, tests=2000, splits=200)
    assert found.time_s <= 1.01 * good.time_s
    assert (
        improved(problem, start, 64, tests=0, splits=9)
        == start
        == improved(problem, start, 64, tests=9, splits=0)
    )


# ---- groups -----------------------------------------------------------------------------------------------------


def test_all_groupings_are_there_once() -> None:
    # Set groupings of all non-empty subsets of n: Bell(n + 1) - 1.
    for n, bell in ((1, 2), (2, 5), (3, 15), (4, 52), (5, 203)):
        found = [tuple(sorted(blocks)) for blocks in groupings(n, n)]
        assert len(found) == len(set(found)) == bell - 1
        assert all(sum(blocks) == int(np.bitwise_or.reduce(blocks)) for blocks in found)  # disjoint
    assert {len(blocks) for blocks in groupings(4, 2)} == {1, 2}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_seeds_hold_each_device_once(devices: int, groups: int, seed: int) -> None:
    assume(groups <= devices)
    case = large_case(np.random.default_rng(seed), devices, 3)
    problem = Problem(case.model, case.cluster, case.samples, (1, 2, 4))
    far_s = nearness(problem, 2)
    parts = islands(problem, far_s)
    assert sorted(rank for part in parts for rank in part) == list(range(devices))
    assert len(parts) == (1 if devices <= 8 else -(-devices // 8))
    chain = neighbours(problem, range(devices), far_s)
    made = [clusters(problem, chain, groups), dealt(problem, [range(devices)], groups)]
    if len(parts) <= groups:
        made.append(dealt(problem, parts, groups))
    for one in made:
        assert sorted(rank for group in one for rank in group) == list(range(devices))
    assert len(made[1]) == groups
    assert counts(devices)[0] == 1 and counts(devices)[-1] == devices


# ---- refinement -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(placed())
def test_refinement_never_makes_it_worse_and_says_the_truth(drawn: tuple[Problem, tuple[Pipe, ...]]) -> None:
    problem, pipes = drawn
    start_s = exact_s(problem, pipes)
    if not problem.capped:
        assert estimate_s(problem, pipes) <= start_s * (1.0 + 1e-9)
    time_s, found = refine(problem, pipes, budget=60)
    assert time_s == exact_s(problem, found)
    assert time_s <= start_s
    assert sorted(r for p in found for r in p.ranks) == sorted(r for p in pipes for r in p.ranks)
    assert refine(problem, pipes, budget=0) == (start_s, pipes)


def test_pipelines_give_way_to_each_other_where_rounds_are_dear() -> None:
    case = small_case(np.random.default_rng(4), 4, 12, sync=0.0, samples=12)
    links = tuple((Link(bandwidth_bytes_per_s=1e12, latency_s=5e-3),) * 4 for _ in range(4))
    devices = tuple(Device(name=f"{i}") for i in range(4))
    layers = tuple(
        type(layer)(name=layer.name, forward=layer.forward, backward=layer.backward, param_bytes=1.0)
        for layer in case.model.layers
    )
    model = type(case.model)(layers=layers, before=case.model.before, head=case.model.head)
    problem = Problem(model, Cluster(devices=devices, links=links), 12, (1, 2, 3, 4, 6))
    _, found = refine(problem, (Pipe((0, 1), (0, 4, 12)), Pipe((2, 3), (0, 7, 12))), budget=500)
    assert found[0].cuts == found[1].cuts
