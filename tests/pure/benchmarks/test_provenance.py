"""What results carry of the code they were measured with, and what a report says when that has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import changed_files, code_of, files_of, provenance
from benchmarks.report import page_of

FILES = {
    "benchmarks/__init__.py": "",
    "benchmarks/claim/__main__.py": "from benchmarks.claim.worker import work\nfrom benchmarks.report import x\n",
    "benchmarks/claim/worker.py": "from elsewhere import x\nfrom lightning_hetero import Engine\nENGINE = Engine\n",
    "benchmarks/claim/devices.yaml": "speeds: [1, 2]\n",
    "benchmarks/claim/results.json": "{}",
    "benchmarks/report.py": "import json\n",
    "lightning_hetero/__init__.py": (
        "from lightning_hetero.engine import Engine\nfrom lightning_hetero.other import Other\n"
    ),
    "lightning_hetero/engine/__init__.py": "from lightning_hetero.engine.strategy import Engine\n",
    "lightning_hetero/engine/strategy.py": (
        '"""An engine."""\nfrom typing import TYPE_CHECKING\nfrom lightning_hetero.solvers import tools\n\n'
        "if TYPE_CHECKING:\n    from lightning_hetero.only_a_type import Kind\n\n\n"
        'class Engine:\n    """The engine."""\n\n    late = "lightning_hetero.named.Late"  # comes by its name\n'
    ),
    "lightning_hetero/solvers/__init__.py": "",
    "lightning_hetero/solvers/tools.py": "def f() -> int:\n    return 1\n",
    "lightning_hetero/named.py": "class Late:\n    pass\n",
    "lightning_hetero/only_a_type.py": "Kind = int\n",
    "lightning_hetero/other.py": "class Other:\n    pass\n",
}
USED = [
    "benchmarks/claim/__main__.py", "benchmarks/claim/devices.yaml", "benchmarks/claim/worker.py",
    "lightning_hetero/engine/strategy.py", "lightning_hetero/named.py", "lightning_hetero/solvers/tools.py",
]  # fmt: skip
REPORT: dict[str, Any] = {
    "title": "A claim", "command": "python -m benchmarks.claim", "figures": [], "notes": "", "raw": {}, "versions": {},
    "machine": {"processor": "p", "cpu_count": 2, "platform": "x"},
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_are_those_whose_code_is_used(root: Path) -> None:
    assert files_of("claim", root=root) == USED


def test_an_imported_package_is_used_with_all_it_imports(root: Path) -> None:
    (root / "benchmarks/claim/worker.py").write_text("import lightning_hetero\n")
    assert "lightning_hetero/other.py" in files_of("claim", root=root)


def test_engines_of_the_real_benchmarks() -> None:
    used = {name: files_of(name) for name in ("balanced", "stale", "pipeline")}
    engines = {
        name: {path.split("/")[1] for path in paths} & {"balanced", "stale", "pipeline"} for name, paths in used.items()
    }
    # The others are trained beside an engine, to be compared with; balanced is, too, by the stale simulation.
    assert engines["balanced"] == {"balanced", "stale"} and engines["stale"] == {"balanced", "stale"}
    assert engines["pipeline"] == {"balanced", "pipeline"}
    for paths in (used["balanced"], used["stale"], used["pipeline"]):
        assert {"lightning_hetero/emulate/throttle.py", "lightning_hetero/data/batches.py"} <= set(paths)
    assert "benchmarks/pipeline/clusters/islands.yaml" in used["pipeline"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""Doc."""\nx = 1\n', '"""Other words,\nin two lines."""\n\n\nx = 1  # and a comment\n'),
        ("def f():\n    return 1\n", 'def f():\n    """Doc."""\n\n    # why\n    return 1\n'),
        ('class A:\n    x: int\n', 'class A:\n    "Doc."\n\n    x: int\n    """Of x."""\n'),
    ],
)  # fmt: skip
def test_comments_and_docstrings_are_no_code(before: str, after: str) -> None:
    assert code_of(before) == code_of(after)


def test_changes_are_found_and_named(root: Path) -> None:
    recorded = provenance("claim", root=root)
    assert recorded["commit"] is None and list(recorded["files"]) == USED  # no repository
    engine = root / "lightning_hetero/engine/strategy.py"
    engine.write_text(engine.read_text().replace("The engine.", "Other words."))
    (root / "lightning_hetero/other.py").write_text("class Other:\n    x = 1\n")
    assert changed_files("claim", recorded, root=root) == []
    assert provenance("claim", root=root)["digest"] == recorded["digest"]
    (root / "lightning_hetero/solvers/tools.py").write_text("def f() -> int:\n    return 2\n")
    engine.write_text(engine.read_text().replace("named.Late", "engine.strategy.Engine"))
    changed = [
        "lightning_hetero/engine/strategy.py", "lightning_hetero/named.py", "lightning_hetero/solvers/tools.py",
    ]  # fmt: skip
    assert changed_files("claim", recorded, root=root) == changed
    assert provenance("claim", root=root)["digest"] != recorded["digest"]


def test_files_written_during_the_run_are_named(root: Path) -> None:
    for path in USED:
        os.utime(root / path, (100.0, 100.0))
    assert provenance("claim", root=root, since_s=101.0)["edited_while_running"] == []
    os.utime(root / USED[2], (102.0, 102.0))
    assert provenance("claim", root=root, since_s=101.0)["edited_while_running"] == [USED[2]]


def test_the_first_line_says_what_the_figures_are_of(root: Path) -> None:
    def first(code: dict[str, Any] | None) -> str:
        report = REPORT if code is None else {**REPORT, "code": code}
        return page_of(report, "claim", root=root).splitlines()[0]

    code = provenance("claim", root=root)
    assert first(code) == "# A claim"
    assert f"digest {code['digest']}." in page_of({**REPORT, "code": code}, "claim", root=root)
    assert first(None) == "> **It is not known which code was measured here.** Run the command below again."
    assert first({**code, "edited_while_running": ["x"]}).startswith("> **The code was edited while")
    (root / "lightning_hetero/solvers/tools.py").write_text("")
    assert first(code).startswith("> **The code has changed since this was measured.**")
    at = first({**code, "commit": "0123456789abcdef", "uncommitted": []})
    assert at.startswith("> **The code has changed since this was measured (at 0123456789ab).**")
    at = first({**code, "commit": "0123456789abcdef", "uncommitted": ["x"]})
    assert "(at 0123456789ab with uncommitted changes).**" in at
