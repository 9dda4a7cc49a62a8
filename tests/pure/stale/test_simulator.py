"""The simulator: its times, by closed forms and by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from benchmarks.stale.policies import WRITTEN
from benchmarks.stale.simulator import Costs, Hooks, Simulated, simulate
from benchmarks.stale.speeds import SimulatedSpeeds
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Assigned, Updated
from lightning_hetero.stale.decide.policy import _KNOWN, Asp, Bsp, by_name

POLICIES = {**_KNOWN, **WRITTEN}
UNIT_S = 1 / 16


def run(policy: str, speeds: SimulatedSpeeds, workers: int, epochs: list[list[int]], **more: Any) -> Simulated:
    coordinator = Coordinator(POLICIES[policy](**more.pop("settings", {})), workers=range(workers))
    return simulate(coordinator, speeds.work_s, workers=range(workers), epochs=epochs, **more)


def constant(*speeds: float, launch_work: float = 0.0) -> SimulatedSpeeds:
    return SimulatedSpeeds([[(0.0, v)] for v in speeds], launch_work=launch_work)


def global_steps(count: int, batch: int) -> list[int]:
    return [batch * (t + 1) for t in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_takes_pull_work_and_push_for_every_step(policy: str) -> None:
    more = {"settings": {"micro": 64}} if policy == "saps" else {}
    costs = Costs(pull_s=0.25, push_s=0.125)
    trace = run(policy, constant(2.0), 1, [global_steps(5, 16), [16, 24]], costs=costs, **more)
    assert trace.makespan_s == 6 * (0.375 + 8.0) + (0.375 + 4.0)
    assert trace.staleness == {0: 5 * 16 + 24}
    assert (trace.workers[0].busy_s, trace.workers[0].hold_s) == (6 * 8.0 + 4.0, 0.0)


@pytest.mark.parametrize("policy", ["flexible", "bsp"])
def test_equal_workers_take_an_equal_part_of_every_update(policy: str) -> None:
    speeds = constant(1.0, 1.0, 1.0, 1.0, launch_work=1.0)
    trace = run(policy, speeds, 4, [global_steps(6, 64)] * 2, costs=Costs(pull_s=0.5, push_s=0.25))
    assert trace.updates_s == [17.75 * k for k in range(1, 13)]
    assert [w.samples for w in trace.workers.values()] == [192] * 4
    assert trace.staleness == {0: 768}


def test_bsp_takes_the_sum_of_the_slowest_workers() -> None:
    times = np.random.default_rng(5).uniform(0.5, 3.0, (4, 20))
    trace = simulate(
        Coordinator(by_name("bsp"), workers=range(4)),
        lambda rank, step, now_s, samples: float(times[rank, step]) * samples,
        workers=range(4),
        epochs=[global_steps(10, 32), global_steps(10, 32)],
    )
    assert trace.updates_s == pytest.approx(np.cumsum([8 * times[:, k].max() for k in range(20)]))


class Counting(Hooks):
    """Checks the order of calls and counts samples."""

    def __init__(self) -> None:
        self.version = 0
        self.taken: dict[int, int] = {}
        self.pool = 0
        self.positions: list[Counter[int]] = []

    def begin(self, epoch: int, now_s: float) -> None:
        assert epoch == len(self.positions)
        self.positions.append(Counter())

    def assigned(self, assigned: Assigned, now_s: float) -> None:
        assert assigned.base == self.version
        self.taken[assigned.assignment] = assigned.base

    def accepted(self, accepted: Any, assigned: Assigned, spans: Any, now_s: float) -> None:
        assert accepted.staleness == self.version - self.taken.pop(assigned.assignment)
        self.positions[-1].update(p for a, b in spans for p in range(a, b))
        self.pool += accepted.samples

    def updated(self, updated: Updated, now_s: float) -> None:
        assert updated.samples == self.pool
        self.pool, self.version = 0, updated.version


@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_see_every_sample_once_per_epoch_at_its_version(policy: str) -> None:
    hooks = Counting()
    speeds = SimulatedSpeeds([[(0.0, 1.0)], [(0.0, 1.0), (30.0, 0.1), (90.0, 1.0)], [(0.0, 0.3)]])
    trace = run(policy, speeds, 3, [global_steps(7, 24), [24, 48, 60]], hooks=hooks)
    assert [sorted(c.elements()) for c in hooks.positions] == [list(range(168)), list(range(60))]
    assert hooks.version == len(trace.updates_s) and sum(trace.staleness.values()) == 228
    assert trace.makespan_s >= speeds.ideal_s([24] * 9 + [12])


def test_asp_by_hand() -> None:
    # Chunks of 16 take 18.25, 18.25, 35.25 and 69.25 units with transfers; every push is an update. Worker 0 pushes
    # before worker 1 and claims at once, so it computes on version 1, worker 1 on version 2.
    seen: list[tuple[float, int, int]] = []

    class Seen(Hooks):
        def updated(self, updated: Updated, now_s: float) -> None:
            seen.extend((now_s / UNIT_S, c.rank, c.staleness) for c in updated.contributions)

    speeds = SimulatedSpeeds([[(0.0, v)] for v in (1.0, 1.0, 0.5, 0.25)], sample_work=UNIT_S, launch_work=UNIT_S)
    costs = Costs(pull_s=UNIT_S, push_s=UNIT_S / 4)
    simulate(
        Coordinator(Asp(), workers=range(4)), speeds.work_s, workers=range(4), epochs=[global_steps(4, 64)],
        costs=costs, hooks=Seen(),
    )  # fmt: skip
    assert seen[:8] == [
        (18.25, 0, 0), (18.25, 1, 1), (35.25, 2, 2), (36.5, 0, 2), (36.5, 1, 2), (54.75, 0, 1), (54.75, 1, 1),
        (69.25, 3, 7),
    ]  # fmt: skip


def test_a_coordinator_that_answers_nobody_is_found_out() -> None:
    class Silent(Coordinator):
        def claim(self, rank: int, global_step: int, now: float) -> Any:
            return []

        def wake_s(self) -> float:
            return math.inf

    with pytest.raises(RuntimeError, match=r"deadlock at 0.0 s in global step 0: \[0\] wait"):
        simulate(Silent(Bsp(), workers=[0]), constant(1.0).work_s, workers=[0], epochs=[global_steps(2, 8)])
