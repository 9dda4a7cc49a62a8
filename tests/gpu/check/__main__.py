"""What a card has to show: ``scripts/gpu_check [--out DIR] [--dry]``.

Needs torch, Lightning, torchmetrics, greenlet, Hydra, psutil and pytest, none of the other tools of this repository.
Each step is a process with a limit of its own; those that measure neither time nor memory run several at a time. What a
step finds is appended at once to DIR/gpu_check.jsonl, and what it prints goes to a file of its own beside; one that
fails does not keep the others from running. In the end there is a table in Markdown, for docs/reference/gpu.md. The
exit code is 1 if a step has failed. ``--dry`` runs the same on simulated GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.check.found import DRY, FILE, LINE, append
from tests.gpu.check.steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
_DRY_S = 900.0
_AT_ONCE, _CORES_EACH = 5, 3
MACHINE = ("device", "driver", "torch", "nccl")


@dataclass
class Row:
    """What became of a step."""

    step: Step
    result: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    def text(self) -> str:
        said = "; ".join(f"{name} {value}" for name, value in self.found.items())
        text = "; ".join(filter(None, [said, self.why])).replace("|", "/").replace("\n", " ")
        return f"| {self.step.name} | {self.result} | {self.seconds:.0f} | {text} |"


@dataclass
class Check:
    """One run, in its folder."""

    folder: Path
    gpus: int
    """Simulated ones; 0: those there are."""

    def __post_init__(self) -> None:
        self.file = self.folder / "gpu_check.jsonl"
        self.machine: dict[str, Any] = {}
        self.cards = 0  # that are there, after the first step

    def run(self, steps: Sequence[Step]) -> list[Row]:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [self._noted(steps[0])]
        if not self.cards:
            return rows
        beside = [step for step in steps[1:] if not step.quiet]
        with ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // _CORES_EACH))) as pool:
            rows += pool.map(self._noted, beside)
        return rows + [self._noted(step) for step in steps[1:] if step.quiet]

    def _noted(self, step: Step) -> Row:
        row = self._row(step)
        line = {"result": row.result, "seconds": round(row.seconds, 1), "why": row.why}
        append(self.file, {**self._begin(step), **line})
        print(row.text(), flush=True)
        return row

    def _begin(self, step: Step) -> dict[str, Any]:
        return {"step": step.name, "dry": bool(self.gpus), **self.machine}

    def _row(self, step: Step) -> Row:
        if self.gpus and step.alone:
            return Row(step, "skipped", why=step.alone)
        if step.gpus > 1 and step.gpus > self.cards:
            return Row(step, "skipped", why=f"needs {step.gpus} GPUs, there are {self.cards}")
        limit_s = _DRY_S if self.gpus else step.limit_s  # simulated ones need not be quick
        before = len(_lines(self.file))
        started_s = time.monotonic()
        code, tail = self._process(step, limit_s)
        seconds = time.monotonic() - started_s
        lines = [line for line in _lines(self.file)[before:] if line.get("step") == step.name]
        return self._outcome(step, code, tail, seconds, lines)

    def _outcome(self, step: Step, code: int | None, tail: str, seconds: float, lines: list[dict[str, Any]]) -> Row:
        numbers: dict[str, Any] = {}
        for line in lines:
            numbers |= line.get("found", {})
        if "machine" in step.name:
            self.machine = {name: numbers.get(name) for name in MACHINE}
            self.cards = int(numbers.get("cards", 0))
        tests = [line["test"] for line in lines if "test" in line]
        skipped = [line["skipped"]["reason"] for line in lines if "skipped" in line]
        if code is None:
            return Row(step, "**failed**", seconds, _of(tests) | numbers, "not done within its limit")
        if tests:
            failed = [test for test in tests if test["outcome"] == "failed"]
            if code == 0 and all(test["outcome"] == "skipped" for test in tests):
                return Row(step, "skipped", seconds, why=tests[0]["why"])
            why = "; ".join(f"{test['name']}: {test['why']}" for test in failed)
            return Row(step, "**failed**" if code else "passed", seconds, _of(tests), why)
        if code:
            return Row(step, "**failed**", seconds, numbers, tail)
        return Row(step, "skipped" if skipped else "passed", seconds, numbers, "; ".join(skipped))

    def _process(self, step: Step, limit_s: float) -> tuple[int | None, str]:
        """Returns the exit code, None if the limit ended it, and the last line that it has printed."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {FILE: str(self.file.resolve()), LINE: json.dumps(self._begin(step)), "PYTHONFAULTHANDLER": "1"}
        if self.gpus:
            from tests.simgpu.sim import on_import

            environment |= {**on_import.environment(self.gpus), DRY: "1"}
        said = self.folder / f"{step.name.replace(' ', '_').replace(',', '')}.log"
        with said.open("w") as log:
            process = subprocess.Popen(
                _command(step), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            with contextlib.suppress(ProcessLookupError):  # its ranks, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
        return code, lines[-1][:300] if lines else ""


def _command(step: Step) -> list[str]:
    if isinstance(step.what, str):
        return [sys.executable, "-m", "tests.gpu.check.run_step", step.what]
    own = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(HERE)]
    return [sys.executable, "-m", "pytest", "-q", *own, "-p", "tests.gpu.check.each_test", *step.what]


def _of(tests: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(Counter(test["outcome"] for test in tests))


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def table(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    """Returns what goes into docs/reference/gpu.md."""
    head = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [f"{head}:", "", "| step | result | s | found |", "|---|---|---|---|"]
    return "\n".join([*lines, *(row.text() for row in rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="What a GPU has to show, step by step.")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check", help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="on simulated GPUs, with small sizes")
    parser.add_argument("--gpus", type=int, default=1, help="with --dry: how many")
    parser.add_argument("--only", nargs="*", metavar="STEP", help="these steps, and the first one")
    asked = parser.parse_args(argv)
    check = Check(asked.out, asked.gpus if asked.dry else 0)
    first, *others = STEPS  # it says which machine this is
    rows = check.run([first, *(step for step in others if not asked.only or step.name in asked.only)])
    print(f"\n{table(check.machine, rows)}\n")
    return int(any("failed" in row.result for row in rows))


if __name__ == "__main__":
    sys.exit(main())
