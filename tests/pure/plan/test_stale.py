"""The stale engine's estimate: ranks that never wait, the server's port; and devices whose times differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.cluster.engine_times import least_s
from lightning_hetero.plan.parallel import balanced, ddp
from lightning_hetero.plan.setup import Setup
from lightning_hetero.plan.stale import stale
from lightning_hetero.types import AffineCost
from tests.pure.plan.kit import layered, lines, model

pytestmark = pytest.mark.pure
COSTS = (AffineCost(fixed_s=0.001, per_sample_s=0.001),) * 4
CALM = lines((1.0,) * 4, costs=COSTS)


def test_a_step_is_that_of_workers_which_never_rest_and_all_samples_are_shared() -> None:
    """64 samples by devices of 1, 1, 1/2 and 1/4 that take 3 ms each: 2.75 samples per 3 ms."""
    found = stale(lines())
    assert found.bound_s == pytest.approx(64 / 2.75 * 3e-3) and found.step_s == pytest.approx(1.03 * found.bound_s)
    assert found.shares == pytest.approx([64 / 2.75 * speed for speed in (1.0, 1.0, 0.5, 0.25)])
    assert found.idle == pytest.approx(1.0 - 1.0 / 1.03) and found.strategy == "hetero_stale"


def test_transfers_take_their_time_and_the_server_has_one_port() -> None:
    fast = layered([{"count": 3}], {"bandwidth": "1 GB/s"}, model=model(param_bytes=1e6))
    slow = layered([{"count": 3}], {"bandwidth": "40 MB/s"}, model=model(param_bytes=1e6))
    assert stale(slow).step_s > stale(fast).step_s
    assert stale(slow).step_s == pytest.approx(2 * 4e6 / 40e6)  # two remote ranks, one direction
    assert any("the server's port is the limit" in reason for reason in stale(slow).reasons)


def test_a_chunk_that_does_not_fit_is_said() -> None:
    setup = layered([{"mem": 400}, {"speed": 0.1}], model=model(state_bytes=30.0, activation_bytes=7.0))
    found = stale(setup)
    assert not found.ok and "rank 0" in found.reasons[0] and "holds 10 samples besides the model" in found.reasons[0]


def unsteady(part: float, factor: float = 8.0, seed: int = 0) -> Setup:
    slow = np.where(np.random.default_rng(seed).random((4, 64)) < part, factor, 1.0)
    return replace(CALM, slowness=tuple(tuple(float(x) for x in row) for row in slow))


@pytest.mark.parametrize("engine", [ddp, balanced, stale])
def test_series_of_ones_are_what_costs_say(engine: object) -> None:
    assert callable(engine)
    ones = replace(CALM, slowness=((1.0,) * 5,) * 4)
    assert engine(ones).step_s == pytest.approx(engine(CALM).step_s, rel=1e-12)


def test_a_barrier_takes_the_mean_of_the_slowest_by_hand() -> None:
    two = lines((1.0, 1.0), costs=COSTS[:2], global_batch=8, slowness=((1.0, 2.0, 1.0), (1.0, 1.0, 3.0)))
    assert ddp(two).step_s == pytest.approx((0.005 + 0.010 + 0.015) / 3)


def test_nobody_waits_under_the_stale_engine_and_nobody_can_predict_spells() -> None:
    setup = unsteady(0.2)
    stock, ours, server = (engine(setup).step_s for engine in (ddp, balanced, stale))
    assert ours <= 1.03 * stock  # its guard
    assert least_s(COSTS, 64.0) <= server < 0.75 * min(stock, ours)
    assert "in each step another is late" in ddp(setup).reasons[0]


def test_bad_series_are_refused() -> None:
    for slowness in (((1.0,),), ((1.0,), (1.0,), (1.0,), (1.0, 2.0)), ((),) * 4):
        with pytest.raises(ValueError, match="a series for every device"):
            replace(CALM, slowness=slowness)
    with pytest.raises(ValueError, match="finite numbers > 0"):
        replace(CALM, slowness=((1.0,), (1.0,), (1.0,), (0.0,)))
