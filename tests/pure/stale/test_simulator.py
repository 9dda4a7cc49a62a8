"""The simulator of the stale engine: closed forms, golden traces of every policy, and what it refuses.

``python -m tests.pure.stale.test_simulator`` writes the golden traces anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Granted, Passed
from lightning_hetero.stale.decide.policy import by_name
from lightning_hetero.stale.decide.simulate.simulator import Costs, Membership, Trace, simulate
from lightning_hetero.stale.decide.simulate.speeds import SimulatedSpeeds

GOLDENS = Path(__file__).parents[2] / "goldens" / "stale"
POLICIES = (
    "flexible", "saps", "asp", "bsp", "ssp", "drop", "buffered", "backup", "dynsgd", "dc_asgd", "quorum",
)  # fmt: skip
UNIT_S = 1 / 16
EXACT = tuple(p for p in POLICIES if p != "backup")  # which apply every sample


def run(policy: str, speeds: SimulatedSpeeds, workers: int, epochs: list[list[int]], **more: Any) -> Trace:
    coordinator = Coordinator(by_name(policy, **more.pop("settings", {})), workers=range(workers))
    return simulate(coordinator, speeds.work_s, workers=range(workers), epochs=epochs, **more)


def constant(*speeds: float, launch_work: float = 0.0) -> SimulatedSpeeds:
    return SimulatedSpeeds([[(0.0, v)] for v in speeds], launch_work=launch_work)


def ticks(count: int, batch: int) -> list[int]:
    return [batch * (t + 1) for t in range(count)]


# ---- SimulatedSpeeds -------------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 4.0)), min_size=1, max_size=5).map(
    lambda steps: [(sum(d for d, _ in steps[:i]), v) for i, (_, v) in enumerate(steps)]
)


@given(pieces, st.floats(0.0, 30.0), st.floats(0.0, 20.0))
def test_seconds_is_the_inverse_of_the_work_done(one: list[tuple[float, float]], from_s: float, work: float) -> None:
    speeds = SimulatedSpeeds([one])
    end_s = from_s + speeds.seconds(0, from_s, work)
    assert speeds.done(0, end_s) - speeds.done(0, from_s) == pytest.approx(work, abs=1e-9)
    fine = np.linspace(from_s, end_s, 20001)  # the integral again, by the rule of rectangles
    starts, values = [t for t, _ in one], [v for _, v in one]
    by_rule = [values[i] for i in np.searchsorted(starts, 0.5 * (fine[1:] + fine[:-1]), side="right") - 1]
    assert sum(by_rule) * (end_s - from_s) / 20000 == pytest.approx(work, rel=2e-3, abs=1e-3)


def test_work_includes_the_launch_at_the_workers_speed() -> None:
    assert constant(0.25, launch_work=2.0).work_s(0, 0, 5.0, 6) == 32.0


@given(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=6), st.integers(1, 64), st.floats(0.0, 3.0))
def test_ideal_of_constant_speeds_is_that_of_the_best_subset(speeds: list[float], batch: int, launch: float) -> None:
    ideal_s = constant(*speeds, launch_work=launch).ideal_s([batch] * 3)
    ordered = sorted(speeds, reverse=True)
    # k fastest take part: every launch of theirs and the batch, over their speeds
    best = min((batch + k * launch) / sum(ordered[:k]) for k in range(1, len(speeds) + 1))
    assert ideal_s == pytest.approx(3 * best)


@given(st.lists(pieces, min_size=1, max_size=4), st.integers(1, 20), st.floats(0.0, 1.0))
def test_ideal_of_changing_speeds_does_exactly_the_work(ranks: list[Any], batch: int, launch: float) -> None:
    speeds = SimulatedSpeeds(ranks, launch_work=launch)
    first_s, both_s = speeds.ideal_s([batch]), speeds.ideal_s([batch, batch])
    for begin_s, end_s in ((0.0, first_s), (first_s, both_s)):
        done = [speeds.done(r, end_s) - speeds.done(r, begin_s) for r in range(len(ranks))]
        assert sum(max(0.0, d - launch) for d in done) == pytest.approx(batch, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "pieces is empty"),
        (([[]],), r"pieces\[0\] must begin at 0"),
        (([[(0.0, 1.0)], [(1.0, 1.0)]],), r"pieces\[1\] must begin at 0"),
        (([[(0.0, 1.0), (2.0, 1.0), (2.0, 3.0)]],), "increase strictly"),
        (([[(0.0, 0.0)]],), r"speeds \[0.0\]"),
    ],
)
def test_impossible_speeds_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedSpeeds(*arguments)


# ---- closed forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_takes_pull_launch_work_and_push_for_every_tick(policy: str) -> None:
    costs = Costs(launch_s=0.5, pull_s=0.25, push_s=0.125, sync_s=8.0)
    more = {"settings": {"micro": 64}} if policy == "saps" else {}
    trace = run(policy, constant(2.0), 1, [ticks(5, 16), [16, 24]], costs=costs, **more)
    assert trace.makespan_s == 6 * (0.875 + 8.0) + (0.875 + 4.0) + 8.0
    assert trace.staleness == {0: 5 * 16 + 24}
    assert trace.workers[0].busy_s == 6 * (0.5 + 8.0) + 0.5 + 4.0
    assert (trace.workers[0].pull_s, trace.workers[0].push_s) == (7 * 0.25, 7 * 0.125)
    assert trace.workers[0].hold_s == 0.0


@pytest.mark.parametrize("policy", ["flexible", "bsp", "backup"])
def test_equal_workers_take_an_equal_part_of_every_update(policy: str) -> None:
    more = {"spares": 0} if policy == "backup" else {}
    costs = Costs(pull_s=0.5, push_s=0.25)
    speeds = constant(1.0, 1.0, 1.0, 1.0, launch_work=1.0)
    trace = run(policy, speeds, 4, [ticks(6, 64)] * 2, costs=costs, settings=more)
    assert trace.updates_s == [17.75 * k for k in range(1, 13)]
    assert trace.makespan_s == 12 * 17.75
    assert [w.samples for w in trace.workers.values()] == [192] * 4
    assert trace.staleness == {0: 768}
    assert trace.waiting() == 0.0


@pytest.mark.parametrize("policy", ["asp", "ssp", "drop"])
def test_equal_workers_of_asynchronous_policies_lose_at_most_the_ends_of_epochs(policy: str) -> None:
    costs = Costs(pull_s=0.5, push_s=0.25)
    trace = run(policy, constant(1.0, 1.0, 1.0, 1.0, launch_work=1.0), 4, [ticks(20, 64)], costs=costs)
    assert 20 * 17.75 <= trace.makespan_s <= 21 * 17.75
    assert [w.samples for w in trace.workers.values()] == pytest.approx([320] * 4, abs=16)


def test_bsp_takes_the_sum_of_the_slowest_workers() -> None:
    times = np.random.default_rng(5).uniform(0.5, 3.0, (4, 20))
    coordinator = Coordinator(by_name("bsp"), workers=range(4))
    trace = simulate(
        coordinator,
        lambda rank, step, now_s, samples: float(times[rank, step]) * samples,
        workers=range(4),
        epochs=[ticks(10, 32), ticks(10, 32)],
    )
    expected = [8 * times[:, k].max() for k in range(20)]
    assert trace.updates_s == pytest.approx(np.cumsum(expected))
    waits = [sum(expected) - 8 * times[r].sum() for r in range(4)]
    assert [w.hold_s + w.sync_s for w in trace.workers.values()] == pytest.approx(waits)


def test_asp_has_the_throughput_of_all_workers_together() -> None:
    # Chunks of 8 take 8 s, 16 s and 32 s: in 32 s the three workers do 4 + 2 + 1 chunks.
    trace = run("asp", constant(1.0, 0.5, 0.25), 3, [[56 * 50]], settings={"chunk": 8})
    assert 32.0 * 50 <= trace.makespan_s <= 32.0 * 51
    assert [w.samples // 8 for w in trace.workers.values()] == pytest.approx([200, 100, 50], abs=2)
    assert trace.workers[0].hold_s == 0.0


@pytest.mark.parametrize("policy", EXACT)
def test_no_schedule_beats_the_ideal_time(policy: str) -> None:
    speeds = constant(1.0, 1.0, 0.5, 0.25)
    trace = run(policy, speeds, 4, [ticks(20, 64)])
    assert trace.makespan_s >= speeds.ideal_s([64] * 20)


# ---- what the trace counts -------------------------------------------------------------------------------


class Counting:
    """Hooks that check the order of calls and count samples."""

    def __init__(self) -> None:
        self.version = 0
        self.taken: dict[int, int] = {}
        self.pool = 0
        self.positions: list[Counter[int]] = []
        self.last_s = 0.0

    def at(self, now_s: float) -> None:
        assert now_s >= self.last_s
        self.last_s = now_s

    def begin(self, epoch: int, now_s: float) -> None:
        self.at(now_s)
        assert epoch == len(self.positions)
        self.positions.append(Counter())

    def granted(self, granted: Granted, now_s: float) -> None:
        self.at(now_s)
        assert granted.base == self.version
        self.taken[granted.lease] = granted.base

    def accepted(self, accepted: Any, granted: Granted, spans: Any, now_s: float) -> None:
        self.at(now_s)
        assert accepted.staleness == self.version - self.taken.pop(granted.lease)
        assert sum(b - a for a, b in spans) == accepted.samples <= granted.samples
        self.positions[-1].update(p for a, b in spans for p in range(a, b))
        self.pool += accepted.samples

    def refused(self, refused: Any, now_s: float) -> None:
        self.at(now_s)
        self.taken.pop(refused.lease)

    def updated(self, updated: Any, now_s: float) -> None:
        self.at(now_s)
        assert updated.samples == self.pool
        self.pool, self.version = 0, updated.version


@pytest.mark.parametrize("policy", EXACT)
def test_hooks_see_every_sample_once_per_epoch_at_its_version(policy: str) -> None:
    hooks = Counting()
    speeds = SimulatedSpeeds([[(0.0, 1.0)], [(0.0, 1.0), (30.0, 0.1), (90.0, 1.0)], [(0.0, 0.3)]])
    trace = run(policy, speeds, 3, [ticks(7, 24), [24, 48, 60]], hooks=hooks)
    assert [sorted(c) for c in hooks.positions] == [list(range(168)), list(range(60))]
    assert all(set(c.values()) == {1} for c in hooks.positions)
    assert hooks.version == len(trace.updates_s)
    assert sum(trace.staleness.values()) == 228


@pytest.mark.parametrize("policy", POLICIES)
def test_a_workers_times_sum_to_the_makespan(policy: str) -> None:
    costs = Costs(launch_s=0.25, pull_s=0.5, push_s=0.25)
    trace = run(policy, constant(1.0, 0.5, 0.2), 3, [ticks(7, 24), ticks(3, 24)], costs=costs)
    for w in trace.workers.values():
        assert w.busy_s + w.pull_s + w.push_s + w.hold_s + w.sync_s == pytest.approx(trace.makespan_s)
    assert 0.0 <= trace.waiting() < 1.0
    assert sum(w.samples for w in trace.workers.values()) == sum(trace.staleness.values())


def test_parameters_are_fetched_only_if_there_are_newer_ones() -> None:
    trace = scripted("flexible")
    pulls, grants, held = 0, 0, dict[int, int]()
    for event in trace.events:
        if event.kind == "grant" and event.rank != 2:  # that one dies, perhaps on its way
            grants, pulls = grants + 1, pulls + (held.get(event.rank) != event.data["base"])
            held[event.rank] = event.data["base"]
    fetched_s = sum(worker.pull_s for rank, worker in trace.workers.items() if rank != 2)
    assert fetched_s == pytest.approx(pulls * UNIT_S) and pulls < grants


def test_the_same_twice() -> None:
    one, two = scripted("flexible"), scripted("flexible")
    assert one.events == two.events
    assert one.events


def test_without_a_record_the_times_are_the_same() -> None:
    quiet = scripted("flexible", record=False)
    assert (quiet.makespan_s, quiet.events) == (scripted("flexible").makespan_s, [])


# ---- deaths and joins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EXACT)
def test_a_death_and_a_join_lose_no_sample(policy: str) -> None:
    hooks = Counting()
    membership = [Membership(at_s=20.0, rank=1, what="dies"), Membership(at_s=61.0, rank=1, what="joins")]
    trace = run(policy, constant(1.0, 1.0, 1.0), 3, [ticks(8, 24), ticks(4, 24)], hooks=hooks, membership=membership)
    assert [sorted(c.elements()) for c in hooks.positions] == [list(range(192)), list(range(96))]
    late = [e for e in trace.events if e.kind == "grant" and e.rank == 1]
    assert not [e for e in late if 20.0 < e.t_s < 61.0]
    assert [e for e in late if e.t_s >= 61.0]


def test_the_dead_workers_part_is_not_waited_for() -> None:
    # Two workers, 16 samples a step: 8 s each. The second dies in the middle of the first step: 8 s more for its part.
    membership = [Membership(at_s=4.0, rank=1, what="dies")]
    trace = run("flexible", constant(1.0, 1.0), 2, [ticks(2, 16)], membership=membership)
    assert trace.updates_s == [16.0, 32.0]
    assert trace.workers[1].busy_s == 4.0


def test_when_all_are_dead_it_says_so() -> None:
    membership = [Membership(at_s=1.0, rank=r, what="dies") for r in range(2)]
    with pytest.raises(RuntimeError, match=r"the last worker died at 1\.0 s in epoch 0, tick 0"):
        run("flexible", constant(1.0, 1.0), 2, [ticks(2, 16)], membership=membership)


@pytest.mark.parametrize(("what", "message"), [("joins", "lives already"), ("dies", "does not live")])
def test_a_change_that_is_none_is_refused(what: Any, message: str) -> None:
    rank = 0 if what == "joins" else 7
    with pytest.raises(ValueError, match=message):
        run("asp", constant(1.0), 1, [[16]], membership=[Membership(at_s=1.0, rank=rank, what=what)])


# ---- what it refuses -------------------------------------------------------------------------------------


class Scripted(Coordinator):
    """A coordinator that misbehaves."""

    def __init__(self, claim: Any = (), wake_s: float = math.inf) -> None:
        super().__init__(by_name("asp"), workers=range(1))
        self._answer, self._wake_s = claim, wake_s

    def claim(self, rank: int, tick: int, now: float) -> Any:
        return list(self._answer)

    def wake_s(self) -> float:
        return self._wake_s

    def wake(self, now: float) -> Any:
        return []


@pytest.mark.parametrize(
    ("coordinator", "message"),
    [
        (Scripted(), "deadlock at 0.0 s in tick 0: workers {0: 'held'}"),
        (Scripted(wake_s=3.0), "wants to be woken at 3.0 s and does nothing"),
        (Scripted([Passed(rank=0, tick=1), Passed(rank=0, tick=2)]), "is answered at 0.0 s and has not asked"),
        (Scripted([Passed(rank=0, tick=0)]), "told at tick 0 that the server is at 0"),
    ],
)
def test_a_coordinator_that_misbehaves_is_found_out(coordinator: Coordinator, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        simulate(coordinator, constant(1.0).work_s, workers=[0], epochs=[ticks(2, 8)])


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"work_s gave nan s for worker 0 and 8 samples"):
        coordinator = Coordinator(by_name("asp"), workers=[0])
        simulate(coordinator, lambda rank, step, now_s, samples: math.nan, workers=[0], epochs=[[8]])


@pytest.mark.parametrize(("workers", "epochs"), [([], [[8]]), ([0], []), ([0], [[]])])
def test_nothing_to_simulate_is_refused(workers: Any, epochs: Any) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        simulate(Coordinator(by_name("asp"), workers=[0]), constant(1.0).work_s, workers=workers, epochs=epochs)


@pytest.mark.parametrize("name", ["launch_s", "pull_s", "push_s", "sync_s"])
def test_negative_costs_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Costs\.{name}=-1\.0 must be"):
        Costs(**{name: -1.0})


@pytest.mark.parametrize(("what", "at_s"), [("dies", -1.0), ("leaves", 1.0)])
def test_impossible_changes_are_refused(what: Any, at_s: float) -> None:
    with pytest.raises(ValueError, match=r"Membership\."):
        Membership(at_s=at_s, rank=0, what=what)


# ---- golden traces ---------------------------------------------------------------------------------------


def scripted(policy: str, record: bool = True) -> Trace:
    """Speeds 1:1:1/2:1/4, worker 1 eight times slower from unit 100 to 300, worker 2 dies at 333.

    Three epochs of four batches of 64 samples. A sample, a launch and a pull take one unit, a push a quarter. A unit is
    1/16 s, so that all times are exact in binary and no chunk lasts long enough to count as a sign of death.
    """
    pieces = [[(0.0, 1.0)], [(0.0, 1.0), (100 * UNIT_S, 0.125), (300 * UNIT_S, 1.0)], [(0.0, 0.5)], [(0.0, 0.25)]]
    speeds = SimulatedSpeeds(pieces, sample_work=UNIT_S, launch_work=UNIT_S)
    coordinator = Coordinator(by_name(policy), workers=range(4))
    return simulate(
        coordinator,
        speeds.work_s,
        workers=range(4),
        epochs=[ticks(4, 64)] * 3,
        costs=Costs(pull_s=UNIT_S, push_s=UNIT_S / 4),
        membership=[Membership(at_s=333 * UNIT_S, rank=2, what="dies")],
        record=record,
    )


def golden(trace: Trace) -> str:
    """Returns a trace as JSON, one event a line: time, kind, rank, epoch, tick, data."""
    lines = [
        json.dumps([round(e.t_s, 9), e.kind, e.rank, e.epoch, e.step, dict(e.data)], separators=(",", ":"))
        for e in trace.events
    ]
    head = {
        "makespan_s": round(trace.makespan_s, 9),
        "staleness": {str(k): v for k, v in trace.staleness.items()},
        "recomputed": trace.recomputed,
        "updates": len(trace.updates_s),
    }
    return f'{{"summary":{json.dumps(head)},\n"events":[\n' + ",\n".join(lines) + "\n]}\n"


AS_ASP = ("dynsgd", "dc_asgd")  # only what a contribution counts differs, not who computes what, and when


@pytest.mark.parametrize("policy", POLICIES)
def test_golden_trace(policy: str) -> None:
    name = "asp" if policy in AS_ASP else policy
    assert golden(scripted(policy)) == (GOLDENS / f"{name}.json").read_text(encoding="utf-8")


def updates(trace: Trace) -> list[tuple[float, int, list[list[int]]]]:
    return [(e.t_s / UNIT_S, e.data["samples"], e.data["by"]) for e in trace.events if e.kind == "update"]


def test_the_golden_trace_of_bsp_by_hand() -> None:
    # In units: 16 samples and a launch are 17 of work: 17, 17, 34, 68, and 1.25 of transfers. Batch 0 and 1: the
    # slowest worker's 69.25. Batch 2 begins at 138.5: worker 1 is slow and needs 136, worker 3 needs 68. Batch 3
    # begins to compute at 276.75; worker 1 has done 23.25/8 of its work when it recovers at 300, and is ready at
    # 314.34; worker 3 at 345. From then on worker 2 is missing, and worker 3 has 21 of 64 samples: 88 + 1.25.
    expected = [69.25, 138.5, 275.75, 345.0] + [345.0 + 89.25 * k for k in range(1, 9)]
    trace = scripted("bsp")
    assert [t for t, _, _ in updates(trace)] == expected
    assert updates(trace)[3][2] == [[0, 16, 0], [2, 16, 0], [1, 16, 0], [3, 16, 0]]
    assert updates(trace)[4][2] == [[1, 21, 0], [0, 22, 0], [3, 21, 0]]
    assert (trace.makespan_s, trace.staleness, trace.recomputed) == (1059 * UNIT_S, {0: 768}, 0)


def test_the_golden_trace_of_asp_by_hand() -> None:
    # Chunks of 16 take 18.25, 18.25, 35.25 and 69.25 units with transfers; every push is an update. Worker 0 pushes
    # before worker 1 and claims at once, so it computes on version 1, worker 1 on version 2.
    trace = scripted("asp")
    first = [(t, n, rank, staleness) for t, _, [[rank, n, staleness]] in updates(trace)[:8]]
    assert first == [
        (18.25, 16, 0, 0),
        (18.25, 16, 1, 1),
        (35.25, 16, 2, 2),
        (36.5, 16, 0, 2),
        (36.5, 16, 1, 2),
        (54.75, 16, 0, 1),
        (54.75, 16, 1, 1),
        (69.25, 16, 3, 7),
    ]


def test_the_golden_trace_of_quorum_by_hand() -> None:
    # Three of four make a quorum. In batch 0 they are in at 35.25, and the window is a tenth of that: 38.775. Worker 3
    # comes at 69.25, late by one version. Batch 1 begins at 38.775; workers 0 and 1 are in 18.25 later, worker 2 35.25
    # later, at 74.025, and 3.525 later it is over, with what worker 3 has brought meanwhile.
    trace = scripted("quorum")
    (first_s, first, by), (second_s, second, then), *_ = updates(trace)
    assert (first_s, first, by) == (pytest.approx(38.775), 48, [[0, 16, 0], [1, 16, 0], [2, 16, 0]])
    assert (second_s, second) == (pytest.approx(77.55), 64)
    assert then == [[0, 16, 0], [1, 16, 0], [3, 16, 1], [2, 16, 0]]
    assert sum(trace.staleness.values()) == 768 and max(trace.staleness) == 2


def write_goldens() -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for policy in (p for p in POLICIES if p not in AS_ASP):
        (GOLDENS / f"{policy}.json").write_text(golden(scripted(policy)), encoding="utf-8")


if __name__ == "__main__":
    write_goldens()
