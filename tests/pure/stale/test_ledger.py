"""The ledger, and the spans it is made of, against a brute-force model: one state per position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.stale.decide.intervals import head, leaving, pairs, pieces, size
from lightning_hetero.stale.decide.ledger import Ledger
from tests.pure.stale.random_workers import flat

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def ends_of(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes))


@given(SIZES, st.integers(1, 4), st.data())
@settings(max_examples=200)
def test_every_operation_does_what_it_does_to_a_list(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    ledger = Ledger(ends_of(sizes))
    states = ["free"] * sum(sizes)
    assignments: list[list[tuple[int, int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["take", "arrive", "release", "lay_out"]))
        batch = data.draw(st.integers(0, len(sizes) - 1))
        if what == "lay_out" and not ledger.laid_out(batch):
            ledger.lay_out(batch, {r: data.draw(st.integers(0, 5)) for r in range(ranks)})
        elif what == "take":
            count, free = data.draw(st.integers(0, 20)), states.count("free")
            pending = data.draw(st.sets(st.integers(0, ranks - 1)))
            spans = ledger.take(data.draw(st.integers(0, ranks - 1)), count, batch, pending=pending)
            assert size(spans) == min(count, free)
            for i in flat(spans):
                assert states[i] == "free"
                states[i] = "assigned"
            assignments.append(list(spans))
        elif assignments and what in ("arrive", "release"):
            chosen = assignments.pop(data.draw(st.integers(0, len(assignments) - 1)))
            spans, rest = head(chosen, data.draw(st.integers(0, 9)))
            assignments.append(list(rest))
            getattr(ledger, what)(spans)
            for i in flat(spans):
                states[i] = "arrived" if what == "arrive" else "free"
        assert [ledger.free, ledger.arrived] == [states.count("free"), states.count("arrived")]
        arrived = ledger.arrived_spans()
        assert flat(arrived) == [i for i, s in enumerate(states) if s == "arrived"]
        assert all(a[1] < b[0] for a, b in pairwise(arrived)), "touching spans are merged"


@given(SIZES, st.integers(1, 5), st.data())
@settings(max_examples=200)
def test_who_takes_exactly_its_slice_gets_exactly_its_slice(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    """In any order, in any global step: this is what makes updates equal to a single process's."""
    ledger, ahead = Ledger(ends_of(sizes)), data.draw(st.integers(0, 2))
    for global_step in range(len(sizes)):
        for batch in range(global_step, min(global_step + ahead, len(sizes) - 1) + 1):
            if not ledger.laid_out(batch):
                weights = [data.draw(st.integers(1, 9)) for _ in range(ranks)]
                ledger.lay_out(batch, dict(enumerate(weights)))
        slices = {r: ledger.slice(r, global_step) for r in range(ranks)}
        start, end = ledger.bounds(global_step)
        assert sorted(flat(slices.values())) == list(range(start, end))
        pending = set(range(ranks))
        for rank in data.draw(st.permutations(range(ranks))):
            pending.discard(rank)
            spans = ledger.take(rank, slices[rank][1] - slices[rank][0], global_step, pending=pending)
            assert flat(spans) == flat([slices[rank]])
            ledger.arrive(spans)
    assert ledger.arrived == sum(sizes)


def laid_out() -> Ledger:
    """Two ranks, batches of 10; two of them laid out 6 : 4."""
    ledger = Ledger([10, 20, 30])
    for batch in (0, 1):
        ledger.lay_out(batch, {0: 6, 1: 4})
    return ledger


def test_the_order_of_preference() -> None:
    ledger = laid_out()
    # 1. own of this batch, 3. own of the next (rank 1 is still expected for its part), 4. behind, 5. others'
    assert ledger.take(0, 25, 0, pending={1}) == ((0, 6), (10, 16), (20, 30), (6, 9))
    assert ledger.take(1, 99, 0) == ((9, 10), (16, 20))
    # 2. what nobody is expected for any more comes before later batches
    assert laid_out().take(0, 8, 0, pending=()) == ((0, 6), (6, 8))
    # 1. own slices of batches gone by come first
    assert laid_out().take(1, 5, 1, pending={0}) == ((6, 10), (16, 17))


def test_resumes_from_applied_spans() -> None:
    ledger = Ledger([10, 20], applied=[(15, 17), (0, 10)])
    assert (ledger.free, ledger.arrived) == (8, 12)
    assert ledger.take(0, 8, 1) == ((10, 15), (17, 20))


@pytest.mark.parametrize(
    ("ends", "applied", "words"),
    [
        ([0, 5], [], "0 follows 0"),
        ([5, 3], [], "3 follows 5"),
        ([5], [(0, 3), (2, 4)], r"\[2, 4\) are there already"),
        ([5], [(4, 6)], r"not all positions of \[4, 6\)"),
    ],
)
def test_bad_input_is_refused(ends: list[int], applied: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ledger(ends, applied=applied)


def test_the_cost_does_not_grow_with_the_number_of_samples() -> None:
    """Ten thousand batches of a million samples: what is stored stays as short as the list of assignments."""
    ledger = Ledger(range(1_000_000, 10_000_000_001, 1_000_000))
    for global_step in range(10_000):
        ledger.lay_out(global_step, {0: 600_000, 1: 400_000})
        for rank in (0, 1):
            ledger.arrive(ledger.take(rank, ledger.planned(rank, global_step), global_step, pending={1} - {rank}))
    assert ledger.arrived_spans() == [(0, 10_000_000_000)]
    assert len(ledger._slices) <= 2


@given(st.lists(st.integers(0, 30), unique=True, max_size=8).map(sorted), st.integers(0, 9), st.integers(1, 30))
def test_spans_are_cut_where_their_positions_are(cuts: list[int], count: int, total: int) -> None:
    spans = pairs(cuts[: len(cuts) // 2 * 2])
    positions = flat(spans)
    parts = pieces(spans, count)
    step = count or max(len(positions), 1)
    assert [flat(part) for part in parts] == [positions[i : i + step] for i in range(0, max(len(positions), 1), step)]
    global_steps = min(count, total)
    kept = flat(leaving(global_steps, spans, total))
    assert kept == [p for p in positions if p < total][: total - global_steps]


def test_samples_with_other_substeps_behind_them_are_granted_apart() -> None:
    ledger = Ledger([12])
    taken = ledger.take(0, 12, 0)
    assert ledger.alike(taken) == (((0, 12),), ())
    assert ledger.first(0, [(2, 4), (8, 10)]) and ledger.first(1, [(2, 3)])
    assert not ledger.first(0, [(3, 5)]) and not ledger.first(1, [(0, 12)])  # nothing of them is noted
    parts, rest = [], taken
    while rest:
        part, rest = ledger.alike(rest)
        parts.append(part)
    assert parts == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 8),), ((8, 10),), ((10, 12),)]
    assert ledger.alike([(0, 2), (4, 8), (3, 4)]) == (((0, 2), (4, 8)), ((3, 4),))
    other = Ledger([12])
    other.resume_substeps(ledger.substeps())
    assert other.substeps() == {0: [[2, 4], [8, 10]], 1: [[2, 3]]}
