"""Devices whose times differ from step to step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.plan.parallel import balanced, ddp
from lightning_hetero.plan.setup import Setup
from lightning_hetero.plan.stale import least_s, stale
from lightning_hetero.types import AffineCost

COSTS = tuple(AffineCost(fixed_s=0.001, per_sample_s=0.001) for _ in range(4))
CALM = Setup(cluster=equal_cluster(4), global_batch=64, costs=COSTS, exchange_s=0.0)


def unsteady(part: float, factor: float = 8.0, seed: int = 0) -> Setup:
    rng = np.random.default_rng(seed)
    slow = np.where(rng.random((4, 64)) < part, factor, 1.0)
    return replace(CALM, slowness=tuple(tuple(float(x) for x in row) for row in slow))


def test_series_of_ones_are_what_costs_say() -> None:
    ones = replace(CALM, slowness=((1.0,) * 5,) * 4)
    for engine in (ddp, stale):
        assert engine(ones).step_s == pytest.approx(engine(CALM).step_s, rel=1e-12)
    assert balanced(ones).step_s == pytest.approx(balanced(CALM).step_s, rel=1e-12)


def test_a_barrier_takes_the_mean_of_the_slowest_by_hand() -> None:
    two = replace(
        CALM, cluster=equal_cluster(2), costs=COSTS[:2], global_batch=8, slowness=((1.0, 2.0, 1.0), (1.0, 1.0, 3.0))
    )
    assert ddp(two).step_s == pytest.approx((0.005 + 0.010 + 0.015) / 3)


def test_nobody_waits_under_the_stale_engine_and_nobody_can_predict_spells() -> None:
    setup = unsteady(0.2)
    stock, ours, server = (engine(setup).step_s for engine in (ddp, balanced, stale))
    assert ours <= 1.03 * stock  # its guard
    assert server < 0.75 * min(stock, ours)
    assert "in each step another is late" in ddp(setup).reasons[0]
    assert server >= 0.95 * least_s(COSTS, 64.0)


def test_bad_series_are_refused() -> None:
    for slowness in (((1.0,),), ((1.0,), (1.0,), (1.0,), (1.0, 2.0)), ((),) * 4):
        with pytest.raises(ValueError, match="a series for every device"):
            replace(CALM, slowness=slowness)
    with pytest.raises(ValueError, match="finite numbers > 0"):
        replace(CALM, slowness=((1.0,), (1.0,), (1.0,), (0.0,)))
