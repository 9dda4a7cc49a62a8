"""tests/gpu and scripts/gpu_check run on simulated GPUs, so that neither is first tried where a card is borrowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.harness import ROOT
from tests.simgpu.sim import why_not

LIMIT_S = 280.0  # each is a Python, and most start others, that import all anew
pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(300)]


def gpu_tests(gpus: int, *arguments: str, timeout_s: float = LIMIT_S) -> str:
    """Runs some of tests/gpu; returns what pytest says last."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.simgpu.plugin"]
    command += ["--simgpus", str(gpus), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    return ended.stdout.strip().splitlines()[-1]


@pytest.mark.long
def test_engines_that_share_a_card() -> None:
    """Two of them; all files are collected for it."""
    said = gpu_tests(1, "tests/gpu", "-k", "test_two_ranks and (stale and 16-mixed or 2x1 and 32-true) and not bf16")
    assert re.match(r"2 passed, 2 skipped, \d+ deselected", said), said


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ranks_with_a_card_each() -> None:
    assert "passed" in gpu_tests(2, "tests/gpu/test_two_gpus.py", timeout_s=1700.0)


def checked(folder: Path, *arguments: str, timeout_s: float = LIMIT_S) -> tuple[int, list[dict[str, object]], str]:
    """Returns the exit code of ``scripts/gpu_check --dry``, the results of its steps, and what it prints."""
    command = [str(ROOT / "scripts" / "gpu_check"), "--dry", "--out", str(folder), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    (file,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all({"step", "device", "driver", "torch", "nccl"} <= line.keys() for line in lines)
    return ended.returncode, [line for line in lines if "result" in line], ended.stdout + ended.stderr


def test_a_step_of_the_check(tmp_path: Path) -> None:
    code, rows, said = checked(tmp_path, "--only", "fork", "one rank, compiled")
    assert code == 0, said + (tmp_path / "fork.log").read_text()[-3000:]
    assert [(row["step"], row["result"]) for row in rows] == [
        ("machine", "passed"),
        ("fork", "passed"),
        ("one rank, compiled", "skipped"),
    ]
    assert "| fork | passed |" in said and "fail in ours 0" in said


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_whole_check(tmp_path: Path) -> None:
    code, rows, said = checked(tmp_path, timeout_s=3500.0)
    assert code == 0, said
    assert {row["result"] for row in rows} <= {"passed", "skipped"}
