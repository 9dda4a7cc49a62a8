"""From when on another plan holds: never for samples that nobody would compute, never within a window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pipeline.decide.replanning import changeover

LEADERS = st.sets(st.integers(0, 3), min_size=1)


@given(st.integers(0, 20), st.integers(0, 9), st.integers(1, 5), LEADERS, LEADERS, st.booleans())
def test_every_batch_is_computed_by_those_who_read_it(
    step: int, lag: int, window: int, old: set[int], new: set[int], moves: bool
) -> None:
    found = changeover((2, step), lag=lag, window=window, drawn_for=old, leaders=new, moves=moves)
    (epoch, layers), (same, shares) = found.layers_at, found.shares_at
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
