"""Search of the largest size that fits, against a loop over all sizes."""

from __future__ import annotations

import pytest

from lightning_hetero.shares.size_search import SizeMode, SizeSearch


def searched(limit: int, mode: SizeMode, **options: float) -> tuple[SizeSearch, list[int]]:
    search, tried = SizeSearch(mode, **options), list[int]()  # type: ignore[arg-type]
    while not search.done:
        tried.append(search.size)
        search.tell(search.size <= limit)
    return search, tried


@pytest.mark.parametrize("first", [1, 2, 5, 40])
@pytest.mark.parametrize("most", [1, 7, 32, 100])
def test_what_is_found(first: int, most: int) -> None:
    for limit in range(110):
        search, tried = searched(limit, "binsearch", init_val=first, max_val=most, margin=0.0)
        assert search.found == search.size == min(limit, most)
        assert len(set(tried)) == len(tried) and max(tried) <= most
        doubled, tried = searched(limit, "power", init_val=first, max_val=most)
        assert doubled.found <= min(limit, most)
        assert 2 * doubled.found >= min(limit, most) or (doubled.found == 0) == (limit == 0)


def test_power_doubles_and_ends_at_the_first_that_does_not_fit() -> None:
    assert searched(25, "power", init_val=3)[1] == [3, 6, 12, 24, 48]
    assert searched(25, "power", init_val=30)[1] == [30, 15]
    assert searched(25, "power", init_val=3, max_trials=2)[0].found == 6


def test_a_margin_is_left_where_the_limit_was_met() -> None:
    assert searched(25, "binsearch", margin=0.2)[0].found == 20
    assert searched(1, "binsearch", margin=0.9)[0].found == 1
    assert searched(50, "binsearch", max_val=32, margin=0.2)[0].found == 32


def test_after_the_end_nothing_is_taken_in() -> None:
    search, _ = searched(6, "power", init_val=3)
    search.tell(True)
    search.tell(False)
    assert search.done and search.size == search.found == 6
