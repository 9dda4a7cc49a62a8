"""`Throttle` with a clock that only moves when told to: what is slept, and scripted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.emulate import Fault, Scenario
from lightning_hetero.emulate import throttle as throttle_module
from lightning_hetero.emulate.throttle import Throttle
from tests.ranks.emulate.kit import EMULATED, Time


def work(time: Time, throttle: Throttle, step: int, samples: int, forward_s: float, backward_s: float) -> None:
    """One step of stock DDP: waiting for buffers, forward, backward, waiting for peers, optimizer."""
    throttle.begin(step, samples)
    time.now_s += 5.0  # DDP's broadcast
    throttle.begin_work()
    time.now_s += forward_s
    throttle.before_backward()
    time.now_s += 0.25  # what the engine does to the loss
    throttle.backward_began()
    for _ in range(2):
        time.now_s += backward_s / 2
        throttle.gradient_came()
    time.now_s += 7.0  # peers
    throttle.after_backward()
    time.now_s += 3.0  # the optimizer
    throttle.end()


def test_a_step_takes_the_scenarios_time_real_work_included() -> None:
    time, scenario = Time(), EMULATED.jittered(0.3)
    throttle = time.throttle(scenario, 1)
    for step in range(20):
        work(time, throttle, step, step, 0.01, 0.03)
    wanted = [scenario.work_s(1, step, step) for step in range(20)]
    # the first backward pass is taken for two forward passes, so the second step makes up for 10 ms
    assert time.sleeps == pytest.approx([wanted[0] - 0.03, wanted[1] - 0.05, *(w - 0.04 for w in wanted[2:])])
    assert throttle.pacer.taken_s == pytest.approx(sum(wanted)) == pytest.approx(throttle.pacer.wanted_s)


def test_a_slower_backward_pass_is_made_up_for_and_then_expected() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    for step, backward_s in enumerate([0.02, 0.02, 0.05, 0.05]):
        work(time, throttle, step, 10, 0.01, backward_s)
    first, second, third, fourth = time.sleeps
    assert [first, second, third] == pytest.approx([0.8 - 0.03] * 3)
    assert 0.8 - 0.06 - 0.03 <= fourth < 0.8 - 0.03 - 0.03  # what the third took too long, and a longer one ahead
    assert throttle.pacer.taken_s == pytest.approx(4 * 0.8, abs=0.03)


def test_several_backward_passes_of_a_step_are_work_but_not_the_waiting_between() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    throttle.begin(0, samples=10)
    for forward_s, backward_s in ((0.01, 0.02), (0.03, 0.04)):
        time.now_s += forward_s
        throttle.before_backward()
        throttle.backward_began()
        time.now_s += backward_s
        throttle.gradient_came()
        time.now_s += 5.0
        throttle.after_backward()
    throttle.end()
    assert time.sleeps == pytest.approx([0.8 - 0.03])
    assert throttle.pacer.taken_s == pytest.approx(0.8 - 0.03 + 0.10)


def test_a_step_whose_backward_nobody_told_of_sleeps_at_its_end() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    throttle.begin(0, samples=10)
    time.now_s += 0.3
    throttle.end()
    throttle.begin(1, samples=10)  # `loss.backward()` under manual optimization: only gradients are seen
    time.now_s += 0.2
    throttle.gradient_came()
    time.now_s += 5.0
    throttle.end()
    assert time.sleeps == pytest.approx([0.5, 0.6])


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 0.049), min_size=1, max_size=20))
def test_late_sleeps_are_made_up_for(late_s: list[float]) -> None:
    time = Time(late_s)
    pacer = time.pacer()
    for _ in range(len(late_s) + 1):
        time.now_s += 0.1
        pacer.pace(0.8, 0.1)
    assert time.now_s - 100.0 == pytest.approx((len(late_s) + 1) * 0.8)


def test_a_stall_is_not_hidden() -> None:
    """The same 50 ms are made up for, whether work comes in steps or in short pieces."""
    for wanted_s in (0.8, 0.02):
        time = Time(late_s=[1000.0])
        pacer = time.pacer()
        for _ in range(100):
            pacer.pace(wanted_s, 0.0)
        assert time.now_s - 100.0 == pytest.approx(1000.0 + 100 * wanted_s - 0.05)
        assert pacer.taken_s - pacer.wanted_s == pytest.approx(1000.0 - 0.05)


@given(st.floats(0.1, 1.0), st.floats(0.001, 0.5), st.floats(0.0, 0.01))
def test_real_work_is_stretched_to_the_speed(speed: float, forward_s: float, longer_s: float) -> None:
    time = Time()
    throttle = time.throttle(Scenario(speeds=[speed]), 0)
    work(time, throttle, 0, 3, forward_s, 2.0 * forward_s)
    assert sum(time.sleeps) == pytest.approx(3.0 * forward_s * (1.0 / speed - 1.0))
    work(time, throttle, 1, 3, forward_s, 2.0 * forward_s + longer_s)
    assert throttle.pacer.wanted_s == pytest.approx((6.0 * forward_s + longer_s) / speed)


def test_a_further_batch_of_a_step_ends_the_one_before() -> None:
    """A rank of the stale engine trains several before Lightning's batch ends."""
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    for _ in range(2):
        throttle.begin(0, samples=10)
        throttle.before_backward()
        throttle.backward_began()
        time.now_s += 0.02
        throttle.gradient_came()
    throttle.end()
    assert time.sleeps == pytest.approx([0.8, 0.8 - 0.02])
    assert throttle.pacer.wanted_s == pytest.approx(1.6)


def test_faults_hit_their_rank_and_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(throttle_module.os, "kill", lambda pid, signal: killed.append("now"))
    own = [Fault(step=4, rank=1, kind="stall", stall_s=9.0), Fault(step=5, rank=1, kind="exception")]
    scenario = replace(EMULATED, faults=own).kill(1, 3).kill(0, 6)
    time = Time()
    throttle = time.throttle(scenario, 1)
    for step in (0, 1, 2):
        throttle.begin(step, samples=0)
    assert (killed, time.sleeps) == ([], [])
    throttle.begin(3, samples=0)
    assert killed == ["now"]
    throttle.begin(4, samples=0)
    assert time.sleeps == [9.0]
    with pytest.raises(RuntimeError, match=r"scripted fault.*rank 1 at step 5"):
        throttle.begin(5, samples=0)
    throttle.end()  # the step never began
    assert time.sleeps == [9.0]
    throttle.begin(6, samples=0)
    assert killed == ["now"]  # rank 0's own


def test_a_fault_comes_once_and_also_if_its_step_was_skipped() -> None:
    time = Time()
    stall = Fault(step=4, rank=0, kind="stall", stall_s=9.0)
    throttle = time.throttle(replace(EMULATED, faults=[stall]), 0)
    throttle.begin(2, samples=0)
    throttle.begin(7, samples=0)  # the rank was granted nothing in between
    assert time.sleeps == [9.0]
    throttle.begin(7, samples=0)  # another batch of the same step
    assert time.sleeps == [9.0]
    throttle.begin(4, samples=0)  # another fit
    assert time.sleeps == [9.0, 9.0]


def test_memory_cap() -> None:
    capped = replace(EMULATED, mem_samples={1: 8})
    throttle = Time().throttle(capped, 1)
    throttle.begin(1, samples=9)
    throttle.hold(8)
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 got 9 samples at step 1.*at most 8"):
        throttle.hold(9)
    Time().throttle(capped, 0).hold(9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rank=-1"):
        Throttle(EMULATED, -1)
    with pytest.raises(ValueError, match=r"highest speed is 4.*divide all speeds by 4"):
        Throttle(Scenario(speeds=[1.0]).change([4.0], at_step=5), 0)
