"""Where the time of a long step went: spans, percentiles, and garbage collections as they are noted."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from benchmarks.pipeline.stalls import Collections, Sleeper, Span, stalls, within
from benchmarks.steps import percentile


def test_spans_count_as_far_as_they_lie_in_a_step() -> None:
    spans = [Span(0.0, 1.0), Span(2.0, 0.5), Span(3.0, 4.0)]
    assert within(spans, 0.5, 3.5) == pytest.approx(0.5 + 0.5 + 0.5)
    assert within(spans, 1.0, 2.0) == 0.0


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (75, 3.0), (76, 4.0), (95, 4.0), (100, 4.0), (0, 1.0)])
def test_percentiles_are_by_nearest_rank(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_stalls_are_held_against_the_median_of_all_runs() -> None:
    steps_s = [[1.0, 1.0, 1.4], [1.0, 1.29, 2.0]]
    collections_s = [[0.0, 0.0, 0.3], [0.0, 0.1, 0.9]]
    assert stalls(steps_s, collections_s) == [(1.4, 0.3), (2.0, 0.9)]


def test_collections_are_noted_while_entered() -> None:
    with Collections() as collections:
        gc.collect()
        assert len(collections.spans) == 1 and collections.spans[0].seconds > 0.0
    gc.collect()
    assert len(collections.spans) == 1 and gc.callbacks.count(collections._note) == 0


def test_a_line_cut_short_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "late"
    assert Sleeper(path).late() == []
    path.write_text("1.5 0.25\n2.5 0.1")
    assert Sleeper(path).late() == [Span(1.5, 0.25)]
