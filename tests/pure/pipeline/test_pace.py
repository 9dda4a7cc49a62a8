"""Stages that take an emulated device's time; the clock is the test's."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero import Scenario
from lightning_hetero.emulate.throttle import scenario_steps
from lightning_hetero.pipeline.decide.plans import parts_of, unit_costs
from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.pace import EmulatedPace
from lightning_hetero.types import GroupPlan

GROUP = GroupPlan(ranks=(2, 0), cuts=(0, 2, 6), samples=8, micro_batches=(4, 4), depths=(2, 2))
MODEL = unit_costs([f"{i}" for i in range(6)])


class Clock:
    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 0.0, late_s
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds + self.late_s


def pace(rank: int, clock: Clock, calls: int = 1, **scenario: object) -> EmulatedPace:
    found = EmulatedPace(
        torch.device("cpu"),
        Scenario(**scenario),  # type: ignore[arg-type]
        rank,
        clock=lambda: clock.now_s,
        sleep=clock.sleep,
    )
    found.parts = parts_of(MODEL, GROUP, rank, calls)
    return found


def test_all_parts_make_the_whole() -> None:
    parts = parts_of(MODEL, GROUP, 2) | parts_of(MODEL, GROUP, 0)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts[Kind.FORWARD, 0] == pytest.approx(2 / 18) and parts[Kind.BACKWARD, 1] == pytest.approx(8 / 18)


def test_a_stage_sleeps_its_part_less_the_real_work() -> None:
    clock = Clock()
    slow = pace(0, clock, speeds=[0.5], sample_s=0.9)
    slow.computed(Kind.FORWARD, 1, 4, 0.1)  # no training step has begun
    slow.begin(0)
    slow.computed(Kind.FORWARD, 1, 4, 0.1)
    slow.computed(Kind.BACKWARD, 1, 4, 0.0)
    slow.end()
    whole_s = 0.9 * 4 / 0.5
    assert slow.busy_s == pytest.approx(whole_s * 12 / 18), "sleep counts"
    slow.computed(Kind.FORWARD, 1, 4, 0.1)
    assert clock.slept == pytest.approx([whole_s * 4 / 18 - 0.1, whole_s * 8 / 18])


def test_oversleeping_is_made_up_for() -> None:
    clock = Clock(late_s=0.04)
    slow = pace(0, clock, speeds=[1.0], sample_s=0.9)
    slow.begin(0)
    for _ in range(3):
        slow.computed(Kind.FORWARD, 1, 4, 0.0)
    assert clock.slept == pytest.approx([0.8, 0.76, 0.76])


def test_a_scenario_may_pass_with_time() -> None:
    clock, scenario = Clock(), Scenario(sample_s=0.9).slow(0, 2, at_step=3)
    steps = scenario_steps(1.0, clock=lambda: clock.now_s)
    slow = EmulatedPace(
        torch.device("cpu"), scenario, 0, step_of=steps, clock=lambda: clock.now_s, sleep=clock.sleep
    )
    slow.parts = parts_of(MODEL, GROUP, 0)
    clock.now_s = 100.0
    for batch in range(5):
        slow.begin(batch)
        slow.computed(Kind.FORWARD, 1, 4, 0.0)
    assert clock.slept == pytest.approx([0.8, 0.8, 0.8, 0.8, 1.6])  # they begin 0, 0.8, 1.6, 2.4 and 3.2 s later
    assert [scenario_steps(None)(batch) for batch in (0, 7)] == [0, 7]


def test_several_calls_share_the_work() -> None:
    clock = Clock()
    slow = pace(2, clock, calls=2, speeds=[1.0], sample_s=0.9)
    slow.begin(0)
    slow.computed(Kind.FORWARD, 0, 4, 0.0)
    slow.computed(Kind.FORWARD, 2, 4, 0.0)
    slow.computed(Kind.HEAD, 4, 4, 0.0)  # nothing: the head has no work of its own here
    assert clock.slept == pytest.approx([3.6 * 2 / 18 / 2] * 2)


def test_real_work_is_stretched_where_no_times_are_given() -> None:
    clock = Clock()
    slow = pace(0, clock, speeds=[1.0, 0.25, 0.25, 0.25])
    fast = slow
    fast.begin(0)
    fast.computed(Kind.FORWARD, 1, 4, 2.0)
    assert clock.slept == []
    slow = pace(2, clock, speeds=[1.0, 0.25, 0.25, 0.25])
    slow.begin(0)
    slow.computed(Kind.FORWARD, 0, 4, 2.0)
    assert clock.slept == pytest.approx([6.0])
