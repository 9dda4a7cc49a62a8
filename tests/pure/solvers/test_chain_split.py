"""The split of a fixed order against brute force over all splits, evaluated by the tests' own model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.solvers.chain.bounds import Walk, bounds, relaxed_bound
from lightning_hetero.solvers.chain.chain import Chain
from lightning_hetero.solvers.chain.layers import Layers
from lightning_hetero.solvers.chain.least_fill import LeastFill
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate
from lightning_hetero.solvers.chain.split import split
from lightning_hetero.types import Device, Link, Status
from tests.pure.solvers.chains import Naive, all_cuts, chains, naive

ROUNDING = 1e-8  # of the search (1e-9) and of sums in another order


def plans(chain: Chain) -> list[Naive]:
    return [plan for cuts in all_cuts(chain) if (plan := naive(chain, cuts)) is not None]


def check(chain: Chain) -> None:
    known = plans(chain)
    for objective in ("total", "bottleneck"):
        plan = split(chain, objective=objective, tolerance=1e-9)
        if not known:
            assert (plan.status, plan.cuts, plan.total_s) == (Status.INFEASIBLE, (), math.inf)
            assert plan.reason
            continue
        best = min(p.total_s if objective == "total" else p.period_s for p in known)
        found = plan.total_s if objective == "total" else plan.period_s
        assert plan.ok and plan.reason == ""
        assert found == pytest.approx(best, rel=ROUNDING, abs=1e-12)
        assert plan.lower_bound_s <= best * (1 + ROUNDING)
        assert plan.lower_bound_s >= found * (1 - 1e-8)
        check_plan(chain, plan)
    if known:
        check_bounds(chain, min(p.period_s for p in known))


def check_plan(chain: Chain, plan: ChainPlan) -> None:
    """The plan is what the model says of its cuts."""
    again = naive(chain, plan.cuts)
    assert again is not None
    assert plan.bottleneck_s == pytest.approx(again.bottleneck_s)
    assert plan.period_s == pytest.approx(again.period_s)
    assert plan.fill_s == pytest.approx(again.fill_s)
    assert plan.total_s == pytest.approx(again.total_s)
    assert (plan.depths, plan.memory_bytes) == (again.depths, pytest.approx(again.memory_bytes))
    assert all(
        need <= d.mem_bytes * (1 + 1e-9) for need, d in zip(plan.memory_bytes, chain.devices, strict=True)
    )


def check_bounds(chain: Chain, best_s: float) -> None:
    assert bounds(chain).best_s <= best_s * (1 + 1e-9)
    assert relaxed_bound(chain, tolerance=1e-3) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("link", ["overlap", "blocking", "free"])
@settings(max_examples=200)
@given(data=st.data())
def test_without_caps_equals_brute_force(link: str, data: st.DataObject) -> None:
    check(data.draw(chains(link=link)))


@pytest.mark.parametrize("link", ["overlap", "blocking", "free"])
@settings(max_examples=200)
@given(data=st.data())
def test_with_caps_equals_brute_force(link: str, data: st.DataObject) -> None:
    check(data.draw(chains(link=link, capped=True)))


@settings(max_examples=100)
@given(chains(capped=True, depth="low_memory"))
def test_with_caps_and_low_memory_equals_brute_force(chain: Chain) -> None:
    check(chain)


def big(seed: int, s: int, n: int, *, uniform: bool = False, slow: float = 0.5, **keywords: Any) -> Chain:
    rng = np.random.default_rng(seed)
    work, speeds = rng.uniform(0.2, 1.8, n), rng.choice([1.0, 0.5, 0.25], s)
    period = float(work.sum() / speeds.sum())
    cuts = np.ones(n + 1) if uniform else rng.uniform(0.2, 1.0, n + 1)
    wires = [Link(bandwidth_bytes_per_s=1 / (period * float(x))) for x in rng.uniform(0.01, slow, 2 * s)]
    caps = keywords.pop("mem_bytes", math.inf)
    return Chain(
        layers=Layers(work_s=work.tolist(), cut_bytes=cuts.tolist(), **keywords.pop("layers", {})),
        devices=[Device(name=f"d{i}", speed=float(f), mem_bytes=caps) for i, f in enumerate(speeds)],
        links=wires[: s - 1],
        back=wires[s : 2 * s - 1],
        loop=wires[s - 1],
        loop_back=wires[-1],
        **{"micro_batches": 4 * s, **keywords},
    )


def path_total(chain: Chain, period_s: float) -> float:
    """Fill of the best split of a period, without caps: the textbook's dynamic program, cut by cut."""
    n, s = len(chain.layers), len(chain)
    work = np.concatenate([[0.0], np.cumsum(chain.layers.work_s)])
    value = np.full(n + 1, math.inf)
    value[n] = chain.layers.head_s / chain.devices[0].speed
    for i in reversed(range(s)):
        wire, back = [*chain.links, chain.loop][i], [*chain.back, chain.loop_back][i]
        for b in range(n + 1):
            one, two = wire.seconds(chain.layers.cut_bytes[b]), back.seconds(chain.layers.cut_bytes[b])
            value[b] = value[b] + one + two if max(one, two) <= period_s else math.inf
        stage = (work[None, :] - work[:, None]) / chain.devices[i].speed
        allowed = (stage <= period_s) & np.triu(np.ones((n + 1, n + 1), dtype=bool), 1)
        value = np.where(allowed, value[None, :] + stage, math.inf).min(axis=1)
    return float(value[0])


@pytest.mark.parametrize("seed", range(3))
def test_the_least_fill_of_many_layers_equals_the_textbook_dynamic_program(seed: int) -> None:
    chain = big(seed, 8, 90)
    low_s = relaxed_bound(chain)
    asked = low_s * np.array([1.0, 1.003, 1.01, 1.03, 1.1, 1.5, 8.0])
    table = LeastFill(Walk(chain), asked)
    assert table.fill_s == pytest.approx([path_total(chain, float(p)) for p in asked], rel=1e-12)
    rows = np.flatnonzero(np.isfinite(table.fill_s))
    assert rows.size > 3
    for cuts, row in zip(table.cuts(rows), rows, strict=True):
        plan = evaluate(chain, cuts.tolist())
        assert plan.fill_s == pytest.approx(table.fill_s[row])
        assert plan.period_s <= asked[row] * (1 + 1e-12)


@pytest.mark.parametrize("keywords", [{}, {"uniform": True}, {"overlap": False}, {"micro_batches": 3}])
def test_a_loose_tolerance_is_kept_and_stated(keywords: dict[str, Any]) -> None:
    chain = big(1, 12, 150, **keywords)
    for objective in ("total", "bottleneck"):
        exact, rough = (
            split(chain, objective=objective, tolerance=1e-10),
            split(chain, objective=objective, tolerance=0.02),
        )
        a, b = (p.total_s if objective == "total" else p.period_s for p in (exact, rough))
        assert a <= b * (1 + 1e-10) and b <= a * 1.0205
        assert rough.lower_bound_s <= a * (1 + 1e-10)
        assert rough.lower_bound_s >= 0.98 * b


def test_the_best_period_is_not_the_best_total() -> None:
    chain = big(7, 16, 100)
    by_total, by_period = split(chain), split(chain, objective="bottleneck")
    assert by_total.total_s < 0.995 * by_period.total_s
    assert by_period.period_s < by_total.period_s


def test_greedy_with_non_empty_stages_would_be_wrong() -> None:
    # The furthest end first takes [0, 3) and leaves one layer for two devices: stopping short is needed.
    layers = Layers(work_s=[1.0, 1.0, 1.0, 1.0], cut_bytes=[0.0] * 5)
    devices = [Device(name=str(i), speed=f) for i, f in enumerate([3.0, 1.0, 1.0])]
    plan = split(
        Chain(layers=layers, devices=devices, links=[Link()] * 2, back=[Link()] * 2), objective="bottleneck"
    )
    assert (plan.cuts, plan.period_s) == ((0, 2, 3, 4), 1.0)


def test_short_memory_slows_the_pace_instead_of_refusing() -> None:
    layers = Layers(work_s=[1.0, 1.0], cut_bytes=[0.0, 1.0, 0.0], activation_bytes=[1.0, 1.0])
    wire = Link(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    two = [Device(name="a", mem_bytes=6.0), Device(name="b", mem_bytes=6.0)]
    chain = Chain(layers=layers, devices=two, links=[wire], back=[Link(latency_s=1.0)], micro_batches=100)
    assert split(chain).depths == (5, 2)  # the round trip over the link takes 2 s: two more in flight
    tight = replace(chain, devices=[replace(two[0], mem_bytes=4.0), two[1]])
    plan = split(tight)
    assert (plan.bottleneck_s, plan.period_s, plan.depths) == (1.0, pytest.approx(2.0), (4, 2))
    assert plan.total_s == pytest.approx(plan.fill_s + 99 * 2.0)
    refused = split(replace(chain, devices=[replace(two[0], mem_bytes=3.0), two[1]]))
    assert not refused.ok and "layer 0" not in refused.reason


@pytest.mark.parametrize("objective", ["total", "bottleneck"])
@pytest.mark.parametrize("depth", ["per_link", "low_memory"])
def test_caps_that_couple_depths_and_cuts(objective: Any, depth: Any) -> None:
    """Links slower than a period and uneven cuts: the labelled pass decides. Judged by all splits."""
    settled = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        memory = {
            "state_bytes": rng.uniform(0, 2, 14).tolist(),
            "activation_bytes": rng.uniform(0, 1, 14).tolist(),
        }
        chain = big(seed, 4, 14, slow=1.3, depth=depth, mem_bytes=22.0, layers=memory)
        known = [plan for cuts in all_cuts(chain) if (plan := evaluate(chain, cuts)).ok]
        plan = split(chain, objective=objective, tolerance=1e-9)
        assert plan.ok == bool(known)
        if known:
            best = min(p.total_s if objective == "total" else p.period_s for p in known)
            assert (plan.total_s if objective == "total" else plan.period_s) == pytest.approx(
                best, rel=ROUNDING
            )
            settled += 1
    assert settled >= 3


def test_as_many_devices_as_layers_and_one_device() -> None:
    layers = Layers(work_s=[1.0, 2.0, 3.0], cut_bytes=[0.0] * 4, before_s=1.0, head_s=0.5)
    three = Chain(
        layers=layers,
        devices=[Device(name=c) for c in "abc"],
        links=[Link()] * 2,
        back=[Link()] * 2,
        micro_batches=4,
    )
    assert split(three).cuts == (0, 1, 2, 3)
    one = Chain(layers=layers, devices=[Device(name="a", speed=2.0)], links=[], back=[], micro_batches=4)
    plan = split(one)
    assert (plan.cuts, plan.depths, plan.total_s, plan.lower_bound_s) == ((0, 3), (1,), 15.0, 15.0)
    assert split(one, objective="bottleneck").lower_bound_s == 3.75


def test_nothing_to_do_takes_no_time() -> None:
    layers = Layers(work_s=[0.0, 0.0], cut_bytes=[0.0] * 3)
    chain = Chain(
        layers=layers,
        devices=[Device(name="a"), Device(name="b")],
        links=[Link()],
        back=[Link()],
        micro_batches=4,
    )
    assert (split(chain).total_s, split(chain, objective="bottleneck").period_s) == (0.0, 0.0)


def test_a_chain_of_any_scale_is_split_alike() -> None:
    chain = big(3, 6, 40)
    cuts = split(chain).cuts
    for scale in (1e-12, 1e12):
        layers = replace(chain.layers, work_s=[scale * w for w in chain.layers.work_s])
        slowed = [
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale) for link in chain.links
        ]
        back = [
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale) for link in chain.back
        ]
        other = replace(chain, layers=layers, links=slowed, back=back, loop=Link(), loop_back=Link())
        same = replace(chain, loop=Link(), loop_back=Link())
        assert split(other).total_s == pytest.approx(scale * split(same).total_s, rel=2e-4)
    assert split(chain).cuts == cuts  # and twice the same


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"objective": "fill"}, "objective='fill' must be"),
        ({"tolerance": 0.0}, "tolerance=0.0 must lie in"),
        ({"tolerance": math.nan}, "tolerance=nan must lie in"),
    ],
)
def test_malformed_arguments_raise(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(big(0, 2, 4), **keywords)


def test_bounds_say_what_they_say() -> None:
    layers = Layers(
        work_s=[4.0, 1.0, 1.0, 1.0, 4.0, 1.0],
        cut_bytes=[0.0] * 7,
        state_bytes=[1.0] * 6,
        before_s=1.0,
        head_s=1.0,
    )
    devices = [Device(name="a", speed=2.0, mem_bytes=1.0), Device(name="b"), Device(name="c", mem_bytes=1.0)]
    chain = Chain(layers=layers, devices=devices, links=[Link()] * 2, back=[Link()] * 2)
    found = bounds(chain)
    assert found.work_s == 14.0 / 4.0
    assert found.layer_s == 2.0
    assert found.crowd_s == pytest.approx(4.0)  # two layers of 4: both on the fast one, or one on a slow one
    assert found.memory_s == pytest.approx(4.0)  # a: one layer of 4 and its own 2; c: one of 4; b the rest
    assert found.relaxed_s <= found.best_s <= split(chain, objective="bottleneck").period_s == 7.0


def test_relaxed_bounds_rule_out_neighbours_cheaply() -> None:
    chain = big(5, 16, 200)
    best_s = split(chain, objective="bottleneck", tolerance=1e-9).period_s
    assert 0.99 * best_s < relaxed_bound(chain) <= best_s


def test_every_pair_of_orders_of_three_devices_agrees_with_brute_force() -> None:
    devices = [
        Device(name="a", speed=4.0),
        Device(name="b", speed=2.0, mem_bytes=9.0),
        Device(name="c", mem_bytes=5.0),
    ]
    layers = Layers(
        work_s=[3.0, 1.0, 4.0, 1.0, 5.0],
        cut_bytes=[2.0, 7.0, 1.0, 8.0, 2.0, 8.0],
        state_bytes=[2.0, 1.0, 1.0, 1.0, 2.0],
    )
    wire = Link(bandwidth_bytes_per_s=6.0)
    for order in itertools.permutations(devices):
        chain = Chain(layers=layers, devices=order, links=[wire] * 2, back=[wire] * 2, micro_batches=6)
        check(chain)
