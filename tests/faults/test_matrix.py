"""Real trainings meet real faults: a few each time, all of them with ``pytest tests/faults --matrix``.

What must come of each stands in `tests.faults.outcomes`; `benchmarks.fault_matrix` makes a page of what has come.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults import namespaces
from tests.faults.cells import QUICK, Cell, cells, hook_cells
from tests.faults.outcomes import expected
from tests.faults.runner import run

pytestmark = pytest.mark.timeout(300)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--matrix")
    chosen = [cell for cell in (*cells(), *hook_cells()) if whole or cell.name in QUICK]
    metafunc.parametrize("cell", chosen, ids=str)


def keep(rows: str | None, cell: Cell, **said: object) -> None:
    """Appends what came of a cell to a file, for those who make a page of it."""
    if rows is not None:
        row = {"cell": cell.name, "engine": cell.engine, "launcher": cell.launcher, "fault": cell.fault.name, **said}
        file = os.open(rows, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, (json.dumps(row) + "\n").encode())
        os.close(file)


def test_what_comes_of_it(cell: Cell, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rows, wanted = pytestconfig.getoption("--matrix-rows"), expected(cell)
    if cell.fault.needs and (why := namespaces.why_not(cell.fault.needs)):
        keep(rows, cell, outcome="skipped", why=why)
        pytest.skip(why)
    outcome = run(cell, tmp_path)
    keep(rows, cell, **outcome.row(), wanted=wanted.outcome, known=wanted.known)
    if outcome.violations and wanted.known:
        pytest.xfail(wanted.known)
    assert not outcome.violations, "\n".join([*outcome.violations, *outcome.screens])
