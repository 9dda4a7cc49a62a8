"""Cost models: values by hand, and `most_samples` as the inverse of `seconds`."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.types import AffineCost, Allocation, Cost, LayerCost, Status


def test_affine_is_fixed_plus_slope() -> None:
    cost = AffineCost(fixed_s=0.5, per_sample_s=0.25)
    assert [cost.seconds(x) for x in (0, 1, 10)] == [0.5, 0.75, 3.0]
    assert cost.most_samples(3.0) == 10.0
    assert cost.most_samples(0.4) == -math.inf
    flat = AffineCost(fixed_s=0.5, per_sample_s=0.0)
    assert (flat.most_samples(0.5), flat.most_samples(math.nextafter(0.5, 0.0))) == (math.inf, -math.inf)


def test_a_slower_device_takes_so_many_times_the_time_and_as_many_bytes() -> None:
    line = AffineCost(fixed_s=1.0, per_sample_s=0.5)
    assert line.times(3.0).seconds(4) == 3.0 * line.seconds(4)
    layer = LayerCost(name="layer", forward=line, backward=line.times(2.0), param_bytes=8.0)
    assert layer.times(0.5) == LayerCost(
        name="layer", forward=line.times(0.5), backward=line, param_bytes=8.0
    )


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(AffineCost, name) for name in ("fixed_s", "per_sample_s")],
)
def test_bad_coefficients_are_refused_by_name(kind: type[Any], name: str, bad: float) -> None:
    good = dict.fromkeys((field.name for field in fields(kind)), 1.0)
    with pytest.raises(ValueError, match=f"{kind.__name__}.{name}={bad!r}"):
        kind(**(good | {name: bad}))


QUARTERS = st.integers(0, 8).map(lambda n: n / 4)


@given(
    st.builds(AffineCost, fixed_s=QUARTERS, per_sample_s=QUARTERS),
    st.integers(0, 80),
)
def test_costs_never_decrease_and_the_inverse_is_the_last_sample_in_time(cost: Cost, quarter: int) -> None:
    deadline_s = quarter / 4
    times = [cost.seconds(x) for x in range(100)]
    assert times == sorted(times)
    most = cost.most_samples(deadline_s)
    for x, t in enumerate(times):
        if x <= most - 1e-9:
            assert t <= deadline_s + 1e-9
        if x >= most + 1e-9:
            assert t > deadline_s - 1e-9
    if most == -math.inf:
        assert times[0] > deadline_s


def test_an_allocation_is_ok_only_when_optimal() -> None:
    assert Allocation(shares=(1, 2)).ok
    assert not Allocation(shares=(), status=Status.INFEASIBLE, reason="why").ok
