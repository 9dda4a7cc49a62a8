"""The search of a structure: exact where it is small, valid and hardly worse where it is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero import LyapunovController
from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.controller.objective import Objective
from lightning_hetero.controller.spending import Spending
from lightning_hetero.solvers.placement import search
from lightning_hetero.solvers.placement.neighbours import (
    Drafts,
    Pipes,
    all_structures,
    borders,
    count_structures,
    neighbours,
)
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.search import better_structure
from lightning_hetero.types import Cluster, ModelCost
from tests.pure.controller.kit import best_by_force, cluster_of, every_structure, model_of, structures

SPEEDS = st.sampled_from([1.0, 0.5, 0.25])


def objective_of(
    model: ModelCost,
    cluster: Cluster,
    present: Pipes,
    *,
    samples: int = 4,
    v: float = 1.0,
    queue: float = 0.0,
    limit: float = 1.0,
    prices_per_s: list[float] | None = None,
    reference_s: float = 1.0,
    horizon: float = 10.0,
    per_hour: bool = False,
    sizes: tuple[int, ...] = (1,),
) -> Objective:
    ranks = len(cluster.devices)
    prices = [3600.0 * price for price in prices_per_s or [1.0] * ranks]
    budget = {"money_per_hour" if per_hour else "money_per_sample": limit}
    spending = Spending(LyapunovController(v=v, budget=budget, prices=prices), ranks, samples, None)
    spending.queues.update(dict.fromkeys(budget, queue))
    spending.reference_s = reference_s
    problem, moving = Problem(model, cluster, samples, sizes), MigrationModel()
    return Objective(problem, spending, present=present, migration=moving, horizon=horizon)


@settings(max_examples=25)
@given(
    work=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    speeds=st.lists(SPEEDS, min_size=2, max_size=3),
    queue=st.sampled_from([0.0, 1.0, 20.0]),
    prices=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    state_bytes=st.sampled_from([1.0, 1e8]),
    samples=st.integers(2, 4),
)
def test_small_cases_are_exact_against_brute_force(
    work: list[int], speeds: list[float], queue: float, prices: list[float], state_bytes: float, samples: int
) -> None:
    model, cluster = model_of(work, state_bytes=state_bytes), cluster_of(speeds)
    present = (Pipe((0, 1), (0, 1, len(work))),)
    objective = objective_of(
        model, cluster, present, samples=samples, queue=queue, limit=0.5, prices_per_s=prices[: len(speeds)]
    )
    now = objective.judge(present)
    assert now is not None
    found = better_structure(objective, now, rounds=0, candidates=1, most_groups=samples)
    moving = MigrationModel()
    best = best_by_force(
        model,
        cluster,
        samples,
        1,
        v=1.0,
        reference_s=1.0,
        prices_per_s=prices,
        queue_over_budget=queue / (0.5 * samples),
        pauses_s={
            tuple(sorted(p, key=lambda q: min(q.ranks))): moving.pause_s(objective.problem, present, p)
            for p in every_structure(len(work), len(speeds))
        },
        horizon=10.0,
    )
    assert found.value == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("layers", "ranks"), [(1, 3), (3, 2), (4, 3), (5, 3), (3, 4)])
def test_all_structures_are_all_and_counted(layers: int, ranks: int) -> None:
    def plain(found: object) -> list[tuple[Pipe, ...]]:
        return sorted(tuple(sorted(pipes)) for pipes in found)  # type: ignore[attr-defined]

    ours = plain(all_structures(layers, ranks, ranks))
    assert ours == plain(every_structure(layers, ranks))
    assert len(set(ours)) == len(ours) == count_structures(layers, ranks, 10**6)
    assert count_structures(layers, ranks, 3) > 3
    assert all(len(pipes) == 1 for pipes in all_structures(layers, ranks, 1))


@settings(max_examples=40)
@given(pipes=structures(), capped=st.booleans())
def test_neighbours_are_structures(pipes: Pipes, capped: bool) -> None:
    cluster = cluster_of([1.0, 0.5, 0.25, 1.0, 2.0], mem_bytes=4e6 if capped else 1e12)
    problem = Problem(model_of([1, 2, 1, 3, 1, 2]), cluster, 8, (1, 2))
    drawn = [*neighbours(pipes, Drafts(problem, 2), [3], 4), *borders(pipes, [0] * len(pipes), 6)]
    assert drawn
    for found in drawn:
        ranks = [rank for pipe in found for rank in pipe.ranks]
        assert found and len(set(ranks)) == len(ranks) and set(ranks) <= set(range(5))
        for pipe in found:
            assert (pipe.cuts[0], pipe.cuts[-1], len(pipe.cuts)) == (0, 6, len(pipe.ranks) + 1)
            assert all(a < b for a, b in pairwise(pipe.cuts))
    if len(pipes) < 4:
        assert len({len(found) for found in drawn}) > 1 or [len(pipe.ranks) for pipe in pipes] == [1]


def test_ranks_with_slow_links_are_put_side_by_side_within_a_pipeline() -> None:
    """Ranks 1 and 4 of a ring: side by side three links are slow, apart four. No swap keeps the others' order."""
    cluster = cluster_of([1.0] * 6)
    rows = [[replace(w, bandwidth_bytes_per_s=1e6) if {a, b} & {1, 4} else w for b, w in enumerate(row)]
            for a, row in enumerate(cluster.links)]  # fmt: skip
    slow = replace(cluster, links=tuple(map(tuple, rows)))
    drafts = Drafts(Problem(model_of([1.0] * 12), slow, 8, (1,)), 1)
    present = (Pipe((0, 1, 2, 3, 4, 5), (0, 2, 4, 6, 8, 10, 12)),)
    drawn = [pipes[0].ranks for pipes in islice(neighbours(present, drafts, [1, 4], 6), 40) if len(pipes) == 1]
    assert {(0, 2, 3, 1, 4, 5), (0, 2, 3, 4, 1, 5)} <= {*drawn}


def test_a_draft_makes_the_stages_even_and_respects_memory() -> None:
    model = model_of([1.0] * 12)
    even = Drafts(Problem(model, cluster_of([2.0, 1.0]), 8, (1,)), 1).pipe((0, 1))
    assert even == Pipe((0, 1), (0, 8, 12))
    tight = Drafts(Problem(model, cluster_of([2.0, 1.0], mem_bytes=7e6), 8, (1,)), 1).pipe((0, 1))
    assert tight == Pipe((0, 1), (0, 7, 12))
    assert Drafts(Problem(model, cluster_of([2.0, 1.0], mem_bytes=5e6), 8, (1,)), 1).pipe((0, 1)) is None


def test_tentative_search_is_hardly_worse_than_all_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, gaps = np.random.default_rng(5), list[float]()
    for _ in range(25):
        speeds = [float(s) for s in rng.choice([1.0, 0.5, 0.25], 3)]
        model = model_of([float(w) for w in rng.integers(1, 5, 6)], state_bytes=1e6)
        cluster = cluster_of(speeds, bandwidth=1e5)
        present = (Pipe((0, 1, 2), (0, 2, 4, 6)),)
        objective = objective_of(
            model, cluster, present, samples=8, queue=float(rng.choice([0.0, 3.0])), sizes=(1, 2)
        )
        now = objective.judge(present)
        assert now is not None
        monkeypatch.setattr(search, "_EXACT", 10**6)
        exact = better_structure(objective, now, rounds=2, candidates=60, most_groups=3)
        monkeypatch.setattr(search, "_EXACT", 0)
        found = better_structure(objective, now, rounds=2, candidates=60, most_groups=3)
        assert found.value >= exact.value * (1.0 - 1e-9)
        gaps.append(found.value / exact.value - 1.0)
    assert np.mean(gaps) < 0.02 and max(gaps) < 0.15, gaps


# ---- what a structure is worth ---------------------------------------------------------------------------------


def test_a_migration_counts_by_the_batches_it_is_made_for() -> None:
    model, cluster = model_of([1.0, 1.0], state_bytes=1e9), cluster_of([1.0, 1.0])
    present, other = (Pipe((0,), (0, 2)),), (Pipe((1,), (0, 2)),)
    short, long = (objective_of(model, cluster, present, horizon=h) for h in (10.0, 1000.0))
    here, there, later = short.judge(present), short.judge(other), long.judge(other)
    assert here and there and later
    assert here.pause_s == 0.0 and there.pause_s == pytest.approx(2.0 + 0.05, rel=1e-3)  # 2 GB over 1 GB/s
    assert there.value == pytest.approx(here.value + there.pause_s / 10.0)
    assert later.value == pytest.approx(here.value + there.pause_s / 1000.0)


def test_a_slower_plan_that_is_no_cheaper_is_refused_although_it_would_spend_less_per_hour() -> None:
    """Rank 1 costs next to nothing per hour but is so slow that the batch costs as much."""
    model, cluster = model_of([1.0]), cluster_of([1.0, 0.01])
    fast, slow = (Pipe((0,), (0, 1)),), (Pipe((1,), (0, 1)),)
    objective = objective_of(
        model,
        cluster,
        fast,
        queue=50.0,
        limit=0.1 * 3600,
        prices_per_s=[1.0, 0.0101],
        per_hour=True,
        reference_s=4.0,
    )
    a, b = objective.judge(fast), objective.judge(slow)
    assert a and b
    assert b.time_s > 90 * a.time_s and b.money > a.money
    assert b.value < a.value  # J alone would dawdle
    assert not objective.accepts(b, a)
    now = better_structure(objective, a, rounds=1, candidates=9, most_groups=2)
    assert now.time_s <= a.time_s
