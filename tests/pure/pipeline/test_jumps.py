"""Behind which batches all ranks wait for a decision."""

from __future__ import annotations

import pytest

from lightning_hetero.pipeline.decide.replanning import Jumps

pytestmark = pytest.mark.pure
STEADY = [(8, 0.1), (4, 0.2)]


def settled() -> Jumps:
    jumps = Jumps()
    assert [jumps.add(0, STEADY, {}) for _ in range(8)] == [True] * 5 + [False] * 3, "nothing is known at first"
    return jumps


def test_steps_of_an_unchanged_device_may_differ() -> None:
    jumps = settled()
    assert not any(jumps.add(0, [(8, 0.1 * x), (4, 0.2 / x)], {}) for x in (1.05, 0.95, 1.06, 0.97, 1.0))


@pytest.mark.parametrize("factor", [0.5, 1.2, 4.0])
def test_a_change_is_waited_for_while_it_is_in_the_last_batches(factor: float) -> None:
    jumps = settled()
    changed = [(8, 0.1), (4, 0.2 * factor)]
    assert [jumps.add(0, changed, {}) for _ in range(5)] == [True, True, True, False, False]


def test_a_plan_that_answers_a_jump_is_waited_for_until_it_has_settled() -> None:
    jumps = settled()
    changed = [(8, 0.1), (4, 0.4)]
    assert jumps.add(0, changed, {})
    assert [jumps.add(1, changed, {}) for _ in range(8)] == [True] * 5 + [False] * 3


def test_a_small_correction_is_not_waited_for() -> None:
    jumps = settled()
    assert not any(jumps.add(1, STEADY, {}) for _ in range(8))


def test_work_counts_per_sample() -> None:
    jumps = settled()
    assert not any(jumps.add(0, [(16, 0.2), (2, 0.1)], {}) for _ in range(3))


def test_ranks_at_rest_count_by_what_they_tell_and_others_not_at_all() -> None:
    jumps = Jumps()
    waits = [jumps.add(0, [(8, 0.1), (0, 0.0)], {1: seconds}) for seconds in [1e-3] * 8 + [4e-3] * 4]
    assert waits == [True] * 5 + [False] * 3 + [True] * 3 + [False]
    assert not any(jumps.add(0, [(8, 0.1), (0, float(i))], {}) for i in range(4)), "one that works tells nothing"
