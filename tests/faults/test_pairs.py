"""Every pair of what a training may have and what may happen to it: a few each time, all of them with ``--long``."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.faults.cells import Cell
from tests.faults.kit import hold
from tests.faults.pairs import FACTORS, allowed, cells, pairs_of, pairwise

pytestmark = pytest.mark.timeout(300)

EVERY = list(cells())
QUICK = (3, 6, 12, 25, 54)
"""Those that the suite runs each time: every engine and launcher is among them."""


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if i in QUICK else pytest.mark.long, id=str(cell)) for i, cell in enumerate(EVERY)],
)
def test_what_comes_of_it(cell: Cell, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    hold(cell, tmp_path, pytestconfig.getoption("--matrix-rows"))


def test_every_pair_that_can_be_is_in_some_cell() -> None:
    rows = pairwise(FACTORS, allowed)
    covered = set().union(*map(pairs_of, rows))
    for a, b in combinations(FACTORS, 2):
        for x, y in product(FACTORS[a], FACTORS[b]):
            assert ((a, x, b, y) in covered) == allowed({a: x, b: y})
    assert all(map(allowed, rows)) and rows == pairwise(FACTORS, allowed)
    assert len(rows) <= 64 and len({cell.name for cell in EVERY}) == len(rows)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 3, 3), (5, 4, 2, 2, 2)])
def test_few_rows_cover_all_pairs(sizes: tuple[int, ...]) -> None:
    factors = {f"factor{i}": list(range(size)) for i, size in enumerate(sizes)}
    rows = pairwise(factors)
    wanted = sum(a * b for a, b in combinations(sizes, 2))
    assert len(set().union(*map(pairs_of, rows))) == wanted
    most = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert most <= len(rows) <= 2 * most


def test_what_the_suite_runs_meets_every_engine_and_launcher() -> None:
    quick = [EVERY[i] for i in QUICK]
    assert {cell.engine for cell in quick} == {cell.engine for cell in EVERY}
    assert {cell.launcher for cell in quick} == {cell.launcher for cell in EVERY}
