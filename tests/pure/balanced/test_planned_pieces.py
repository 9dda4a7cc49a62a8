"""In which pieces parts are computed: the same number on every rank, none too large, all samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.balanced.decide.pieces import piece_sizes
from lightning_hetero.shares.bounds import ShareBounds

RANKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5)


@given(RANKS.filter(lambda ranks: any(s for s, _ in ranks)), st.integers(1, 2), st.integers(1, 4))
def test_pieces(ranks: list[tuple[int, int]], least: int, quantum: int) -> None:
    shares = [share * quantum for share, _ in ranks]
    caps = [max(least, cap) * quantum for _, cap in ranks]
    sizes = [
        piece_sizes(shares, caps, r, computed=share or least, least=least, quantum=quantum)
        for r, share in enumerate(shares)
    ]
    assert len({len(s) for s in sizes}) == 1
    for share, cap, own in zip(shares, caps, sizes, strict=True):
        assert sum(own) == (share or least)
        pieces = [size for size in own if size]
        assert all(size >= min(least, share or least) for size in pieces)
        assert max(pieces) <= cap or len(pieces) == (share or least) // least  # as many as there may be
        if share >= quantum * len(own):
            assert all(size % quantum == 0 for size in pieces)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 60), st.integers(1, 2), st.integers(1, 3))
def test_bounds_of_parts_in_pieces_admit_the_batch(upper: list[int], total: int, least: int, quantum: int) -> None:
    world = len(upper)
    total = max(total, world * least) * quantum
    bounds = ShareBounds(upper=upper, least=least)
    if not any(bounds.caps(world, quantum)):
        return
    number = bounds.pieces(world, total, quantum)
    low, up = bounds.in_pieces(number, world, quantum).resolve(world, total, quantum)
    assert sum(low) <= total <= sum(up)
    assert all(most <= number * cap or number == 1 for most, cap in zip(up, upper, strict=True))
