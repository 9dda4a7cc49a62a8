"""The layer law holds on the real tree, and the linter notices when it is broken."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "lightning_hetero" / "_hydra"
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
        ("cluster/planted.py", "import os", "P is pure"),
        ("balanced/decide/planted.py", "import threading", "P is pure"),
        ("shares/policy.py", "import lightning_hetero", "P is pure"),  # whose __init__ has Lightning
        ("stale/decide/workers.py", "import torch", "P is pure"),
        ("stale/decide/policy/rules.py", "import random", "P is pure"),
        ("stale/decide/report.py", "import time", "P is pure"),
        ("report/page/planted.py", "from lightning_hetero.stale.fit import run", "P is pure"),  # which has torch
        ("pipeline/decide/planted.py", "import torch", "P is pure"),
        ("plan/planted.py", "import torch", "P is pure"),
        ("doctor/planted.py", "import os", "P is pure"),
        ("transport/side_channel.py", "from lightning.pytorch import Trainer", "T knows torch"),
        ("data/planted.py", "import torchmetrics", "T knows torch"),
        ("stale/runtime/serve/planted.py", "import lightning", "T knows torch"),
        ("pipeline/runtime/planted.py", "import lightning", "T knows torch"),
        ("solvers/apportion.py", "from lightning_hetero.balanced.decide import policy", "Layers import downwards"),
        ("callbacks/planted.py", "import lightning_hetero.cli", "Layers import downwards"),
        ("base/planted.py", "from lightning_hetero.balanced.fit import run", "Layers import downwards"),
        ("planted.py", "import math", "Layers import downwards"),  # a file without a layer
        ("stale/decide/ledger.py", "from lightning_hetero.stale.runtime.work import worker", "Inside an engine"),
        ("stale/runtime/serve/update.py", "from lightning_hetero.stale.fit import run", "Inside an engine"),
        ("pipeline/fit/planted.py", "from lightning_hetero.pipeline import strategy", "Inside an engine"),
        ("pipeline/planted.py", "import math", "Inside an engine"),  # a file without a layer
        ("stale/planted.py", "from lightning_hetero.balanced.runtime import pieces", "Engines never import"),
        ("stale/fit/run.py", "from lightning_hetero import LoadBalancedStrategy", "Engines never import"),
        ("balanced/fit/run.py", "import lightning_hetero", "Engines never import"),
    ],
)
@pytest.mark.short(
    "solvers/apportion.py",
    "stale/decide/policy/rules.py",
    "data/planted.py",
    "base/planted.py",
    "pipeline/planted.py",
    "stale/planted.py",
    "balanced/fit/run.py",
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


@pytest.mark.parametrize(
    ("file", "planted", "where"),
    [
        pytest.param(
            "stale/decide/intervals.py",
            "from lightning_hetero.stale.decide import ledger",
            "stale.decide",
            marks=pytest.mark.long,
        ),
        (
            "stale/decide/intervals.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_hetero.stale.decide import ledger",
            "stale.decide",
        ),
        (  # between folders, though no file imports itself that way
            "stale/runtime/messages.py",
            "from lightning_hetero.stale.runtime.work import single_samples",
            "stale.runtime",
        ),
    ],
)
def test_a_planted_circle_is_found(copy: Path, file: str, planted: str, where: str) -> None:
    with (copy / "lightning_hetero" / file).open("a") as source:
        source.write(f"\n{planted}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"No cycles are allowed in lightning_hetero.{where}." in result.stdout


def test_every_file_of_the_one_folder_with_two_layers_is_named() -> None:
    """``emulate/`` is pure but for what sleeps; everywhere else the folder is named, and its files with it."""
    options = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    named = {module for contract in options for module in contract.get("source_modules", ())}
    files = (ROOT / "lightning_hetero" / "emulate").glob("[!_]*.py")
    assert {f"lightning_hetero.emulate.{file.stem}" for file in files} <= named


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
