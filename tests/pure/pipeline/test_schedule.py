"""Every schedule is valid, can be executed at any speeds, and costs what the model says."""

from __future__ import annotations

import textwrap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline.schedules import fill_s, lower_bound_s, model_s, one_f_one_b, per_link, proportional
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate, makespan_s, modelled
from lightning_hetero.pipeline.decide.schedule import Kind, PipelineTimes, route
from tests.pure.pipeline.schedule_kit import execute, in_flight, pipelines, policies, tick_by_tick, token

# ---- whatever the times --------------------------------------------------------------------------------------


@given(st.data(), pipelines(), st.integers(0, 2**32))
def test_devices_of_any_speed_execute_it_to_the_end_within_the_depths(
    data: st.DataObject, times: PipelineTimes, seed: int
) -> None:
    policy = data.draw(policies(times))
    schedule = generate(times, policy)
    assert len(execute(schedule, seed)) == sum(map(len, schedule.operations))
    assert sum(map(len, schedule.operations)) == times.micro_batches * sum(
        1 + step.is_message for step in route(times.devices)
    )
    assert all(a <= b for a, b in zip(in_flight(schedule), policy.depths, strict=True))


@given(st.data(), pipelines(whole=False))
def test_the_timeline_is_the_schedule_s_and_beats_no_bound(data: st.DataObject, times: PipelineTimes) -> None:
    policy = data.draw(policies(times))
    timeline, schedule = modelled(times, policy), generate(times, policy)
    assert timeline.makespan_s == makespan_s(times, policy) >= lower_bound_s(times) * (1.0 - 1e-12)
    for device, row in enumerate(timeline.devices):
        assert [op for op, _, _ in row] == [op for op in schedule.operations[device] if op.what is None]
        assert all(a[2] <= b[1] for a, b in pairwise(row))
    computed_s = [row for step, row in zip(route(times.devices), times.seconds, strict=True) if not step.is_message]
    assert sum(timeline.busy_s()) == pytest.approx(sum(map(sum, computed_s)))


@given(st.data(), pipelines(least=1.0, interleaved=False))
def test_the_makespan_is_that_of_a_machine_watched_second_by_second(
    data: st.DataObject, times: PipelineTimes
) -> None:
    policy = data.draw(policies(times))
    assert makespan_s(times, policy) == tick_by_tick(times, policy)


@given(pipelines(whole=False))
def test_one_at_a_time_takes_the_sum_of_all_ways(times: PipelineTimes) -> None:
    alone = SchedulePolicy(depths=(1,) * times.stages)
    assert makespan_s(times, alone) == pytest.approx(fill_s(times) * times.micro_batches)


# ---- known results -------------------------------------------------------------------------------------------


def test_each_step_of_the_way_takes_its_own_time() -> None:
    expected = [17.0, 256.0, 2.0, 1024.0, 192.0, 2048.0, 8.0, 512.0, 36.0]
    times = PipelineTimes(devices=(0, 1), seconds=tuple((seconds,) for seconds in expected))
    assert makespan_s(times, per_link(times)) == sum(expected)


def test_the_textbook_is_slow_where_the_output_loops_back_and_ours_is_not() -> None:
    times = proportional(
        [1.0] * 32, forward_s=[1.0] * 4, backward_s=[2.0] * 4, link_s=[1.5] * 3, loop_s=1.5, head_s=(0.1, 0.2)
    )
    assert makespan_s(times, one_f_one_b(times)) > 1.5 * model_s(times)
    assert makespan_s(times, per_link(times)) < min(model_s(times), 1.15 * lower_bound_s(times))


def test_a_large_micro_batch_in_the_middle_is_scheduled_as_such() -> None:
    times = proportional([1.0, 3.0, 1.0], forward_s=[1.0, 1.0], backward_s=[1.0, 1.0])
    timeline = modelled(times, per_link(times))
    assert [end - start for op, start, end in timeline.devices[1] if op.kind is Kind.FORWARD] == [1.0, 3.0, 1.0]


def drawn(times: PipelineTimes, policy: SchedulePolicy) -> str:
    """A line per device and a cell per second: what begins there, ``-`` where it goes on, ``.`` for nothing."""
    timeline = modelled(times, policy)
    table = [["."] * round(timeline.makespan_s) for _ in timeline.devices]
    for row, computations in zip(table, timeline.devices, strict=True):
        for op, start, end in computations:
            row[round(start) : round(end)] = ["-"] * round(end - start)
            row[round(start)] = token(op)
    return "\n" + "\n".join(" ".join(cell.ljust(2) for cell in row).rstrip() for row in table) + "\n"


@pytest.mark.parametrize(
    ("times", "policy", "picture"),
    [
        (
            proportional([1.0] * 4, forward_s=[1.0] * 2, backward_s=[1.0] * 2, head_s=(0.5, 0.5)),
            per_link,
            """
            F0 F1 H0 H1 F2 B0 H2 F3 B1 H3 B2 B3
            .  F0 F1 B0 B1 F2 .  B2 F3 .  B3 .
            """,
        ),
        (
            proportional(
                [1.0] * 2, forward_s=[1.0] * 2, backward_s=[1.0] * 2, head_s=(0.5, 0.5), link_s=[1.0], loop_s=1.0
            ),
            per_link,
            """
            F0 F1 .  .  H0 H1 .  .  B0 B1
            .  .  F0 F1 .  .  B0 B1 .  .
            """,
        ),
        (
            proportional([1.0] * 3, forward_s=[1.0], backward_s=[1.0], head_s=(0.5, 0.5)),
            per_link,
            """
            F0 H0 B0 F1 H1 B1 F2 H2 B2
            """,
        ),
    ],
    ids=["heads first, stages behind fed", "a link delays no computation", "one device accumulates gradients"],
)
def test_pictures(times: PipelineTimes, policy: object, picture: str) -> None:
    assert drawn(times, policy(times)) == textwrap.dedent(picture)  # type: ignore[operator]
