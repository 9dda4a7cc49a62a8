"""Times of a plan: the solvers' model and the schedule's are one, spelled twice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline.schedules import bottleneck_s, fill_s, lower_bound_s, model_s, per_link
from lightning_hetero.pipeline.decide.costs import times_of
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, makespan_s
from lightning_hetero.solvers.chain.chain import chain_of
from lightning_hetero.solvers.chain.model import evaluate
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.types import AffineCost, Cluster, Device, GroupPlan, LayerCost, Link, ModelCost

SECONDS = [0.0, 0.1, 0.3, 1.0, 2.0]


class Drawn(NamedTuple):
    model: ModelCost
    cluster: Cluster
    group: GroupPlan


@st.composite
def planned(draw: st.DrawFn, *, uneven: bool = False) -> Drawn:
    """Up to 4 of 5 devices, up to 7 layers; every link and every cut of its own."""
    stages = draw(st.integers(1, 4))
    n = draw(st.integers(stages, 7))
    rng = random.Random(draw(st.integers(0, 2**32)))

    def affine() -> AffineCost:
        return AffineCost(fixed_s=rng.choice(SECONDS), per_sample_s=rng.choice([0.1, 0.2, 1.0, 1.7]))

    def cost(name: str) -> LayerCost:
        return LayerCost(name=name, forward=affine(), backward=affine(), output_bytes=rng.choice([0.0, 1.0, 2.0, 7.0]))

    def link() -> Link:
        return Link(bandwidth_bytes_per_s=rng.choice([0.5, 1.0, 3.0, 20.0]), latency_s=rng.choice(SECONDS))

    model = ModelCost(layers=tuple(cost(f"{i}") for i in range(n)), before=cost("before"), head=cost("head"))
    devices = tuple(Device(name=f"{i}", speed=rng.choice([0.5, 1.0, 2.0, 3.0])) for i in range(5))
    cluster = Cluster(devices=devices, links=tuple(tuple(link() for _ in range(5)) for _ in range(5)))
    count = rng.choice([1, 2, 5, 12])
    sizes = tuple(rng.randint(1, 4) for _ in range(count)) if uneven else (rng.randint(1, 4),) * count
    group = GroupPlan(
        ranks=tuple(rng.sample(range(5), stages)),
        cuts=(0, *sorted(rng.sample(range(1, n), stages - 1)), n),
        samples=sum(sizes),
        micro_batches=sizes,
        depths=(),
    )
    return Drawn(model, cluster, group)


@settings(max_examples=200)
@given(planned())
def test_bottleneck_fill_and_depths_are_those_of_the_solvers(drawn: Drawn) -> None:
    model, cluster, group = drawn
    size, count = group.micro_batches[0], len(group.micro_batches)
    times = times_of(model, cluster, group)
    plan = evaluate(chain_of(model, cluster, group.ranks, micro_samples=size, micro_batches=count), group.cuts)
    assert plan.bottleneck_s == pytest.approx(bottleneck_s(times))
    assert plan.fill_s == pytest.approx(fill_s(times))
    assert plan.total_s == pytest.approx(model_s(times))
    assert plan.depths == per_link(times).depths
    alone = times_of(model, cluster, replace(group, samples=size, micro_batches=(size,)))
    assert makespan_s(alone, per_link(alone)) == pytest.approx(plan.fill_s)


@settings(max_examples=100)
@given(planned(uneven=True))
def test_uneven_micro_batches_are_charged_by_their_own_size(drawn: Drawn) -> None:
    model, cluster, group = drawn
    times = times_of(model, cluster, group)
    plan = evaluate_plan(model, cluster, [group]).groups[0]
    sizes = group.micro_batches
    for m, size in enumerate(sizes):
        one = times_of(model, cluster, replace(group, samples=size, micro_batches=(size,)))
        assert all(row[m] == other[0] for row, other in zip(times.seconds, one.seconds, strict=True))
    largest = times_of(model, cluster, replace(group, samples=max(sizes), micro_batches=(max(sizes),)))
    others = sorted(sizes)[:-1]
    periods = [
        bottleneck_s(times_of(model, cluster, replace(group, samples=n, micro_batches=(n,)))) for n in others
    ]
    assert plan.total_s == pytest.approx(fill_s(largest) + sum(periods))
    # What is planned can be run: with the plan's depths, in about the time that was planned, or what must be at least.
    found_s = makespan_s(times, SchedulePolicy(depths=plan.depths))
    assert lower_bound_s(times) * (1.0 - 1e-9) <= found_s <= 1.5 * plan.total_s


def test_times_by_hand() -> None:
    def cost(forward_s: float, backward_s: float, output_bytes: float = 0.0) -> LayerCost:
        forward, backward = (AffineCost(fixed_s=1.0, per_sample_s=s) for s in (forward_s, backward_s))
        return LayerCost(name="", forward=forward, backward=backward, output_bytes=output_bytes)

    model = ModelCost(
        layers=(cost(1.0, 2.0, 10.0), cost(3.0, 4.0, 20.0), cost(5.0, 6.0, 30.0)),
        before=cost(7.0, 8.0, 99.0),
        head=cost(9.0, 10.0, 99.0),
    )
    devices = (Device(name="rests"), Device(name="a", speed=2.0), Device(name="b"))
    # From a to b: a + b / 10 seconds, and a second per 10 bytes.
    links = tuple(tuple(Link(bandwidth_bytes_per_s=10.0, latency_s=a + b / 10) for b in range(3)) for a in range(3))
    group = GroupPlan(ranks=(2, 1), cuts=(0, 1, 3), samples=3, micro_batches=(2, 1), depths=(2, 2))
    times = times_of(model, Cluster(devices=devices, links=links), group)
    there, back = (4.1, 3.1), (3.2, 2.2)  # 2 -> 1 and 1 -> 2, 10 bytes per sample
    out, home = (7.2, 4.2), (8.1, 5.1)  # 1 -> 2 and 2 -> 1, 30 bytes per sample
    forward = (15.0 + 3.0, 8.0 + 2.0), there, ((7.0 + 11.0) / 2, (4.0 + 6.0) / 2), out, (19.0 + 21.0, 10.0 + 11.0)
    backward = home, ((9.0 + 13.0) / 2, (5.0 + 7.0) / 2), back, (17.0 + 5.0, 9.0 + 3.0)
    for found, expected in zip(times.seconds, [*forward, *backward], strict=True):
        assert found == pytest.approx(expected)
