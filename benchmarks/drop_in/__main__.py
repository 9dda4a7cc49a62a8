"""``python -m benchmarks.drop_in --lightning CHECKOUT [--engine balanced ...] [--ranks 1 2] [--tests FILE ...]``

Lightning's own tests with our class in the place of `DDPStrategy`. ``CHECKOUT`` is a checkout of Lightning's repository
at the tag of the installed version (its ``tests`` and ``pyproject.toml`` are read, its sources are not); what its tests
import must be installed, see its ``requirements/pytorch/test.txt``.

- *one rank*: a ``Trainer()`` on the CPU takes our class, where it would take ``SingleDeviceStrategy``. Tests that start
  processes by themselves (``ddp_spawn``, ``ddp_fork``) do so: they have two ranks.
- *two ranks*: each test runs in two processes, and ``Trainer()`` or ``Trainer(devices=1)`` means both of them.

Only tests that stock DDP passes in the same way count. What has been run with the present code is kept in ``.cache/``
beside this file: the command goes on where it was interrupted. Once stock DDP is through, two commands with other
classes share the work, and one with all classes writes the page then.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.drop_in.cases import CLASSES, EXCLUDED, QUICK, TESTS, TWO_RANKS
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import write_results

HERE = Path(__file__).resolve().parent
GOALS = {"balanced": 655 / 664, "stale": 640 / 664}  # of the tests that count
FOLDERS = rf"({re.escape(str(ROOT))}|[^\s\"]*/site-packages)/"  # of this machine
Lines = dict[str, dict[str, Any]]


def run(
    engine: str, ranks: int, checkout: Path, tests: tuple[str, ...], only: list[str] | None, limit_s: float
) -> Lines:
    """Runs tests with one class; returns a line for each, see ``plugin``."""
    with tempfile.TemporaryDirectory() as folder:
        results, chosen = Path(folder) / "results.json", Path(folder) / "only.json"
        chosen.write_text(json.dumps(only))
        paths = os.pathsep.join([str(ROOT), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "DROP_IN_CLASS": CLASSES[engine],
            "DROP_IN_RANKS": str(ranks), "DROP_IN_RESULTS": str(results), "DROP_IN_ONLY": str(chosen),
            "DROP_IN_LIMIT_S": str(limit_s),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-c", str(checkout / "pyproject.toml"), "--rootdir", str(checkout),
            "-p", "benchmarks.drop_in.plugin", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "-s", "-q",
            "--color=no", "--tb=short", "--continue-on-collection-errors",
            *(str(checkout / "tests/tests_pytorch" / test) for test in tests),
        ]  # fmt: skip
        print(f"{engine}, {ranks} rank(s)", flush=True)
        with open(HERE / ".cache" / f"{engine}-{ranks}.log", "w") as log:
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
        return json.loads(results.read_text())


def stock_passes(lines: Lines, ranks: int) -> list[str]:
    """Returns the tests that may count: the strategy ran, on that many ranks, and stock DDP passed."""
    return [test for test, line in lines.items() if line["outcome"] == "passed" and line["ranks"] >= ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lightning", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--engine", nargs="+", choices=[e for e in CLASSES if e != "stock"], default=["balanced"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--limit-s", type=float, default=60.0, help="longest a test may take [s]")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="below tests/tests_pytorch; else those in cases.py")
    parser.add_argument("--all", action="store_true", help="all of them on two ranks, too, which takes hours")
    parser.add_argument("--quick", action="store_true", help="one file of tests")
    given = parser.parse_args()
    checkout = given.lightning.resolve()
    chosen = {1: TESTS, 2: TESTS if given.all else TWO_RANKS}
    if given.quick or given.tests:
        chosen = dict.fromkeys(chosen, QUICK if given.quick else tuple(given.tests))
    (HERE / ".cache").mkdir(exist_ok=True)
    code = provenance(HERE.name)["digest"]

    def outcomes_of(engine: str, ranks: int, only: list[str] | None) -> Lines:
        kept, whole = HERE / ".cache" / f"{engine}-{ranks}-{code}.json", not (given.quick or given.tests or given.all)
        if whole and kept.exists():
            return json.loads(kept.read_text())
        lines = run(engine, ranks, checkout, chosen[ranks], only, given.limit_s)
        if whole:
            kept.write_text(json.dumps(lines, indent=1))
        return lines

    figures: list[dict[str, Any]] = []
    raw: dict[str, Any] = {"not passed": {}}
    left_out = "; ".join(f"under {engine} `{tests}`: {why}" for engine, (tests, why) in EXCLUDED.items())
    notes = [f"Tests on {ranks} rank(s): {', '.join(chosen[ranks])}." for ranks in given.ranks]
    notes.append(f"Not counted: {left_out or 'none'}.")
    for ranks in given.ranks:
        passed = raw[f"stock, {ranks} rank(s)"] = stock_passes(outcomes_of("stock", ranks, None), ranks)
        for engine in given.engine:
            if engine == "stale-bsp" and ranks == 1:
                continue  # one device is stock DDP whatever the policy
            lines = outcomes_of(engine, ranks, passed)
            says_nothing = EXCLUDED.get(engine, ("$^", ""))[0]
            counted = [test for test in passed if not re.search(says_nothing, test)]
            outcomes = {test: lines.get(test, {"outcome": "failed", "cause": "was not run"}) for test in counted}
            name = f"{engine}, {ranks} rank(s)"
            for outcome in ("passed", "refused", "failed"):
                number = sum(line["outcome"] == outcome for line in outcomes.values())
                goal = GOALS.get(engine) if outcome == "passed" and not given.quick else None
                of = f" of {len(counted)}" if outcome == "passed" else ""
                figures.append(_figure(f"{name}: {outcome}{of}", number, goal and round(goal * len(counted))))
            bad = {
                test: re.sub(FOLDERS, "", f"{line['outcome']}: {line.get('cause', '')}")
                for test, line in outcomes.items()
                if line["outcome"] != "passed"
            }
            raw["not passed"][name] = bad
            notes += [f"## {name}: not passed\n\n" + "\n".join(f"- `{t}`: {why}" for t, why in sorted(bad.items()))]
    title = "Lightning's own tests with our class instead of DDPStrategy"
    write_results(HERE, title=title, figures=figures, raw=raw, notes="\n\n".join(notes))


def _figure(name: str, value: float, goal: int | None = None) -> dict[str, Any]:
    limit = None if goal is None else f">= {goal}"
    holds = None if goal is None else value >= goal
    return {"name": name, "value": value, "unit": "tests", "goal": limit, "holds": holds}


if __name__ == "__main__":
    main()
