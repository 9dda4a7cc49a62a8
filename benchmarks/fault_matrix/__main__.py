"""``python -m benchmarks.fault_matrix [--pairs] [--only WORDS] [--processes N]``: cells of the fault matrix, once.

The cells are tests: this runs ``pytest tests/faults/test_matrix.py --matrix`` and writes down what came of each;
``--pairs`` runs the combinations instead, ``tests/faults/test_pairs.py --long``. ``--only`` takes an expression as of
``pytest -k``: those cells are run anew, the others stay as they were found. ``--rows FILE`` runs nothing and takes what
these tests have written with ``--matrix-rows=FILE``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import write_results
from tests.faults import cells, pairs

HERE = Path(__file__).parent
_TRIED = ("lightning_hetero.balanced.strategy", "lightning_hetero.stale.strategy", "lightning_hetero.pipeline.strategy",
          "lightning_hetero.federated.strategy", "tests.faults.program")  # fmt: skip
_NOTES = """A cell holds when what the table says has come of it, and no sample was lost or counted twice, no process,
no port, no shared memory and no part of a file was left. Seconds are from the fault to the end of the last process, on
a machine that did other work besides. Skipped: what the machine does not allow. Known: cells that do not hold, and why.
Cells are also run anew one by one, after something was mended, so not all are of one run, and the code is that of the
last. Combinations of faults with what else a training may have are cells, too."""


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Returns what the tests wrote; of a cell that ran twice, the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    return list({row["cell"]: row for row in map(json.loads, lines)}.values())


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns how many cells hold, and how long the slowest took to end."""
    ran = [row for row in rows if row["outcome"] != "skipped"]
    fails = [row for row in ran if row["violations"]]
    unknown = [row for row in fails if not row["known"]]
    ended = [row["seconds"] for row in ran if row["outcome"] == "ended" and not row["violations"]]
    said = [
        ("cells", len(rows), "1", None, None),
        ("cells that hold", len(ran) - len(fails), "1", None, None),
        ("cells skipped", len(rows) - len(ran), "1", None, None),
        ("cells known to fail", len(fails) - len(unknown), "1", None, None),
        ("cells that fail otherwise", len(unknown), "1", "0", not unknown),
        ("slowest end", max(ended, default=0.0), "s", None, None),
    ]
    return [dict(zip(("name", "value", "unit", "goal", "holds"), one, strict=True)) for one in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="the combinations; the matrix stays as it was found")
    parser.add_argument("--only", default="", help="an expression as of pytest -k; others stay")
    parser.add_argument("--processes", type=int, default=2, help="cells at a time")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="run nothing: of runs of pytest")
    said = parser.parse_args()
    matrix, combined = ([cell.name for cell in part] for part in ((*cells.cells(), *cells.hook_cells()), pairs.cells()))
    if said.rows is None:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows"
            part = ["test_pairs.py", "--long"] if said.pairs else ["test_matrix.py", "--matrix"]
            command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line",
                       f"tests/faults/{part[0]}", part[1], f"--matrix-rows={rows}", f"-n{said.processes}",
                       "--dist=load"]  # fmt: skip
            subprocess.run([*command, *(["-k", said.only] if said.only else [])], cwd=HERE.parents[1])
            new = rows_of(rows)
    else:
        new = rows_of(said.rows)
        sys.argv[1:] = []  # the command that measures
    if not new:
        sys.exit("no cell was run")
    results = HERE / "results.json"
    old = json.loads(results.read_text())["raw"]["cells"] if results.exists() else []
    if not (said.only or said.rows):  # all of a part were run
        old = [row for row in old if row["cell"] not in (combined if said.pairs else matrix)]
    merged = {row["cell"]: row for row in (*old, *new)}
    kept = [merged[name] for name in (*matrix, *combined) if name in merged]
    write_results(HERE, title="Faults in real trainings", figures=figures(kept), raw={"cells": kept}, notes=_NOTES)


if __name__ == "__main__":
    main()
