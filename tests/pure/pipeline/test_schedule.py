"""Every schedule is valid, can be executed at any speeds, and costs what the model says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_hetero.pipeline.decide.schedule import (
    POLICIES,
    Kind,
    PipelineTimes,
    SchedulePolicy,
    check,
    from_text,
    generate,
    gpipe,
    interleaved,
    makespan_s,
    one_f_one_b,
    per_link,
    replay,
    sequential,
    thrifty,
    to_text,
)
from tests.pure.pipeline.schedule_kit import execute, pipelines, policies, tick_by_tick

OVERLAP = st.booleans()


def equal(
    stages: int, micro: int, *, backward_s: float = 1.0, devices: tuple[int, ...] = (), loop_back: bool = False
) -> PipelineTimes:
    """Equal stages with free links and a head that costs nothing: what the textbook draws."""
    return PipelineTimes.proportional(
        [1.0] * micro, forward_s=[1.0] * stages, backward_s=[backward_s] * stages, devices=devices,
        loop_back=loop_back,
    )  # fmt: skip


# ---- whatever the times --------------------------------------------------------------------------------------


@given(st.data(), pipelines(), OVERLAP)
def test_every_schedule_is_valid_and_reads_back(data: st.DataObject, times: PipelineTimes, overlap: bool) -> None:
    policy = data.draw(policies(times))
    schedule = generate(times, policy, overlap=overlap)
    check(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert all(peak <= depth for peak, depth in zip(schedule.peak_in_flight(), policy.depths, strict=True))


@given(pipelines(), st.sampled_from(sorted(set(POLICIES) - {"interleaved"})), OVERLAP)
def test_every_known_policy_serves_every_pipeline(times: PipelineTimes, name: str, overlap: bool) -> None:
    schedule = generate(times, POLICIES[name](times), overlap=overlap)
    check(schedule)
    execute(schedule, seed=0)


@given(st.data(), pipelines(), OVERLAP, st.integers(0, 2**32))
def test_devices_of_any_speed_execute_it_to_the_end(
    data: st.DataObject, times: PipelineTimes, overlap: bool, seed: int
) -> None:
    schedule = generate(times, data.draw(policies(times)), overlap=overlap)
    assert len(execute(schedule, seed)) == sum(map(len, schedule.operations))


@given(st.data(), pipelines(whole=False), OVERLAP)
def test_the_replay_takes_what_was_modelled_and_beats_no_bound(
    data: st.DataObject, times: PipelineTimes, overlap: bool
) -> None:
    policy = data.draw(policies(times))
    modelled_s = makespan_s(times, policy, overlap=overlap)
    assert replay(generate(times, policy, overlap=overlap), times).makespan_s == modelled_s
    assert modelled_s >= times.lower_bound_s() * (1.0 - 1e-12)


@given(st.data(), pipelines(whole=False), OVERLAP, st.integers(0, 2**32))
def test_with_other_true_times_no_bound_is_beaten_either(
    data: st.DataObject, times: PipelineTimes, overlap: bool, seed: int
) -> None:
    rng = random.Random(seed)
    other = [[rng.uniform(0.0, 4.0) for _ in range(times.micro_batches)] for _ in range(2 * times.stages)]
    truth = replace(
        times, forward_s=tuple(map(tuple, other[::2])), backward_s=tuple(map(tuple, other[1::2])), loop_forward_s=()
    )
    schedule = generate(times, data.draw(policies(times)), overlap=overlap)
    assert replay(schedule, truth).makespan_s >= truth.lower_bound_s() * (1.0 - 1e-12)


@given(st.data(), pipelines(least=1.0, interleaved=False))
def test_the_makespan_is_that_of_a_machine_watched_second_by_second(
    data: st.DataObject, times: PipelineTimes
) -> None:
    policy = data.draw(policies(times))
    assert makespan_s(times, policy) == tick_by_tick(times, policy)


@given(pipelines(whole=False))
def test_one_at_a_time_takes_the_sum_of_all_ways(times: PipelineTimes) -> None:
    assume(times.backward or times.loop_back)  # else nothing tells the first stage to wait
    expected_s = times.fill_s * times.micro_batches
    assert makespan_s(times, sequential(times)) == pytest.approx(expected_s)
    assert makespan_s(times, sequential(times), overlap=False) == pytest.approx(expected_s)


@given(pipelines(whole=False), OVERLAP)
def test_spans_follow_one_another_on_devices_and_links(times: PipelineTimes, overlap: bool) -> None:
    timeline = replay(generate(times, overlap=overlap), times)
    carried: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for device, (operations, spans) in enumerate(zip(timeline.schedule.operations, timeline.spans, strict=True)):
        computing = [span for op, span in zip(operations, spans, strict=True) if op.what is None or not overlap]
        assert all(a[1] <= b[0] for a, b in pairwise(computing))
        for op, span in zip(operations, spans, strict=True):
            if op.kind is Kind.SEND and op.peer is not None:
                carried.setdefault((device, op.peer), []).append(span)
    for row in carried.values():
        assert all(a[1] <= b[0] for a, b in pairwise(row))
    computed_s = [row for step, row in zip(times.route(), times.seconds, strict=True) if not step.is_message]
    assert sum(timeline.busy_s()) == pytest.approx(sum(map(sum, computed_s)))


# ---- known results -------------------------------------------------------------------------------------------


def test_each_part_of_the_way_takes_its_own_time() -> None:
    times = PipelineTimes(
        forward_s=((1.0,), (2.0,)), backward_s=((4.0,), (8.0,)), before_forward_s=(16.0,), before_backward_s=(32.0,),
        head_forward_s=(64.0,), head_backward_s=(128.0,), link_forward_s=((256.0,),), link_backward_s=((512.0,),),
        loop_forward_s=(1024.0,), loop_backward_s=(2048.0,),
    )  # fmt: skip
    expected = [17.0, 256.0, 2.0, 1024.0, 192.0, 2048.0, 8.0, 512.0, 36.0]
    assert [row[0] for row in times.seconds] == expected
    assert times.fill_s == times.model_s == times.lower_bound_s() == makespan_s(times) == sum(expected)
    assert times.bottleneck_s == 256.0 + 2048.0  # both messages that go from device 0 to device 1
    assert [row[0] for row in times.forward_only().seconds] == [17.0, 256.0, 2.0, 1024.0, 64.0]
    chain = replace(times, loop_back=False)
    assert [row[0] for row in chain.seconds] == [17.0, 256.0, 2.0, 192.0, 8.0, 512.0, 36.0]


def test_the_depths_of_a_pipeline_by_hand() -> None:
    times = PipelineTimes.proportional(
        [1.0] * 20, forward_s=[1.0] * 3, backward_s=[2.0] * 3, link_s=[1.4, 1.6], loop_s=0.3, head_s=(0.5, 0.5)
    )
    assert times.bottleneck_s == 4.0  # the leader's
    assert per_link(times).depths == (7, 5, 3)  # 2 + ceil(0.6 / 4); + 1 + ceil(3.2 / 4); + 1 + ceil(2.8 / 4)
    assert thrifty(times).depths == (6, 4, 3)  # 1 + ceil of 4.6 / 4, 10.8 / 4, 16.6 / 4
    assert per_link(times.forward_only()).depths == (7, 5, 3)  # one way, in bottlenecks of 1.6, the slower link's


@pytest.mark.parametrize("policy", [gpipe, one_f_one_b, per_link])
@given(stages=st.integers(1, 8), micro=st.integers(1, 12), backward_s=st.integers(1, 4))
def test_equal_stages_with_free_links_take_m_plus_s_minus_1_turns(
    policy: Callable[[PipelineTimes], SchedulePolicy], stages: int, micro: int, backward_s: int
) -> None:
    times = equal(stages, micro, backward_s=float(backward_s))
    assert makespan_s(times, policy(times)) == (micro + stages - 1) * (1 + backward_s) == times.lower_bound_s()


@given(devices=st.integers(1, 4), each=st.integers(2, 4), rounds=st.integers(1, 3), backward_s=st.integers(1, 2))
def test_interleaving_divides_the_fill_by_the_stages_per_device(
    devices: int, each: int, rounds: int, backward_s: int
) -> None:
    micro, dealt = devices * rounds, tuple(range(devices)) * each
    times = equal(devices * each, micro, backward_s=float(backward_s), devices=dealt)
    schedule = generate(times, interleaved(times))
    check(schedule)
    assert replay(schedule, times).makespan_s == (micro * each + devices - 1) * (1 + backward_s)


@given(pipelines(whole=False, least=0.1))
def test_the_thrifty_policy_never_holds_more(times: PipelineTimes) -> None:
    assert all(a <= b for a, b in zip(thrifty(times).depths, per_link(times).depths, strict=True))


def test_one_f_one_b_holds_s_minus_i_and_gpipe_everything() -> None:
    times = equal(4, 8)
    assert generate(times, one_f_one_b(times)).peak_in_flight() == (4, 3, 2, 1)
    assert generate(times, gpipe(times)).peak_in_flight() == (8, 8, 8, 8)


def test_megatron_holds_its_warm_up_and_one_more() -> None:
    times = equal(8, 8, devices=(0, 1, 2, 3) * 2)
    schedule = generate(times, interleaved(times))
    held: list[int] = []
    for operations in schedule.operations:
        signs = [(op.kind is Kind.FORWARD) - (op.kind is Kind.BACKWARD) for op in operations]
        held.append(max(sum(signs[: i + 1]) for i in range(len(signs))))
    assert held == [11, 9, 7, 5]  # 2 (D - d - 1) + (v - 1) D + 1


def test_the_textbook_is_slow_where_the_output_loops_back_and_ours_is_not() -> None:
    times = PipelineTimes.proportional(
        [1.0] * 32, forward_s=[1.0] * 4, backward_s=[2.0] * 4, link_s=[1.5] * 3, loop_s=1.5, head_s=(0.1, 0.2)
    )
    assert makespan_s(times, one_f_one_b(times)) > 1.5 * times.model_s
    assert makespan_s(times) < times.model_s
    assert makespan_s(times) < 1.15 * times.lower_bound_s()


def test_a_fixed_order_loses_little_when_stages_are_off() -> None:
    rng = random.Random(7)
    ratios: list[float] = []
    for _ in range(40):
        stages, micro = rng.randint(2, 6), rng.randint(8, 24)
        forward_s = [rng.uniform(0.5, 1.0) for _ in range(stages)]
        link_s = [rng.uniform(0.0, 0.5) for _ in range(stages)]
        loads = [[rng.uniform(0.8, 1.2) for _ in range(stages)] for _ in range(2)]
        predicted, truth = (
            PipelineTimes.proportional(
                [1.0] * micro,
                forward_s=[f * x for f, x in zip(forward_s, load, strict=True)],
                backward_s=[2.0 * f * x for f, x in zip(forward_s, load, strict=True)],
                link_s=link_s[1:], loop_s=link_s[0], head_s=(0.05, 0.1),
            )
            for load in loads
        )
        ratios.append(replay(generate(predicted), truth).makespan_s / makespan_s(truth))
    assert sorted(ratios)[len(ratios) // 2] < 1.03
    assert max(ratios) < 1.25


def test_a_large_micro_batch_in_the_middle_is_scheduled_as_such() -> None:
    times = PipelineTimes.proportional([1.0, 3.0, 1.0], forward_s=[1.0, 1.0], backward_s=[1.0, 1.0])
    timeline = replay(generate(times), times)
    lengths = [end - start for op, start, end in timeline.computations(1) if op.kind is Kind.FORWARD]
    assert lengths == [1.0, 3.0, 1.0]


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_s": ()}, "at least one stage and one micro-batch"),
        ({"forward_s": ((),)}, "at least one stage and one micro-batch"),
        ({"forward_s": ((1.0,), (1.0, 2.0))}, r"forward_s\[1\] has 2 times, but there are 1 micro-batches"),
        ({"backward_s": ((1.0,),)}, "backward_s has 1 rows, need 2"),
        ({"link_forward_s": ((1.0,), (1.0,))}, "link_forward_s has 2 rows, need 1"),
        ({"loop_forward_s": (1.0, 1.0)}, "loop_forward_s has 2 times"),
        ({"head_forward_s": (-1.0,)}, r"head_forward_s\[0\]=-1.0 must be a finite number >= 0"),
        ({"backward_s": ((1.0,), (float("nan"),))}, r"backward_s\[1\]\[0\]=nan"),
        ({"devices": (0, 2)}, "none left out"),
        ({"devices": (1, 0)}, "leader's 0 first"),
        ({"devices": (0,)}, "each of the 2 stages"),
    ],
)
def test_times_that_are_no_pipeline(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"forward_s": ((1.0,), (1.0,))}
    PipelineTimes(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        PipelineTimes(**(good | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": (1, 0)}, r"depths\[1\]=0 must be a whole number >= 1"),
        ({"depths": (1.5,)}, r"depths\[0\]=1.5"),
        ({"priority": "HF"}, "must name H, F and B once each"),
        ({"warm_up": (-1,)}, r"warm_up\[0\]=-1"),
    ],
)
def test_a_policy_that_is_none(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulePolicy(**({"depths": (1,)} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SchedulePolicy(depths=(1,)), "1 depths, but the pipeline has 2 stages"),
        (SchedulePolicy(depths=(4, 3), forwards_first=True), "the depths must be 4"),
        (SchedulePolicy(depths=(4, 4), warm_up=(1,)), "1 warm-ups, but the pipeline has 2 devices"),
        (SchedulePolicy(depths=(4, 4), warm_up=(0, 2)), "comes to a standstill after 3 operations"),
        (SchedulePolicy(depths=(1, 1), warm_up=(1, 0)), "comes to a standstill"),
    ],
)
def test_a_policy_that_does_not_fit(policy: SchedulePolicy, message: str) -> None:
    for act in (generate, makespan_s):
        with pytest.raises(ValueError, match=message):
            act(equal(2, 4), policy)


def test_interleaving_needs_whole_rounds_and_stages_in_turns() -> None:
    with pytest.raises(ValueError, match="multiples of the 2 devices, got 3"):
        interleaved(equal(4, 3, devices=(0, 1, 0, 1)))
    with pytest.raises(ValueError, match="dealt out by turns"):
        interleaved(equal(4, 4, devices=(0, 0, 1, 1)))


def test_a_replay_needs_the_same_pipeline() -> None:
    schedule = generate(equal(3, 4))
    with pytest.raises(ValueError, match="the schedule is for another pipeline"):
        replay(schedule, equal(3, 5))
    with pytest.raises(ValueError, match="the schedule is for another pipeline"):
        replay(schedule, equal(3, 4).forward_only())
    with pytest.raises(ValueError, match=r"cell_s=0.0 must be > 0"):
        replay(schedule, equal(3, 4)).picture(0.0)
