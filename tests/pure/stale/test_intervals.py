"""Spans of an epoch's order that a resumed run leaves out."""

from __future__ import annotations

import pytest

from lightning_hetero.stale.decide.intervals import leaving


@pytest.mark.parametrize(
    ("ticks", "spans", "kept"),
    [
        (2, [[0, 8], [10, 18]], [[0, 8], [10, 18]]),  # two are free
        (3, [[0, 8], [9, 19]], [[0, 8], [9, 18]]),
        (4, [[0, 17], [18, 20]], [[0, 16]]),
        (2, [[0, 16], [18, 24]], [[0, 16], [18, 20]]),  # beyond the last batch that is trained
    ],
)  # fmt: skip
def test_each_batch_to_come_has_a_sample(ticks: int, spans: list[list[int]], kept: list[list[int]]) -> None:
    """The others may have gone on while a rank failed: then the last samples are trained again."""
    assert [list(span) for span in leaving(ticks, spans, 20)] == kept
