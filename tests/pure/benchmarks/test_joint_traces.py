"""Traces: what is generated is reproducible, in order, and as often in each state as was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.joint.simulated.traces import (
    Phase,
    Trace,
    degraded_links,
    diurnal_load,
    markov_speeds,
    merged,
    price_spikes,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_phase_holds_from_its_start_until_the_next() -> None:
    first, second = Phase(start=0, slowness=(1.0,)), Phase(start=5, slowness=(2.0,))
    by_batch, by_second = Trace([first, second]), Trace([first, second], by_batch=False)
    assert [by_batch.at(t, 1e9) for t in (0, 4, 5, 99)] == [first, first, second, second]
    assert [by_second.at(999, s) for s in (0.0, 4.9, 5.0)] == [first, first, second]


@pytest.mark.parametrize("starts", [[], [1.0], [0.0, 3.0, 2.0]])
def test_phases_out_of_order_are_refused(starts: list[float]) -> None:
    with pytest.raises(ValueError, match="give one or more, in order, the first at 0"):
        Trace([Phase(start=s, slowness=(1.0,)) for s in starts])


def test_speeds_dwell_as_long_and_stand_as_often_as_asked_for() -> None:
    trace = markov_speeds(2, 200_000, rng(), dwell=50, factors=(1.0, 4.0), odds=(0.5, 0.5))
    changes = len(trace.phases)
    assert changes == pytest.approx(2 * 200_000 / 50, rel=0.05)
    slow = sum(trace.at(t, 0.0).slowness[0] == 4.0 for t in range(0, 200_000, 10)) / 20_000
    assert slow == pytest.approx(0.5, abs=0.03)
    again = markov_speeds(2, 200_000, rng(), dwell=50, factors=(1.0, 4.0), odds=(0.5, 0.5))
    assert again.phases == trace.phases


def test_load_by_the_hour_rises_and_falls_half_a_period_apart() -> None:
    trace = diurnal_load(4, 480, period=240, most=3.0, steps=24)
    assert trace.at(0, 0.0).slowness == pytest.approx((1.0, 1.0, 3.0, 3.0))
    assert trace.at(120, 0.0).slowness == pytest.approx((3.0, 3.0, 1.0, 1.0))
    assert trace.at(240, 0.0).slowness == pytest.approx(trace.at(0, 0.0).slowness)


def test_a_degraded_rank_has_slow_links_both_ways_and_no_others() -> None:
    trace = degraded_links(3, 5_000, rng(), dwell=50, factor=8.0, part=0.3)
    seen = {tuple(sorted(phase.links)) for phase in trace.phases}
    only_rank_0 = ((0, 1), (0, 2), (1, 0), (2, 0))
    assert only_rank_0 in seen and () in seen
    assert {f for phase in trace.phases for f in phase.links.values()} == {8.0}


def test_merged_traces_multiply_and_change_when_any_of_them_does() -> None:
    a = Trace([Phase(start=0, slowness=(1.0, 2.0), links={(0, 1): 2.0}), Phase(start=4, slowness=(3.0, 1.0))])
    b = Trace([Phase(start=0, slowness=(2.0, 1.0), links={(0, 1): 3.0}), Phase(start=7, slowness=(1.0, 1.0))])
    c = price_spikes(2, 1, rng(), dwell=100)
    both = merged(a, b, c)
    assert [phase.start for phase in both.phases] == [0, 4, 7]
    assert [phase.slowness for phase in both.phases] == [(2.0, 2.0), (6.0, 1.0), (3.0, 1.0)]
    assert [dict(phase.links) for phase in both.phases] == [{(0, 1): 6.0}, {(0, 1): 3.0}, {}]
    assert all(phase.prices == c.phases[0].prices for phase in both.phases)
    with pytest.raises(ValueError, match="by batch and traces by second"):
        merged(a, Trace([Phase(start=0, slowness=(1.0, 1.0))], by_batch=False))
