"""Where this comes from: version, papers, address and how to install are the same wherever they are said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from lightning_hetero import __version__
from tests.docs.kit import PAGES, ROOT, section, source_strings

PYPROJECT = (ROOT / "pyproject.toml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def repository() -> str:
    """Returns the one address: docs/conf.py's constant."""
    (value,) = [
        node.value
        for node in ast.parse((ROOT / "docs/conf.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REPOSITORY"
    ]
    return ast.literal_eval(value)


def test_the_version_is_the_same_everywhere() -> None:
    said = re.findall(r'^version = "(.+)"$', PYPROJECT, flags=re.M)
    released = re.findall(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert said == [__version__] and str(CITATION["version"]) == __version__ == released[0]


def test_the_citation_has_what_its_format_requires_and_the_projects_facts() -> None:
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    assert CITATION["message"] and all(author["name"] for author in CITATION["authors"])
    for key, name in (("name", "title"), ("license", "license"), ("description", "abstract")):
        assert re.search(rf'^{key} = "{re.escape(CITATION[name])}"$', PYPROJECT, flags=re.M), name


def test_an_address_is_either_nowhere_or_the_same_everywhere() -> None:
    urls = re.search(r"^\[project\.urls\]\n(.*?)^\[", PYPROJECT, flags=re.M | re.S)
    named = {CITATION.get("repository-code", ""), *re.findall(r'"(https?://.+)"', urls[1] if urls else '""')}
    assert named - {""} == {repository()} - {""}


def test_the_readme_names_the_papers_before_it_tells_what_to_type() -> None:
    first = (ROOT / "README.md").read_text().partition("## Try it")[0]
    for paper in ("LB-BSP", "SoCC 2020", "TCC", "SaPS", "HPCC 2019", "TPDS", "abstracts only", "never run on two GPUs"):
        assert re.search(paper.replace(" ", r"\s"), first), paper


def test_every_python_that_is_promised_is_one_that_pip_accepts() -> None:
    lowest = re.search(r'^requires-python = ">=3\.(\d+)"$', PYPROJECT, flags=re.M)
    promised = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", PYPROJECT)]
    assert lowest and promised[0] == int(lowest[1]) and promised == sorted(promised)
    assert f"Python 3.{promised[0]} or newer" in section(ROOT / "README.md", "Try it")


@pytest.mark.parametrize("page", [*PAGES, None], ids=lambda page: page.name if page else "texts of the package")
def test_nobody_is_told_to_install_from_an_index_what_is_on_none(page: Path | None) -> None:
    text = page.read_text() if page else "\n".join(source_strings())
    assert not re.findall(r"pip install[^\n;]*[ '\"]lightning[-_]hetero\b", text)
