"""The benchmarks' one command, in its quick form: a smoke test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def quick(*names: str, limit_s: float) -> str:
    """Runs the command from the checkout's root and returns what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *names], cwd=ROOT, capture_output=True, text=True,
        timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_one_benchmark_runs_and_leaves_what_is_committed_alone() -> None:
    committed = (ROOT / "benchmarks" / "faults" / "results.json").read_bytes()
    said = quick("faults", limit_s=300.0)
    assert "== 1/1 faults" in said and "[faults 1/2, " in said and "[faults 2/2, " in said
    assert (ROOT / "benchmarks" / "faults" / "results.json").read_bytes() == committed
    report = json.loads((ROOT / "benchmarks" / "faults" / ".cache" / "faults" / "results.json").read_text())
    assert report["code"]["digest"] and report["load"].keys() == {"before", "after"}
    assert {figure["name"]: figure["value"] for figure in report["figures"]}["schedules"] == 10


@pytest.mark.long
def test_all_benchmarks_run() -> None:
    quick(limit_s=3600.0)


def test_an_unknown_name_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "walker"], cwd=ROOT, capture_output=True, text=True, timeout=120.0
    )
    assert done.returncode == 2 and "there is no benchmark walker: choose from balanced, stale" in done.stderr
