"""The layer law holds on the real tree, and the linter notices when it is broken."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "lightning_hetero" / "_hydra"
LIGHTNING = {
    *("strategy", "elastic", "run", "session", "meetings", "join", "loaders", "logs", "loop", "claims"),
    *("takeover", "refusals", "launcher", "planning", "profiling", "training", "divided", "averages", "rescue"),
}
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package in ``folder``, with the configuration there."""
    command = [sys.executable, "-c", LINT]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, to break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lightning_hetero", tmp_path / "lightning_hetero", ignore=ignore)
    return tmp_path


def test_every_folder_is_a_package_or_the_linter_does_not_see_it() -> None:
    files = (ROOT / "lightning_hetero").rglob("*.py")
    folders = {file.parent for file in files if PLUGIN not in file.parents}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_tree_keeps_every_contract() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "planted", "contract"),
    [
        ("solvers/apportion.py", "import torch", "P is pure"),
        ("predictors/planted.py", "from time import perf_counter", "P is pure"),
        ("balanced/policy.py", "import threading", "P is pure"),
        ("balanced/policy.py", "import lightning_hetero", "P is pure"),  # whose __init__ has Lightning
        ("transport/side_channel.py", "from lightning.pytorch import Trainer", "T knows torch"),
        ("data/planted.py", "import torchmetrics", "T knows torch"),
        ("solvers/apportion.py", "from lightning_hetero.balanced import policy", "Layers import downwards"),
        ("callbacks/planted.py", "import lightning_hetero.cli", "Layers import downwards"),
        ("glue/planted.py", "from lightning_hetero.balanced import run", "Layers import downwards"),
        ("stale/planted.py", "from lightning_hetero.balanced import weighting", "Engines never import"),
        ("stale/run.py", "from lightning_hetero import LoadBalancedStrategy", "Engines never import"),
        ("balanced/run.py", "import lightning_hetero", "Engines never import"),
        ("glue/setup.py", "from lightning_hetero.callbacks import BatchRebalancer", "Engines never import"),
        ("stale/roster.py", "import torch", "P is pure"),
        ("stale/policy/flexible.py", "import random", "P is pure"),
        ("stale/report.py", "import time", "P is pure"),
        ("stale/tickwork.py", "import lightning", "T knows torch"),
        ("stale/ledger.py", "from lightning_hetero.stale import coordinator", "Layers import downwards"),
        ("stale/update.py", "from lightning_hetero.stale import server", "Layers import downwards"),
        ("stale/start.py", "from lightning_hetero.stale import run", "Layers import downwards"),
    ],
)
def test_a_planted_import_is_found_and_named(copy: Path, file: str, planted: str, contract: str) -> None:
    target = copy / "lightning_hetero" / file
    with target.open("a") as source:
        source.write(f"\n{planted}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    # not the end of the line: the number of ignored imports may follow
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), result.stdout
    assert ".".join(["lightning_hetero", *Path(file).with_suffix("").parts]) in result.stdout


def test_every_file_of_an_engine_has_a_layer_and_a_tag() -> None:
    """The linter passes over what no layer names."""
    options = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    contracts = {contract["id"]: contract for contract in options}
    named = set(re.findall(r"[\w.]+", " ".join(contracts["layers"]["layers"])))
    pure, torch = (contracts[tag]["source_modules"] for tag in ("pure", "torch"))
    for engine in contracts["engines"]["modules"]:
        folder = engine.removeprefix("lightning_hetero.")
        names = {file.stem for file in (ROOT / "lightning_hetero" / folder).glob("*.py")} - {"__init__"}
        names |= {file.parent.name for file in (ROOT / "lightning_hetero" / folder).glob("*/__init__.py")}
        assert {name for name in names if f"{folder}.{name}" not in named} == set()
        tags = {name: [tagged(f"{engine}.{name}", patterns) for patterns in (pure, torch)] for name in names}
        assert {name for name, (is_pure, is_torch) in tags.items() if is_pure and is_torch} == set()
        assert {name for name, tag in tags.items() if not any(tag)} <= LIGHTNING


def tagged(module: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(module, pattern) and module.count(".") == pattern.count(".") for pattern in patterns)


def test_the_hydra_plugin_imports_only_stdlib_and_hydra() -> None:
    files = sorted(PLUGIN.rglob("*.py"))
    assert any(file.name == "search_path.py" for file in files)
    allowed = {*sys.stdlib_module_names, "hydra"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, f"{file} imports {names}"


def test_the_hydra_plugin_is_a_namespace_package() -> None:
    # an __init__.py in hydra_plugins would hide every other distribution's plugins
    assert not (PLUGIN / "hydra_plugins" / "__init__.py").exists()
