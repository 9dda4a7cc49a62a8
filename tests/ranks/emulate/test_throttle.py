"""`Throttle` with a clock that only moves when told to: what is slept, and scripted faults."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.emulate import Scenario, Throttle
from tests.ranks.emulate.kit import EMULATED, Time


def test_sleeps_sum_to_the_scenarios_work() -> None:
    time, scenario = Time(), EMULATED.jittered(0.3)
    throttle = time.throttle(scenario, 1)
    for step in range(20):
        throttle.begin(step, samples=step)
        time.now_s += 0.7  # real work is not subtracted
        throttle.finish()
    assert time.sleeps == pytest.approx([scenario.work_s(1, step, step) for step in range(20)])


def test_no_samples_cost_the_fixed_time() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    throttle.begin(0, samples=0)
    assert throttle.finish() == pytest.approx(0.1 / 0.25)


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20))
def test_late_sleeps_are_made_up_for(late_s: list[float]) -> None:
    time = Time(late_s)
    throttle = time.throttle(EMULATED, 1)
    for step in range(len(late_s) + 2):  # work is 0.8 s each: two more steps make up for anything
        throttle.begin(step, samples=10)
        throttle.finish()
    assert time.now_s - 100.0 == pytest.approx((len(late_s) + 2) * 0.8)
    assert all(pause > 0 for pause in time.sleeps)


def test_a_suspended_process_makes_up_for_one_step_only() -> None:
    time = Time(late_s=[1000.0])
    throttle = time.throttle(EMULATED, 1)
    for step in range(3):
        throttle.begin(step, samples=10)
        throttle.finish()
    assert time.sleeps == pytest.approx([0.8, 0.8])  # the second step sleeps nothing, the third in full


def test_a_late_sleep_is_spread_over_steps_shorter_than_it() -> None:
    time = Time(late_s=[0.5])
    throttle = time.throttle(EMULATED, 1)
    for step, samples in enumerate([10, 0, 0, 0]):  # 0.8 s, then 0.4 s each
        throttle.begin(step, samples)
        throttle.finish()
    assert time.sleeps == pytest.approx([0.8, 0.3, 0.4])
    assert time.now_s - 100.0 == pytest.approx(0.8 + 3 * 0.4)


@given(st.floats(0.1, 1.0), st.floats(0.001, 2.0), st.floats(1.0, 4.0))
def test_real_work_is_stretched_to_the_speed(speed: float, work_s: float, factor: float) -> None:
    time = Time()
    throttle = time.throttle(Scenario(speeds=[speed]), 0)
    throttle.begin(0, samples=3)
    time.now_s += work_s
    throttle.finish(work_factor=factor)
    assert sum(time.sleeps) + factor * work_s == pytest.approx(factor * work_s / speed)


def test_finish_without_begin_and_twice_does_nothing() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 0)
    assert throttle.finish() == 0.0
    throttle.begin(0, samples=1)
    throttle.finish()
    assert throttle.finish() == 0.0
    assert len(time.sleeps) == 1


def test_faults_hit_their_rank_and_step_only() -> None:
    killed: list[str] = []
    scenario = EMULATED.kill(1, 3).stall(1, 4, seconds=9.0).raise_at(1, 5).kill(0, 6)
    time = Time()
    throttle = time.throttle(scenario, 1, kill=lambda: killed.append("now"))
    for step in (0, 1, 2):
        throttle.begin(step, samples=0)
    assert (killed, time.sleeps) == ([], [])
    throttle.begin(3, samples=0)
    assert killed == ["now"]
    throttle.begin(4, samples=0)
    assert time.sleeps == [9.0]
    with pytest.raises(RuntimeError, match=r"scripted fault.*rank 1 at step 5"):
        throttle.begin(5, samples=0)
    assert throttle.finish() == 0.0  # the step never began
    throttle.begin(6, samples=0)
    assert killed == ["now"]  # rank 0's own


def test_a_fault_comes_once_and_also_if_its_step_was_skipped() -> None:
    time = Time()
    throttle = time.throttle(EMULATED.stall(0, 4, seconds=9.0), 0)
    throttle.begin(2, samples=0)
    throttle.begin(7, samples=0)  # the rank was granted nothing in between
    assert time.sleeps == [9.0]
    throttle.begin(7, samples=0)  # another batch of the same step
    assert time.sleeps == [9.0]
    throttle.begin(4, samples=0)  # another fit
    assert time.sleeps == [9.0, 9.0]


def test_kill_is_a_signal_nobody_can_catch_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    Throttle(Scenario().kill(0, 0), 0).begin(0, samples=1)
    assert sent == [(os.getpid(), signal.SIGKILL)]


def test_memory_cap() -> None:
    throttle = Time().throttle(EMULATED.cap(1, 8), 1)
    throttle.begin(0, samples=8)
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 got 9 samples at step 1.*at most 8"):
        throttle.begin(1, samples=9)
    Time().throttle(EMULATED.cap(1, 8), 0).begin(0, samples=9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="must be a Scenario"):
        Throttle({"speeds": [1.0]}, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rank=-1"):
        Throttle(EMULATED, -1)
    with pytest.raises(ValueError, match=r"highest speed is 4.*divide all speeds by 4"):
        Throttle(Scenario(speeds=[1.0]).change([4.0], at_step=5), 0)
