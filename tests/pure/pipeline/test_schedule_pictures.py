"""Known schedules as pictures and lists: the literals are the textbook's, or were checked by hand."""

from __future__ import annotations

import textwrap

import pytest

from lightning_hetero.pipeline.decide.schedule import (
    Operation,
    PipelineTimes,
    SchedulePolicy,
    check,
    from_text,
    generate,
    gpipe,
    interleaved,
    one_f_one_b,
    replay,
    to_text,
)
from lightning_hetero.pipeline.decide.schedule.operations import Kind, What


def equal(
    stages: int,
    micro: int,
    *,
    backward_s: float = 1.0,
    head_s: tuple[float, float] = (0.0, 0.0),
    link_s: float = 0.0,
    devices: tuple[int, ...] = (),
    loop_back: bool = False,
) -> PipelineTimes:
    return PipelineTimes.proportional(
        [1.0] * micro, forward_s=[1.0] * stages, backward_s=[backward_s] * stages, head_s=head_s,
        link_s=[link_s] * (stages - 1), loop_s=link_s, devices=devices, loop_back=loop_back,
    )  # fmt: skip


def drawn(
    times: PipelineTimes, policy: SchedulePolicy | None = None, *, overlap: bool = True, cell_s: float = 1.0
) -> str:
    schedule = generate(times, policy, overlap=overlap)
    check(schedule)
    return "\n" + replay(schedule, times).picture(cell_s) + "\n"


def picture(text: str) -> str:
    return textwrap.dedent(text)


# ---- the textbook's: a chain, equal stages, free links -------------------------------------------------------


def test_gpipe_3_stages_4_micro_batches() -> None:
    times = equal(3, 4)
    assert drawn(times, gpipe(times)) == picture("""
        F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """)


def test_1f1b_3_stages_4_micro_batches() -> None:
    times = equal(3, 4)
    assert drawn(times, one_f_one_b(times)) == picture("""
        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """)


def test_1f1b_4_stages_8_micro_batches() -> None:
    times = equal(4, 8)
    assert drawn(times, one_f_one_b(times)) == picture("""
        F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 F6 B3 F7 B4 .  B5 .  B6 .  B7
        .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .  B6 .  B7 .
        .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .  B7 .  .
        .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .  .  .
    """)


def test_1f1b_with_a_backward_of_twice_the_forward() -> None:
    times = equal(3, 4, backward_s=2.0)
    assert drawn(times, one_f_one_b(times)) == picture("""
        F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -
        .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .
        .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .
    """)


def test_interleaved_2_devices_2_stages_each() -> None:
    times = equal(4, 4, devices=(0, 1, 0, 1))
    assert drawn(times, interleaved(times)) == picture("""
        F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 .    B2@2 .    B3@2 B2@0 B3@0
        .    F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1 .
    """)


# ---- ours: the output loops back to the leader, where the head stands ---------------------------------------


def test_the_default_puts_heads_first_and_keeps_the_stages_behind_fed() -> None:
    assert drawn(equal(2, 4, head_s=(0.5, 0.5), loop_back=True)) == picture("""
        F0 F1 H0 H1 F2 B0 H2 F3 B1 H3 B2 B3
        .  F0 F1 B0 B1 F2 .  B2 F3 .  B3 .
    """)


def test_a_link_delays_what_it_carries_but_nobody_computing() -> None:
    assert drawn(equal(2, 2, head_s=(0.5, 0.5), link_s=1.0, loop_back=True)) == picture("""
        F0 F1 .  .  H0 H1 .  .  B0 B1
        .  .  F0 F1 .  .  B0 B1 .  .
    """)


def test_without_overlap_a_transfer_keeps_both_devices_from_computing() -> None:
    times = equal(2, 2, head_s=(0.5, 0.5), link_s=1.0, loop_back=True)
    assert drawn(times, overlap=False) == picture("""
        F0 .  F1 .  .  H0 .  .  H1 .  .  B0 .  B1
        .  .  F0 .  .  F1 .  .  B0 .  .  B1 .  .
    """)


def test_one_device_accumulates_gradients() -> None:
    times = equal(1, 3, head_s=(0.5, 0.5), loop_back=True)
    assert drawn(times) == picture("""
        F0 H0 B0 F1 H1 B1 F2 H2 B2
    """)
    lists = generate(times).operations
    assert [str(op) for op in lists[0]] == ["F0@0", "H0", "B0@0", "F1@0", "H1", "B1@0", "F2@0", "H2", "B2@0"]


def test_forward_only_ends_at_the_head() -> None:
    times = equal(3, 4, head_s=(1.0, 7.0), loop_back=True).forward_only()
    assert drawn(times) == picture("""
        F0 F1 F2 F3 H0 H1 H2 H3
        .  F0 F1 F2 F3 .  .  .
        .  .  F0 F1 F2 F3 .  .
    """)
    assert generate(times).peak_in_flight() == (4, 1, 1)


def test_forward_only_never_has_more_open_training_steps_than_the_depth() -> None:
    times = equal(3, 6, loop_back=True).forward_only()
    schedule = generate(times, SchedulePolicy(depths=(2, 1, 1)))
    check(schedule)
    assert schedule.peak_in_flight()[0] == 2


# ---- the text form -------------------------------------------------------------------------------------------

LOOP = """\
stages on devices 0 1 2
head on device 0
micro-batches 2
depths 2 2 2
transfers overlapped
passes forward backward
0: F0 a0>1 F1 a1>1 a0<2 H0 g0>2 a1<2 H1 g1>2 g0<1 B0 g1<1 B1
1: a0<0 F0 a0>2 a1<0 F1 a1>2 g0<2 B0 g0>0 g1<2 B1 g1>0
2: a0<1 F0 a0>0 a1<1 F1 a1>0 g0<0 B0 g0>1 g1<0 B1 g1>1
"""

DEALT_OUT = """\
stages on devices 0 1 0 1
head on device 1
micro-batches 1
depths 1 1 1 1
transfers blocking
passes forward
0: F0@0 a0@0>1 a0@2<1 F0@2 a0@2>1
1: a0@1<0 F0@1 a0@1>0 a0@3<0 F0@3 H0
"""


def test_the_text_of_a_pipeline() -> None:
    schedule = generate(equal(3, 2, head_s=(0.5, 0.5), loop_back=True))
    assert to_text(schedule) == LOOP
    assert from_text(LOOP) == schedule
    assert schedule.messages(2, 0) == tuple(Operation(Kind.RECEIVE, 3, m, What.ACTIVATION, 2) for m in range(2))
    assert schedule.operations[2][3] == Operation(Kind.RECEIVE, 2, 1, What.ACTIVATION, 1)
    assert schedule.operations[0][6] == Operation(Kind.SEND, 3, 0, What.GRADIENT, 2)


def test_the_text_of_several_stages_per_device() -> None:
    schedule = generate(equal(4, 1, devices=(0, 1, 0, 1)).forward_only(), overlap=False)
    assert to_text(schedule) == DEALT_OUT
    assert from_text(DEALT_OUT) == schedule


def test_long_lists_are_wrapped_and_comments_skipped() -> None:
    schedule = generate(equal(4, 40, loop_back=True))
    text = to_text(schedule)
    assert max(map(len, text.splitlines())) <= 110
    assert from_text("# a comment\n\n" + text.replace("\n1: ", "  # and another\n1: ")) == schedule


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stages on devices", "devices", "line 1 of a schedule must begin with 'stages on devices', got 'devices 0"),
        ("head on device 0", "head on device x", "'head on device' must be followed by whole numbers, got 'x'"),
        ("depths 2 2 2", "depths 2 -2 2", "'depths' must be followed by whole numbers"),
        ("overlapped", "lapped", "'transfers' must be followed by 'overlapped' or 'blocking', got 'lapped'"),
        ("passes forward backward", "passes backward", "'passes' must be followed by 'forward backward' or"),
        ("1: a0<0", "2: a0<0", "line '2: a0<0 F0 .*' must begin with '1:'"),
        ("F1 a1>1", "G1 a1>1", "token 'G1' of device 0 is neither"),
        ("F1 a1>1", "F1 a1", "token 'a1' of device 0 is neither"),
        ("F1 a1>1", "F1>1 a1>1", "token 'F1>1' of device 0 is neither"),
        ("devices 0 1 2", "devices 0 1 2 0", "token 'F0' of device 0 must name its stage"),
    ],
)
def test_text_that_is_no_schedule(old: str, new: str, message: str) -> None:
    assert old in LOOP
    with pytest.raises(ValueError, match=message):
        from_text(LOOP.replace(old, new, 1))
