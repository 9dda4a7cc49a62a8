"""Real trainings meet real faults: a few each time, all of them with ``pytest tests/faults --matrix``.

What must come of each stands in `tests.faults.outcomes`; `benchmarks.fault_matrix` makes a page of what has come.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cells import QUICK, Cell, cells, hook_cells
from tests.faults.kit import hold

pytestmark = pytest.mark.timeout(300)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--matrix")
    chosen = [cell for cell in (*cells(), *hook_cells()) if whole or cell.name in QUICK]
    metafunc.parametrize("cell", chosen, ids=str)


def test_what_comes_of_it(cell: Cell, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    hold(cell, tmp_path, pytestconfig.getoption("--matrix-rows"))
