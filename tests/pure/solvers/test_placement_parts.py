"""The planner's parts, each against something plain: time by samples, shares, synchronisation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.solvers import minimax
from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of
from lightning_hetero.solvers.placement.pipes import Pipe, Problem, share
from lightning_hetero.solvers.placement.sync import sync_s
from lightning_hetero.types import GroupPlan
from tests.pure.solvers.brute_force import BruteForce
from tests.pure.solvers.drawn_cases import small_case


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
            plan = evaluate_plan(problem.model, problem.cluster, [group], depth=problem.depth)
            times[min(size, samples)] = plan.total_s
        assert cost.seconds(samples) == pytest.approx(min(times.values()), rel=1e-9)
        if cost.seconds(samples) < math.inf:
            assert times[cost.size(samples)] == pytest.approx(cost.seconds(samples), rel=1e-9)
            assert samples <= cost.most


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
        return
    oracle = minimax(costs, samples, lower=1, upper=[cost.most for cost in costs])
    assert sum(shares) == samples and min(shares) >= 1
    assert time_s == max(c.seconds(n) for c, n in zip(costs, shares, strict=True))
    assert time_s == pytest.approx(oracle.makespan_s, rel=1e-12)


# ---- synchronisation --------------------------------------------------------------------------------------------


@given(placed())
def test_synchronisation_is_that_of_each_layers_owners(drawn: tuple[Problem, tuple[Pipe, ...]]) -> None:
    problem, pipes = drawn
    plain = BruteForce(problem.model, problem.cluster, problem.samples, problem.sizes)
    assert sync_s(problem, pipes) == pytest.approx(plain.sync_s([(p.ranks, p.cuts) for p in pipes]), rel=1e-9)
