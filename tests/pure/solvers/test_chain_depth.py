"""How many micro-batches may be in flight: against the formulas in exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.solvers.chain.depth import cumulative_depth, per_link_depth, textbook_depth

TENTHS = st.integers(0, 40)
LINKS = st.lists(TENTHS, min_size=1, max_size=6)


@given(LINKS, TENTHS, st.integers(1, 40), st.integers(1, 60))
def test_per_link_is_the_formula(links: list[int], loop: int, bottleneck: int, micro: int) -> None:
    keep = [2 + math.ceil(Fraction(2 * loop, bottleneck))]
    for link in reversed(links):
        keep.insert(0, keep[0] + 1 + math.ceil(Fraction(2 * link, bottleneck)))
    expected = tuple(min(k, micro) for k in keep)
    # tenths are not exact in floats: quotients that are whole numbers come out a little above them
    found = per_link_depth(bottleneck / 10, [link / 10 for link in links], loop / 10, micro)
    assert found == expected


@given(st.data(), LINKS, TENTHS, TENTHS, st.integers(1, 60), st.integers(0, 2))
def test_cumulative_is_the_formula(
    data: st.DataObject, links: list[int], loop: int, head: int, micro: int, extra: int
) -> None:
    stages = data.draw(st.lists(st.integers(1, 40), min_size=len(links) + 1, max_size=len(links) + 1))
    bottleneck = max(*stages, *links, loop, head)
    keep: list[int] = []
    for i in range(len(stages)):
        way = sum(stages[i:]) + 2 * sum(links[i:]) + 2 * loop + head
        keep.append(math.ceil(Fraction(way, bottleneck)))
    for i in reversed(range(len(links))):
        keep[i] = max(keep[i], keep[i + 1] + 1)
    found = cumulative_depth(
        bottleneck / 10, [s / 10 for s in stages], [x / 10 for x in links], loop / 10, head / 10, micro, extra=extra
    )
    assert found == tuple(min(k + extra, micro) for k in keep)


@given(LINKS, TENTHS, st.integers(1, 40), st.integers(1, 60))
def test_depths_never_increase_along_the_pipeline(links: list[int], loop: int, bottleneck: int, micro: int) -> None:
    depths = per_link_depth(float(bottleneck), [float(x) for x in links], float(loop), micro)
    assert list(depths) == sorted(depths, reverse=True)
    assert depths[-1] >= 1 and depths[0] <= micro


def test_a_single_stage_keeps_one() -> None:
    assert per_link_depth(1.0, [], 0.0, 8) == cumulative_depth(1.0, [1.0], [], 0.0, 0.5, 8, extra=1) == (1,)


def test_rounding_in_sums_does_not_count_as_a_turn() -> None:
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert cumulative_depth(0.1, [0.1] * 3, [0.0] * 2, 0.0, 0.0, 9) == (3, 2, 1)


def test_extremes_do_not_overflow() -> None:
    assert per_link_depth(5e-324, [1e308], 1e308, 8) == (8, 8)
    assert per_link_depth(0.0, [0.0], 0.0, 8) == (3, 2)


def test_the_textbook_counts_stages() -> None:
    assert textbook_depth(4, 8) == (4, 3, 2, 1)
    assert textbook_depth(1, 8) == (1,)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: per_link_depth(1.0, [1.0], 1.0, 0), ValueError, "micro_batches=0 must be at least 1"),
        (lambda: per_link_depth(1.0, [1.0], 1.0, 2.0), TypeError, "micro_batches=2.0 must be a whole number"),  # type: ignore[arg-type]
        (lambda: per_link_depth(-1.0, [1.0], 1.0, 2), ValueError, "bottleneck_s=-1.0 must be a finite"),
        (lambda: per_link_depth(1.0, [math.nan], 1.0, 2), ValueError, "link_s=nan"),
        (lambda: per_link_depth(1.0, [1.0], math.inf, 2), ValueError, "loop_s=inf"),
        (lambda: per_link_depth(0.0, [1.0], 0.0, 2), ValueError, "bottleneck_s=0.0 although"),
        (lambda: cumulative_depth(1.0, [1.0], [1.0], 0.0, 0.0, 2), ValueError, "S stages need S - 1 links"),
        (lambda: cumulative_depth(1.0, [1.0], [], 0.0, -2.0, 2), ValueError, "head_s=-2.0"),
        (lambda: cumulative_depth(1.0, [1.0], [], 0.0, 0.0, 2, extra=-1), ValueError, "extra=-1 must be at least 0"),
        (lambda: textbook_depth(0, 1), ValueError, "stages=0 must be at least 1"),
    ],
)
def test_bad_arguments_are_named(act: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()
