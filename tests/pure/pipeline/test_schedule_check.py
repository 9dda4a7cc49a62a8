"""`check` finds each kind of mistake and names it; what it passes can be executed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pipeline.decide.schedule import PipelineTimes, check, from_text, generate, to_text
from tests.pure.pipeline.schedule_kit import execute, pipelines, policies

GOOD = """\
stages on devices 0 1
head on device 0
micro-batches 2
depths 2 2
transfers overlapped
passes forward backward
0: F0 a0>1 F1 a1>1 a0<1 H0 g0>1 a1<1 H1 g1>1 g0<1 B0 g1<1 B1
1: a0<0 F0 a0>0 a1<0 F1 a1>0 g0<0 B0 g0>0 g1<0 B1 g1>0
"""


def test_the_good_one_is_what_is_generated() -> None:
    times = PipelineTimes.proportional([1.0] * 2, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    check(from_text(GOOD))
    assert to_text(generate(times)) == GOOD


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("head on device 0", "head on device 2", "^shape: head on device 2, need 0 or 1"),
        ("micro-batches 2", "micro-batches 0", "^shape: 0 micro-batches"),
        ("depths 2 2", "depths 2", "^shape: depths"),
        ("depths 2 2", "depths 2 0", "^shape: depths"),
        ("g1<1 B1\n", "g1<1\n", "^once: B1@0 is missing on device 0"),
        ("g1<0 B1 g1>0", "g1<0 B1 B1 g1>0", "^once: B1@1 stands 2 times in the list of device 1"),
        ("micro-batches 2", "micro-batches 1", "^once: F1@0 has no business on device 0"),
        ("passes forward backward", "passes forward", "^once: g0@2>1 has no business on device 0"),
        ("a0<1 H0", "a0<0 H0", "^once: a0@2<0 has no business on device 0"),
        ("head on device 0", "head on device 1", "^once: a0@2<1 has no business on device 0"),
        ("1: a0<0 F0 a0>0 a1<0 F1 a1>0", "1: a1<0 F1 a1>0 a0<0 F0 a0>0", "^micro-batch order: a1@1<0 stands before a0"),
        ("1: a0<0 F0 a0>0 a1<0 F1 a1>0", "1: a0<0 a1<0 F1 F0 a0>0 a1>0", "^micro-batch order: F1@1 stands before F0@1"),
        ("1: a0<0 F0 a0>0", "1: F0 a0<0 a0>0", "^way: F0@1 stands before a0@1<0 in the list of device 1"),
        ("1: a0<0 F0 a0>0", "1: a0<0 a0>0 F0", "^way: a0@1>0 stands before F0@1"),
        ("g0<1 B0", "B0 g0<1", "^way: B0@0 stands before g0@0<1"),
        ("a1>1 a0<1 H0 g0>1", "a0<1 H0 g0>1 a1>1", "^channel: device 0 sends g0@2>1 where device 1 expects a1@1<0"),
        ("depths 2 2", "depths 1 2", "^depth: F1@0 is number 2 in flight on stage 0, which may have 1"),
        ("depths 2 2", "depths 2 1", "^depth: F1@1 is number 2 in flight on stage 1"),
    ],
)
def test_the_first_broken_rule_is_named(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ValueError, match=message):
        check(from_text(GOOD.replace(old, new)))


@pytest.mark.parametrize("devices", [(1, 0), (0, 2), (0, 0), (0, 1, 2), ()])
def test_devices_must_be_those_that_have_lists(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^shape: stages on devices .* with 2 lists"):
        check(replace(from_text(GOOD), devices=devices))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("g0<1 B0 g1<1 B1", "g0<1 g1<1 B0 B1"),  # both wait earlier than they must
        ("F1 a1>1 a0<1 H0", "a0<1 F1 a1>1 H0"),
    ],
)
def test_other_orders_may_be_as_valid(old: str, new: str) -> None:
    assert GOOD.count(old) == 1
    check(from_text(GOOD.replace(old, new)))


def test_a_deadlock_is_named() -> None:
    # device 0 waits for the first output before it sends the second activation; device 1 has it the other way round
    text = GOOD.replace("F1 a1>1 a0<1 H0 g0>1", "a0<1 F1 a1>1 H0 g0>1")
    text = text.replace("a0<0 F0 a0>0 a1<0 F1 a1>0", "a0<0 F0 a1<0 a0>0 F1 a1>0")
    with pytest.raises(ValueError, match="deadlock: device 0 at a0@2<1, device 1 at a1@1<0: each waits"):
        check(from_text(text))


def test_lists_for_overlapped_transfers_may_hang_where_transfers_block() -> None:
    # both send to one another first: fine with buffers, stuck without
    text = GOOD.replace("overlapped", "blocking")
    with pytest.raises(ValueError, match="deadlock: device 0 at a1@0>1, device 1 at a0@1>0"):
        check(from_text(text))


@given(st.data(), pipelines(), st.booleans())
def test_what_passes_can_be_executed(data: st.DataObject, times: PipelineTimes, overlap: bool) -> None:
    """Moves operations at random: either the check refuses, or nobody hangs and every input is there."""
    schedule = generate(times, data.draw(policies(times)), overlap=overlap)
    lists = [list(operations) for operations in schedule.operations]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(lists))
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row.insert(j, row.pop(i))
    changed = replace(schedule, operations=tuple(map(tuple, lists)))
    try:
        check(changed)
    except ValueError:
        assert changed != schedule
        return
    execute(changed, seed=0)
