"""Extras of the package: they hold what examples and docs need, and nothing that is used nowhere."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ProjectMetadata(str(ROOT), PluginManager()).core.optional_dependencies
# What is optional, and what in a source file shows that it is needed.
SIGNS = {
    "jsonargparse": r"from lightning.pytorch.cli import LightningCLI",
    "scikit-learn": r"from sklearn|lightning_hetero.demo",
}


def names(extra: str) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0].strip() for requirement in EXTRAS[extra]}


def needed_by(*folders: str) -> set[str]:
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    return {name for name, sign in SIGNS.items() if re.search(sign, source)}


def test_the_examples_run_with_their_extra() -> None:
    assert names("examples") == needed_by("examples")


def test_the_site_builds_with_its_extra() -> None:
    conf = (ROOT / "docs/conf.py").read_text()
    for name in names("docs"):
        assert re.search(rf'"{name.replace("-", "_")}"|from {name} import', conf), name


def test_no_extra_installs_what_nothing_uses() -> None:
    assert set(EXTRAS) == {"dev", "docs", "examples", "pipeline"}
    assert names("examples") <= needed_by("lightning_hetero", "examples")
    assert names("pipeline") == set()
    assert names("examples") | names("docs") <= names("dev")
