"""A cell as a test: it runs, holds or fails, and is written down for those who make a page of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults import namespaces
from tests.faults.cells import Cell
from tests.faults.outcomes import expected
from tests.faults.runner import run


def _keep(rows: str | None, cell: Cell, **said: object) -> None:
    """Appends what came of a cell to a file, for those who make a page of it."""
    if rows is not None:
        row = {"cell": cell.name, "engine": cell.engine, "launcher": cell.launcher, "fault": cell.fault.name}
        row |= {"combined": cell.label, **said} if cell.label else said
        file = os.open(rows, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, (json.dumps(row) + "\n").encode())
        os.close(file)


def hold(cell: Cell, folder: Path, rows: str | None) -> None:
    """Runs it; fails if what comes of it is not what must.

    Args:
        folder: to run in.
        rows: file to append what came of it to.
    """
    wanted = expected(cell)
    if cell.fault.needs and (why := namespaces.why_not(cell.fault.needs)):
        _keep(rows, cell, outcome="skipped", why=why)
        pytest.skip(why)
    outcome = run(cell, folder)
    _keep(rows, cell, **outcome.row(), wanted=wanted.outcome, known=wanted.known)
    if outcome.violations and wanted.known:
        pytest.xfail(wanted.known)
    assert not outcome.violations, "\n".join([*outcome.violations, *outcome.screens])
