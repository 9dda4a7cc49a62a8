"""A plugin of pytest: each test's outcome is noted as soon as it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu.check.found import FILE, LINE, append


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # skipped: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().split("\n")[0][:300]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = report.outcome if report.when != "teardown" else "failed"
    test = {
        "name": report.nodeid.rpartition("::")[2],
        "outcome": outcome,
        "seconds": round(report.duration, 2),
        "why": "" if outcome == "passed" else _why(report),
    }
    append(Path(os.environ[FILE]), {**json.loads(os.environ[LINE]), "test": test})
