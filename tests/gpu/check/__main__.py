"""What a card has to show, in three parts: ``scripts/gpu_check --part 1|2|3 [--out DIR] [--dry]``.

Needs torch, Lightning, torchmetrics, Hydra, psutil and pytest, none of the other tools of this repository. Each step is
a process with a limit of its own. What it finds is appended at once to DIR/gpu_check-N.jsonl, and what it prints to
DIR/gpu_check-N.log; a step that fails does not keep the others from running. In the end there is a table in Markdown,
for docs/reference/gpu.md. The exit code is 1 if a step has failed. ``--dry`` runs the same on simulated GPUs.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.check.found import DRY, FILE, LINE, append
from tests.gpu.check.steps import PART_S, STEPS, Step

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
_DRY_S = 900.0
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
        return f"| {self.step.part} | {self.step.name} | {self.result} | {self.seconds:.0f} | {text} |"


@dataclass
class Part:
    """One part, in its folder."""

    number: int
    folder: Path
    gpus: int
    """Simulated ones; 0: those there are."""

    def __post_init__(self) -> None:
        self.file = self.folder / f"gpu_check-{self.number}.jsonl"
        self.log = self.folder / f"gpu_check-{self.number}.log"
        self.ends_s = time.monotonic() + PART_S
        self.machine: dict[str, Any] = {}
        self.cards = 0  # that are there, after the first step

    def run(self, steps: Sequence[Step]) -> list[Row]:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for step in steps:
            row = self._row(step)
            rows.append(row)
            line = {"result": row.result, "seconds": round(row.seconds, 1), "why": row.why}
            append(self.file, {**self._begin(step), **line})
            print(row.text(), flush=True)
            if not self.cards:
                break
        return rows

    def _begin(self, step: Step) -> dict[str, Any]:
        return {"part": step.part, "step": step.name, "dry": bool(self.gpus), **self.machine}

    def _row(self, step: Step) -> Row:
        if self.gpus and step.alone:
            return Row(step, "skipped", why=step.alone)
        if step.gpus > 1 and step.gpus > self.cards:
            return Row(step, "skipped", why=f"needs {step.gpus} GPUs, there are {self.cards}")
        limit_s = min(step.limit_s, self.ends_s - time.monotonic())
        if self.gpus:  # it need not be quick
            limit_s = _DRY_S
        if limit_s < 5:
            return Row(step, "skipped", why="the part has no time left")
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
        with self.log.open("a") as log:
            log.write(f"\n==== {step.name}\n")
            log.flush()
            at = log.tell()
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
        with self.log.open() as log:
            log.seek(at)
            said = [line.strip() for line in log if line.strip()]
        return code, said[-1][:300] if said else ""


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
    lines = [f"{head}:", "", "| part | step | result | s | found |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(row.text() for row in rows)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="What a GPU has to show, step by step.")
    parser.add_argument("--part", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check", help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="on simulated GPUs, with small sizes")
    parser.add_argument("--gpus", type=int, default=1, help="with --dry: how many")
    parser.add_argument("--only", nargs="*", metavar="STEP", help="these steps, and the first one of part 1")
    asked = parser.parse_args(argv)
    steps = [step for step in STEPS if step.part == asked.part and (not asked.only or step.name in asked.only)]
    part = Part(asked.part, asked.out, asked.gpus if asked.dry else 0)
    if STEPS[0] not in steps:  # it says which machine this is
        steps.insert(0, STEPS[0])
    rows = part.run(steps)
    print(f"\n{table(part.machine, rows)}\n")
    return int(any("failed" in row.result for row in rows))


if __name__ == "__main__":
    sys.exit(main())
