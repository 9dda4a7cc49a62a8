"""The model of one pipeline: times, depths, memory, periods; and what is said where nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline.depth import cumulative_depth, per_link_depth
from lightning_hetero.solvers.chain.chain import DeviceChain, Layers, chain_of, layers_of
from lightning_hetero.solvers.chain.model import evaluate
from lightning_hetero.solvers.chain.split import split, why_infeasible
from lightning_hetero.types import AffineCost, Cluster, Device, LayerCost, Link, ModelCost, Status
from tests.pure.solvers.chains import all_cuts, chains, naive

GIB = 2.0**30


@pytest.mark.parametrize("link", ["any", "free"])
@pytest.mark.parametrize("depth", ["per_link", "low_memory"])
@settings(max_examples=60)
@given(data=st.data())
def test_evaluate_equals_the_model_term_by_term(link: str, depth: str, data: st.DataObject) -> None:
    chain = data.draw(chains(link=link, capped=True, depth=depth))
    for cuts in all_cuts(chain):
        plan, known = evaluate(chain, cuts), naive(chain, cuts)
        assert plan.ok == (known is not None)
        if known is None:
            assert (plan.status, plan.cuts, plan.period_s) == (Status.INFEASIBLE, (), math.inf)
            assert plan.reason
            continue
        assert plan.cuts == cuts
        assert plan.bottleneck_s == pytest.approx(known.bottleneck_s)
        assert plan.period_s == pytest.approx(known.period_s, rel=1e-8)
        assert plan.fill_s == pytest.approx(known.fill_s)
        assert plan.total_s == pytest.approx(known.total_s, rel=1e-8)
        assert plan.depths == known.depths
        assert plan.memory_bytes == pytest.approx(known.memory_bytes)


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_depths_are_those_of_the_schedule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    s, m = int(rng.integers(2, 7)), int(rng.choice([4, 16, 64]))
    work, one_way = rng.uniform(0.2, 2.0, s), rng.uniform(0.0, 1.5, s) * rng.choice([0.0, 1.0], s)
    head_s = float(rng.uniform(0.0, 0.5))
    links = [Link(latency_s=float(t)) for t in one_way]
    chain = DeviceChain(
        layers=Layers(work_s=work.tolist(), cut_bytes=[0.0] * (s + 1), head_s=head_s),
        devices=[Device(name=str(i)) for i in range(s)],
        links=links, back=links, micro_batches=m,
    )  # fmt: skip
    cuts = tuple(range(s + 1))
    plan = evaluate(chain, cuts)
    link_s, loop_s = one_way[:-1].tolist(), float(one_way[-1])
    by_links = per_link_depth(plan.bottleneck_s, link_s, loop_s, m)
    assert plan.depths == by_links
    by_rest = cumulative_depth(plan.bottleneck_s, work.tolist(), link_s, loop_s, head_s, m, extra=1)
    assert evaluate(replace(chain, depth="low_memory"), cuts).depths == tuple(map(min, by_links, by_rest))


def model(**keywords: float) -> ModelCost:
    def cost(name: str, seconds: float, **bytes_: float) -> LayerCost:
        half = AffineCost(fixed_s=0.5, per_sample_s=seconds)
        return LayerCost(
            name=name, forward=half, backward=AffineCost(fixed_s=0.0, per_sample_s=2 * seconds), **bytes_
        )

    sizes = {"state_bytes": 10.0, "activation_bytes": 3.0, "output_bytes": 4.0, **keywords}
    return ModelCost(
        layers=(cost("b.0", 1.0, **sizes), cost("b.1", 2.0, **{**sizes, "output_bytes": 6.0})),
        before=cost("before", 0.25, state_bytes=1.0, activation_bytes=0.5, output_bytes=2.0),
        head=cost("head", 0.75, state_bytes=2.0, activation_bytes=7.0),
    )


def cluster(*speeds: float, **keywords: float) -> Cluster:
    """The link from a to b has a bandwidth of 10 a + b + 1."""
    n = len(speeds)
    return Cluster(
        devices=tuple(Device(name=f"d{i}", speed=f, **keywords) for i, f in enumerate(speeds)),
        links=tuple(tuple(Link(bandwidth_bytes_per_s=10.0 * a + b + 1) for b in range(n)) for a in range(n)),
    )


def test_costs_of_a_micro_batch() -> None:
    layers = layers_of(model(), 4)
    assert layers.work_s == [12.5, 24.5] and (layers.before_s, layers.head_s) == (3.5, 9.5)
    assert layers.cut_bytes == [8.0, 16.0, 24.0]
    assert (layers.state_bytes, layers.activation_bytes) == ([10.0, 10.0], [12.0, 12.0])
    # The head's activations never are in flight: its backward follows at once.
    assert (layers.leader_state_bytes, layers.leader_activation_bytes) == (1.0 + 2.0 + 28.0, 2.0)
    assert layers.name(1) == "layer 1 ('b.1')"


def test_a_chain_takes_the_links_of_its_order() -> None:
    chain = chain_of(
        model(), cluster(1.0, 2.0, 4.0), (2, 0), micro_samples=4, micro_batches=8, depth="low_memory"
    )
    assert [d.name for d in chain.devices] == ["d2", "d0"]
    assert [link.bandwidth_bytes_per_s for link in (*chain.links, *chain.back)] == [21.0, 3.0, 3.0, 21.0]
    assert (chain.micro_batches, chain.depth) == (8, "low_memory")
    again = chain_of(
        layers_of(model(), 4), cluster(1.0, 2.0, 4.0), (2, 0), micro_batches=8, depth="low_memory"
    )
    assert evaluate(again, (0, 1, 2)) == evaluate(chain, (0, 1, 2))
    plan = evaluate(chain, (0, 1, 2))
    fill_s = (12.5 + 3.5 + 9.5) / 4 + 24.5 + 16 / 21 + 16 / 3 + 24 / 3 + 24 / 21
    assert (plan.fill_s, plan.bottleneck_s) == (pytest.approx(fill_s), 24.5)


def capped(*caps: float, state: list[float], **keywords: Any) -> DeviceChain:
    n = len(state)
    layers = {"work_s": [1.0] * n, "cut_bytes": [0.0] * (n + 1), "state_bytes": state}
    layers |= {"names": [f"blocks.{i}" for i in range(n)], **keywords.pop("layers", {})}
    return DeviceChain(
        layers=Layers(**layers),
        devices=[Device(name=f"node{i}", mem_bytes=cap) for i, cap in enumerate(caps)],
        links=[Link()] * len(caps),
        back=[Link()] * len(caps),
        **{"micro_batches": 8, **keywords},
    )


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (
            capped(1.0, 1.0, 1.0, state=[0.0, 0.0]),
            ["3 devices for 2 layers: every stage needs a layer; leave out 1 device"],
        ),
        (
            capped(2 * GIB, GIB, state=[GIB, 3.1 * GIB, GIB]),
            ["layer 1 ('blocks.1') fits no device: 3.1 GiB against 2.0 GiB at most, on 'node0'",
             "what helps: a device with more memory"],
        ),
        (
            capped(2 * GIB, GIB, state=[0.1, 0.1], layers={"activation_bytes": [0.0, 1.5 * GIB]}),
            ["layer 1 ('blocks.1') fits no device: 3.0 GiB against 1.0 GiB at most, on 'node1'",
             "what helps: a smaller micro-batch, gradient checkpointing, a device with more memory"],
        ),
        (
            capped(2.0, 9.0, state=[1.0, 1.0], layers={"leader_state_bytes": 3.0}),
            ["the code before the backbone and the head need 3.0 B on the leader, against 2.0 B of 'node0'"],
        ),
        (
            capped(2.0, 2.0, state=[1.0] * 5),
            ["the layers need 5.0 B at least, all devices have 4.0 B together; what helps: another device"],
        ),
        (
            capped(2.0, 9.0, 2.0, state=[2.0, 9.0, 1.0, 1.0]),
            [],
        ),
        (
            capped(9.0, 2.0, 2.0, state=[2.0, 9.0, 1.0, 1.0]),
            ["no split into 3 contiguous, non-empty stages fits the devices in this order; another order, or"],
        ),
        (
            capped(2.0, 2.0, 9.0, state=[3.0, 3.0, 3.0]),
            ["no split into 3 contiguous, non-empty stages fits the devices in this order; another order"],
        ),
    ],
)  # fmt: skip
def test_an_impossible_split_is_a_status_with_numbers(chain: DeviceChain, words: list[str]) -> None:
    plan = split(chain)
    assert plan.ok == (not words)
    assert all(part in plan.reason for part in words), plan.reason


def test_fewer_in_flight_is_advised_where_it_helps() -> None:
    slow = Link(latency_s=1.0)
    chain = capped(9.0, 9.0, state=[0.0, 0.0], layers={"activation_bytes": [3.5, 3.5]})
    assert "low_memory" not in why_infeasible(chain)
    late = replace(chain, links=[slow, Link()], back=[slow, Link()])
    assert "fewer in flight (depth='low_memory')" in why_infeasible(late)


def test_the_reason_of_one_split_names_its_stage() -> None:
    plan = evaluate(capped(2.0, 2.0, state=[1.0, 1.0, 1.0, 1.0]), (0, 1, 4))
    assert plan.reason == "stage 1, layers 1 to 3, needs 3.0 B at least, against 2.0 B of 'node1'"
