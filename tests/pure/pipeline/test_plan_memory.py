"""What plans take of memory: counted by hand, as the solvers count it, and with room for what they leave out."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hetero.cluster import equal_cluster, override_cluster
from lightning_hetero.pipeline.decide.plans import beside_bytes, best_plan, held_bytes, with_room
from lightning_hetero.solvers.chain.model import stage_bytes
from lightning_hetero.solvers.placement.pipes import Problem
from lightning_hetero.types import AffineCost, Cluster, GroupPlan, LayerCost, ModelCost, PipelinePlan

pytestmark = pytest.mark.pure


def layer(name: str, *, params: float, kept: float, out: float) -> LayerCost:
    second = AffineCost(fixed_s=0.0, per_sample_s=1e-3)
    return LayerCost(
        name=name,
        forward=second,
        backward=second,
        param_bytes=params,
        state_bytes=4 * params,
        activation_bytes=kept,
        output_bytes=out,
    )


MODEL = ModelCost(
    layers=tuple(layer(str(i), params=100.0 + i, kept=7.0 + i, out=3.0 + i) for i in range(4)),
    before=layer("before", params=10.0, kept=5.0, out=2.0),
    head=layer("head", params=20.0, kept=6.0, out=0.0),
)


def group(ranks: tuple[int, ...], cuts: tuple[int, ...], depths: tuple[int, ...], sizes: tuple[int, ...]) -> GroupPlan:
    return GroupPlan(ranks=ranks, cuts=cuts, samples=sum(sizes), micro_batches=sizes, depths=depths)


PAIR = group((2, 0), (0, 1, 4), (3, 2), (4, 3))
ALONE = group((1,), (0, 4), (1,), (5,))


def test_what_is_held_is_what_the_solvers_count() -> None:
    plan = PipelinePlan(groups=(PAIR, ALONE))
    found = held_bytes(plan, MODEL, 4)
    problem = Problem(MODEL, equal_cluster(4), 12, (4, 5))
    for one in plan.groups:
        chain = problem.chain(one.ranks, max(one.micro_batches), len(one.micro_batches))
        state, kept = stage_bytes(chain, np.array([one.cuts], dtype=np.int64))
        expected = (state + kept * np.array(one.depths))[0]
        assert [found[rank] for rank in one.ranks] == pytest.approx(expected.tolist())
    assert found[3] == 0.0  # it rests


def test_beside_it_are_sums_between_groups_and_messages_between_stages() -> None:
    pair = beside_bytes(PipelinePlan(groups=(PAIR,)), MODEL, 3)
    # There and back, micro-batches of 4: over the first cut 3 bytes a sample, from the last stage to the leader 6.
    assert pair == [2 * 4 * (3 + 6), 0.0, 2 * 4 * (6 + 3)]
    both = beside_bytes(PipelinePlan(groups=(PAIR, ALONE)), MODEL, 3)
    own = [101 + 102 + 103, 100 + 101 + 102 + 103 + 10 + 20, 100 + 10 + 20]
    assert both == [a + b for a, b in zip(pair, own, strict=True)]


def made(cluster: Cluster) -> PipelinePlan:
    return best_plan(MODEL, cluster, 16)


def test_a_plan_leaves_room_for_it() -> None:
    asked: list[Cluster] = []

    def plan_for(cluster: Cluster) -> PipelinePlan:
        asked.append(cluster)
        return made(cluster)

    free = equal_cluster(2)
    plan, cluster = with_room(plan_for, MODEL, override_cluster(free, mem_bytes=[1e6, 1e6]))
    assert plan == made(free) and len(asked) == 1  # there is enough: nothing is planned again
    beside = beside_bytes(plan, MODEL, 2)
    assert [d.mem_bytes for d in cluster.devices] == [1e6 - size for size in beside]  # what later plans may count with

    tight = [size + 1.0 for size in held_bytes(made(free), MODEL, 2)]  # fits by the solvers' count alone
    plan, cluster = with_room(plan_for, MODEL, override_cluster(free, mem_bytes=tight))
    needs = zip(held_bytes(plan, MODEL, 2), beside_bytes(plan, MODEL, 2), strict=True)
    assert plan.ok and all(held + more <= has for (held, more), has in zip(needs, tight, strict=True))
