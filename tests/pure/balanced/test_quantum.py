"""`auto_quantum`: 1 unless something asks for steps; then a power of two that a split can do with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.balanced.decide.quantum import ShapeNeeds, auto_quantum
from lightning_hetero.shares.bounds import ShareBounds

PER_SIZE, TILES = ShapeNeeds(compiled=True, per_size=True), ShapeNeeds(tiles=True)


@pytest.mark.parametrize(
    ("total", "world", "needs", "expected"),
    [
        (256, 4, ShapeNeeds(), 1),
        (256, 4, ShapeNeeds(compiled=True), 1),  # code that takes any size
        (256, 4, PER_SIZE, 8),
        (512, 2, PER_SIZE, 32),
        (96, 2, PER_SIZE, 4),
        (4 * 17, 4, PER_SIZE, 2),
        (255, 2, PER_SIZE, 1),
        (4 * 15, 4, PER_SIZE, 1),  # an eighth of 15 samples is no step
        (4096, 4, TILES, 8),
        (128, 4, TILES, 4),
        (48, 4, TILES, 1),
    ],
)
def test_known_cases(total: int, world: int, needs: ShapeNeeds, expected: int) -> None:
    assert auto_quantum(total, world, needs) == expected


@given(total=st.integers(1, 1 << 20), world=st.integers(1, 64), needs=st.sampled_from([PER_SIZE, TILES]))
def test_it_divides_the_batch_and_an_eighth_of_the_share_and_admits_a_split(
    total: int, world: int, needs: ShapeNeeds
) -> None:
    quantum = auto_quantum(total, world, needs)
    assert total % quantum == 0
    assert quantum & (quantum - 1) == 0
    assert quantum == 1 or 8 * quantum * world <= total
    if total >= world:
        low, up = ShareBounds().resolve(world, total, quantum)
        assert sum(low) <= total <= sum(up)


def test_what_one_rank_needs_holds_for_all() -> None:
    ranks = [ShapeNeeds(), ShapeNeeds(compiled=True), ShapeNeeds(tiles=True)]
    assert ShapeNeeds.of_all(ranks) == ShapeNeeds(compiled=True, tiles=True)


@pytest.mark.parametrize(
    ("bounds", "world", "total", "low"),
    [
        (ShareBounds(usual=2), 4, 16, 2),
        (ShareBounds(usual=2), 4, 8, 2),
        (ShareBounds(usual=2), 4, 7, 1),  # not all can have two
        (ShareBounds(usual=2), 4, 64, 4),
        (ShareBounds(usual=2, lower=1), 4, 64, 1),  # as it was asked for
        (ShareBounds(usual=2, upper=[1, 16, 16, 16]), 4, 16, 1),
    ],
)
def test_no_rank_has_a_single_sample_by_default_where_code_is_compiled(
    bounds: ShareBounds, world: int, total: int, low: int
) -> None:
    assert bounds.resolve(world, total)[0][0] == low
