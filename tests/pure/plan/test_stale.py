"""The stale engine's estimate: what simulation gives, its bound, and the sample of many devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stale.speeds import SimulatedSpeeds
from lightning_hetero.plan.stale import least_s, stale
from lightning_hetero.types import AffineCost
from tests.pure.plan.kit import layered, lines, model

pytestmark = pytest.mark.pure


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6), st.floats(0.0, 3.0), st.integers(1, 200))
def test_the_bound_is_that_of_workers_who_never_rest(speeds: list[float], launch: float, batch: int) -> None:
    known = SimulatedSpeeds([[(0.0, v)] for v in speeds], launch_work=launch)
    costs = [AffineCost(fixed_s=launch / v, per_sample_s=1.0 / v) for v in speeds]
    assert least_s(costs, batch) == pytest.approx(known.ideal_s([batch]), rel=1e-9)


def test_a_step_is_near_its_bound_and_all_samples_are_shared() -> None:
    found = stale(lines())
    assert found.bound_s <= found.step_s <= 1.10 * found.bound_s
    assert sum(found.shares) == pytest.approx(64) and found.shares[0] > 3 * found.shares[3]
    assert found.idle < 0.1 and "hetero_stale" in found.overrides[0]


def test_transfers_take_their_time_and_the_server_has_one_port() -> None:
    fast = layered([{"count": 3}], {"bandwidth": "1 GB/s"}, model=model(param_bytes=1e6))
    slow = layered([{"count": 3}], {"bandwidth": "40 MB/s"}, model=model(param_bytes=1e6))
    assert stale(slow).step_s > stale(fast).step_s
    assert stale(slow).step_s == pytest.approx(2 * 4e6 / 40e6)  # two remote ranks, one direction
    assert any("the server's port is the limit" in reason for reason in stale(slow).reasons)


def test_a_chunk_that_does_not_fit_is_said() -> None:
    setup = layered([{"mem": 400}, {"speed": 0.1}], model=model(state_bytes=30.0, activation_bytes=7.0))
    found = stale(setup)
    assert not found.ok and "rank 0" in found.reasons[0] and "holds 10 beside the model" in found.reasons[0]


def test_of_many_devices_a_sample_by_speed_tells_as_much() -> None:
    setup = lines(tuple((1.0, 0.5, 0.25)[rank % 3] for rank in range(24)), fixed_s=2e-3)
    whole, some = stale(setup), stale(setup, simulated=12)
    assert some.step_s == pytest.approx(whole.step_s, rel=0.05)
    assert sum(some.shares) == pytest.approx(setup.global_batch)
    assert any("simulated on 12 of the 24 devices" in reason for reason in some.reasons)
    assert not any("simulated on" in reason for reason in whole.reasons)
    for rank in range(3):
        assert some.shares[rank] == pytest.approx(whole.shares[rank], rel=0.15)
