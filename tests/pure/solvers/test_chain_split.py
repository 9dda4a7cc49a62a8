"""The split of a fixed order: against brute force over all splits, by the tests' own model, and SciPy's HiGHS."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_hetero.solvers.chain.chain import DeviceChain, Layers
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate
from lightning_hetero.solvers.chain.split import split
from lightning_hetero.types import Device, Link, Status
from tests.pure.solvers.chains import all_cuts, chains, naive

MEAN_GAP = 0.005


def check_plan(chain: DeviceChain, plan: ChainPlan) -> None:
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


@settings(max_examples=200)
@given(chains(capped=True))
def test_a_plan_is_what_the_model_says_of_its_cuts(chain: DeviceChain) -> None:
    plan = split(chain)
    if plan.ok:
        check_plan(chain, plan)
    else:
        assert (plan.status, plan.cuts, plan.total_s) == (Status.INFEASIBLE, (), math.inf)
        assert plan.reason


def big(seed: int, s: int, n: int, *, uniform: bool = False, slow: float = 0.5, **keywords: Any) -> DeviceChain:
    rng = np.random.default_rng(seed)
    work, speeds = rng.uniform(0.2, 1.8, n), rng.choice([1.0, 0.5, 0.25], s)
    period = float(work.sum() / speeds.sum())
    cuts = np.ones(n + 1) if uniform else rng.uniform(0.2, 1.0, n + 1)
    wires = [Link(bandwidth_bytes_per_s=1 / (period * float(x))) for x in rng.uniform(0.01, slow, 2 * s)]
    caps = keywords.pop("mem_bytes", math.inf)
    return DeviceChain(
        layers=Layers(work_s=work.tolist(), cut_bytes=cuts.tolist(), **keywords.pop("layers", {})),
        devices=[Device(name=f"d{i}", speed=float(f), mem_bytes=caps) for i, f in enumerate(speeds)],
        links=wires[:s],
        back=wires[s:],
        **{"micro_batches": 4 * s, **keywords},
    )


def gap(chain: DeviceChain) -> float | None:
    """Returns how much a split is worse than the best of all; None if there is none."""
    totals = [plan.total_s for cuts in all_cuts(chain) if (plan := evaluate(chain, cuts)).ok]
    plan = split(chain)
    assert plan.ok == bool(totals)
    return plan.total_s / min(totals) - 1.0 if totals else None


@pytest.mark.parametrize(
    "keywords",
    [{}, {"uniform": True, "micro_batches": 3}, {"mem_bytes": 22.0},
     {"mem_bytes": 22.0, "depth": "low_memory", "slow": 1.3}],
    ids=["roomy", "equal cuts", "caps", "caps, low memory"],
)  # fmt: skip
def test_the_mean_gap_to_brute_force_is_below_half_a_percent(keywords: dict[str, Any]) -> None:
    gaps: list[float] = []
    for seed in range(16):
        rng, more = np.random.default_rng(seed), dict(keywords)
        if "mem_bytes" in keywords:
            sizes = {"state_bytes": rng.uniform(0, 2, 12), "activation_bytes": rng.uniform(0, 1, 12)}
            more["layers"] = {name: values.tolist() for name, values in sizes.items()}
        if (found := gap(big(seed, 4, 12, **more))) is not None:
            gaps.append(found)
    assert len(gaps) >= 8
    assert min(gaps) >= -1e-9 and sum(gaps) / len(gaps) <= MEAN_GAP and max(gaps) <= 0.05, gaps


def least_total_by_milp(chain: DeviceChain) -> float:
    """Stage by stage a flow from layer 0 to the last, and the period at least each chosen stage's and link's."""
    n, stages = len(chain.layers), len(chain)
    work = np.concatenate([[0.0], np.cumsum(chain.layers.work_s)])
    arcs: list[tuple[int, int, int, float, float]] = []  # stage, start, end, its part of the fill, busy
    for stage, (device, ahead, back) in enumerate(
        zip(chain.devices, chain.links, chain.back, strict=True)
    ):
        for a, b in itertools.combinations(range(n + 1), 2):
            one, two = ahead.seconds(chain.layers.cut_bytes[b]), back.seconds(chain.layers.cut_bytes[b])
            compute = (work[b] - work[a]) / device.speed
            arcs.append((stage, a, b, compute + one + two, max(compute, one, two)))
    count = len(arcs)
    goal = np.array([arc[3] for arc in arcs] + [chain.micro_batches - 1.0])
    late = np.hstack([np.diag([arc[4] for arc in arcs]), -np.ones((count, 1))])
    flow = np.zeros((stages * (n + 1) + n + 1, count + 1))  # in front of each stage, and behind the last
    for i, (stage, a, b, _, _) in enumerate(arcs):
        flow[stage * (n + 1) + a, i] -= 1.0
        flow[(stage + 1) * (n + 1) + b, i] += 1.0
    want = np.zeros(len(flow))
    want[0], want[-1] = -1.0, 1.0
    found = milp(
        goal,
        constraints=[LinearConstraint(late, -np.inf, 0.0), LinearConstraint(flow, want, want)],
        integrality=np.r_[np.ones(count), 0.0],
        bounds=Bounds(np.zeros(count + 1), np.r_[np.ones(count), np.inf]),
    )
    return float(found.fun)


def test_the_mean_gap_to_a_mixed_integer_solver_is_below_half_a_percent() -> None:
    gaps: list[float] = []
    for seed in range(5):
        chain = big(seed, 4, 13)
        gaps.append(split(chain).total_s / least_total_by_milp(chain) - 1.0)
    assert min(gaps) >= -1e-6 and sum(gaps) / len(gaps) <= MEAN_GAP, gaps


def test_many_layers_are_merged_into_places_and_lose_little() -> None:
    """Twice as many layers of half the work are as easy to balance, and the split of 250 is found at 200 places."""
    fine = big(1, 8, 500, uniform=True)
    pairs = [a + b for a, b in zip(fine.layers.work_s[::2], fine.layers.work_s[1::2], strict=True)]
    coarse = replace(fine, layers=Layers(work_s=pairs, cut_bytes=[1.0] * 251))
    a, b = split(fine), split(coarse)
    assert a.ok and b.ok and a.total_s <= 1.005 * b.total_s
    assert a.period_s >= sum(fine.layers.work_s) / sum(device.speed for device in fine.devices)
    assert a.period_s <= 1.02 * sum(fine.layers.work_s) / sum(device.speed for device in fine.devices)


def test_stages_are_never_empty_even_where_a_slow_device_could_be_left_out() -> None:
    # The furthest end first takes [0, 3) and leaves one layer for two devices: stopping short is needed.
    layers = Layers(work_s=[1.0, 1.0, 1.0, 1.0], cut_bytes=[0.0] * 5)
    devices = [Device(name=str(i), speed=f) for i, f in enumerate([3.0, 1.0, 1.0])]
    plan = split(DeviceChain(layers=layers, devices=devices, links=[Link()] * 3, back=[Link()] * 3, micro_batches=99))
    assert (plan.cuts, plan.period_s) == ((0, 2, 3, 4), 1.0)


def test_short_memory_slows_the_pace_instead_of_refusing() -> None:
    layers = Layers(work_s=[1.0, 1.0], cut_bytes=[0.0, 1.0, 0.0], activation_bytes=[1.0, 1.0])
    links, back = [Link(bandwidth_bytes_per_s=1.0), Link()], [Link(latency_s=1.0), Link()]
    two = [Device(name="a", mem_bytes=6.0), Device(name="b", mem_bytes=6.0)]
    chain = DeviceChain(layers=layers, devices=two, links=links, back=back, micro_batches=100)
    assert split(chain).depths == (5, 2)  # the round trip over the link takes 2 s: two more in flight
    tight = replace(chain, devices=[replace(two[0], mem_bytes=4.0), two[1]])
    plan = split(tight)
    assert (plan.bottleneck_s, plan.period_s, plan.depths) == (1.0, pytest.approx(2.0), (4, 2))
    assert plan.total_s == pytest.approx(plan.fill_s + 99 * 2.0)
    refused = split(replace(chain, devices=[replace(two[0], mem_bytes=3.0), two[1]]))
    assert not refused.ok and "layer 0" not in refused.reason


def test_as_many_devices_as_layers_and_one_device() -> None:
    layers = Layers(work_s=[1.0, 2.0, 3.0], cut_bytes=[0.0] * 4, before_s=1.0, head_s=0.5)
    devices = [Device(name=c) for c in "abc"]
    three = DeviceChain(layers=layers, devices=devices, links=[Link()] * 3, back=[Link()] * 3, micro_batches=4)
    assert split(three).cuts == (0, 1, 2, 3)
    one = DeviceChain(layers=layers, devices=[Device(name="a", speed=2.0)], links=[], back=[], micro_batches=4)
    plan = split(one)
    assert (plan.cuts, plan.depths, plan.total_s) == ((0, 3), (1,), 15.0)


def test_nothing_to_do_takes_no_time() -> None:
    layers = Layers(work_s=[0.0, 0.0], cut_bytes=[0.0] * 3)
    devices = [Device(name="a"), Device(name="b")]
    chain = DeviceChain(layers=layers, devices=devices, links=[Link()] * 2, back=[Link()] * 2, micro_batches=4)
    assert split(chain).total_s == 0.0


def test_a_chain_of_any_scale_is_split_alike() -> None:
    chain = big(3, 6, 40)
    cuts = split(chain).cuts
    for scale in (1e-12, 1e12):
        layers = replace(chain.layers, work_s=[scale * w for w in chain.layers.work_s])
        links, back = (
            [replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / scale) for link in one]
            for one in (chain.links, chain.back)
        )
        other = split(replace(chain, layers=layers, links=links, back=back))
        assert other.total_s == pytest.approx(scale * split(chain).total_s, rel=2e-4)
    assert split(chain).cuts == cuts  # and twice the same
