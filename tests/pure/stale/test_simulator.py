"""The simulator: its times, by closed forms and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.stale.policies import WRITTEN
from benchmarks.stale.simulator import Costs, Hooks, Simulated, simulate
from benchmarks.stale.speeds import SimulatedSpeeds
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Updated
from lightning_hetero.stale.decide.policy import _KNOWN, Asp, by_name

POLICIES = {**_KNOWN, **WRITTEN}
UNIT_S = 1 / 16


def run(policy: str, speeds: SimulatedSpeeds, workers: int, epochs: list[list[int]], **more: Any) -> Simulated:
    coordinator = Coordinator(POLICIES[policy](**more.pop("settings", {})), workers=range(workers))
    return simulate(coordinator, speeds.work_s, workers=range(workers), epochs=epochs, **more)


def constant(*speeds: float, launch_work: float = 0.0) -> SimulatedSpeeds:
    return SimulatedSpeeds([[(0.0, v)] for v in speeds], launch_work=launch_work)


def global_steps(count: int, batch: int) -> list[int]:
    return [batch * (t + 1) for t in range(count)]


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
