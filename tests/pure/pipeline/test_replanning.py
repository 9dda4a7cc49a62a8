"""What ranks tell one another, behind which batches they wait for a decision, and from when on it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.pipeline.decide.replanning import BatchReport, Jumps, changeover, reporting_group
from lightning_hetero.types import GroupPlan

# ---- what is told survives the sum over ranks ------------------------------------------------------------------------

GROUPS = [
    GroupPlan(ranks=(2, 0), cuts=(0, 1, 4), samples=8, micro_batches=(4, 4), depths=(2, 2)),
    GroupPlan(ranks=(1,), cuts=(0, 4), samples=8, micro_batches=(8,), depths=()),
]


def link(source: int, target: int) -> LinkTime:
    return LinkTime(
        source=source, target=target, messages=source + 1, size_bytes=1e6 * (target + 1), seconds=0.25 * (source + 1)
    )


def test_everything_comes_out_as_it_was_put_in() -> None:
    # The batch lasts 0.7: rank 2 sends its message last, at 0.6, and the exchange took it 0.1 in the batch before.
    work = [(8.0, 0.5, 0.0, 0.2), (8.0, 0.25, 0.25, 0.2), (8.0, 0.4, 0.2, 0.1), (0.0, 0.0, 0.0, 0.7)]
    waits_s, dummy_s = (0.2, 0.45, 0.3, 0.7), (0.0, 0.0, 0.0, 0.002)  # rank 3 rests
    links = [[link(2, 0), link(3, 0)], [], [link(0, 2)], []]
    layers = {0: (1, [0.1, 0.2, 0.3]), 2: (0, [0.4])}
    told: list[BatchReport] = []
    for r in range(4):
        first, layer_s = layers.get(r, (0, []))
        told.append(
            BatchReport.of_rank(
                r, 4, 4, work[r], rest_s=dummy_s[r], links=links[r], first_layer=first, layer_s=layer_s
            )
        )
    assert len({len(each.numbers) for each in told}) == 1
    whole = replace(told[0], numbers=[sum(column) for column in zip(*(t.numbers for t in told), strict=True)])
    assert [(n, compute_s) for n, compute_s, _ in whole.work] == [(round(n), compute_s) for n, compute_s, *_ in work]
    assert [wait_s for *_, wait_s in whole.work] == pytest.approx(waits_s)
    assert whole.rest_s == {3: 0.002}
    assert whole.links == [link(2, 0), link(3, 0), link(0, 2)]
    assert whole.layer_s(GROUPS[0]) == {2: [0.4], 0: [0.1, 0.2, 0.3]}
    silent = BatchReport.of_rank(1, 4, 4, work[1])
    assert silent.links == [] and silent.layer_s(GROUPS[1]) == {}


@pytest.mark.parametrize("batch", range(4))
def test_groups_tell_of_layers_in_turn(batch: int) -> None:
    assert reporting_group(batch, GROUPS) == batch % 2


# ---- jumps ----------------------------------------------------------------------------------------------------------

STEADY = [(8, 0.1), (4, 0.2)]


def settled() -> Jumps:
    jumps = Jumps()
    assert [jumps.add(0, STEADY, {}) for _ in range(8)] == [True] * 5 + [False] * 3, "nothing is known at first"
    return jumps


def test_a_change_is_waited_for_while_it_is_in_the_last_batches_and_small_ones_are_not() -> None:
    jumps = settled()
    assert not any(jumps.add(0, [(8, 0.1 * x), (4, 0.2 / x)], {}) for x in (1.05, 0.95, 1.06, 0.97, 1.0))
    assert not any(settled().add(0, [(16, 0.2), (2, 0.1)], {}) for _ in range(3)), "work counts per sample"
    for factor in (0.5, 1.2, 4.0):
        jumps = settled()
        assert [jumps.add(0, [(8, 0.1), (4, 0.2 * factor)], {}) for _ in range(5)] == [True] * 3 + [False] * 2


def test_a_plan_that_answers_a_jump_is_waited_for_until_it_has_settled() -> None:
    jumps, changed = settled(), [(8, 0.1), (4, 0.4)]
    assert jumps.add(0, changed, {})
    assert [jumps.add(1, changed, {}) for _ in range(8)] == [True] * 5 + [False] * 3
    jumps = settled()
    assert not any(jumps.add(1, STEADY, {}) for _ in range(8)), "a small correction"


def test_ranks_at_rest_count_by_what_they_tell_and_others_not_at_all() -> None:
    jumps = Jumps()
    waits = [jumps.add(0, [(8, 0.1), (0, 0.0)], {1: seconds}) for seconds in [1e-3] * 8 + [4e-3] * 4]
    assert waits == [True] * 5 + [False] * 3 + [True] * 3 + [False]
    assert not any(jumps.add(0, [(8, 0.1), (0, float(i))], {}) for i in range(4)), "one that works tells nothing"


# ---- never for samples that no rank would compute, never within a window ---------------------------------------------

LEADERS = st.sets(st.integers(0, 3), min_size=1)


@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 5), LEADERS, LEADERS, st.booleans())
def test_every_batch_is_computed_by_those_who_read_it(
    step: int, lag: int, window: int, old: set[int], new: set[int], moves: bool
) -> None:
    found = changeover((2, step), lag=lag, window=window, drawn_for=old, leaders=new, moves=moves)
    (epoch, layers), (same, shares) = found
    assert epoch == same == 2 and step <= layers and step + lag < shares
    assert layers % (window if moves else 1) == 0
    for batch in range(step, max(layers, shares) + 2):
        leads = new if batch >= layers else old
        read = new if batch >= shares else old
        assert read <= leads, batch
    if old <= new:
        assert layers < step + window, "layers move at once"
    else:
        assert layers == shares < step + lag + 1 + window
