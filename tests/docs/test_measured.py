"""Tables of README.md and docs/ hold the numbers of the results; results.md say whether the code has changed since."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.provenance import ROOT
from benchmarks.report import page_of
from benchmarks.results import Results, measured
from benchmarks.tables import BLOCKS, PAGES, page_with
from tests.docs import kit
from tests.docs.kit import section

RESULTS = sorted((ROOT / "benchmarks").glob("*/results.json"))
MARKED = re.compile(r"<!-- ([\w ]+): python -m benchmarks\.tables -->.*?<!-- end -->", re.S)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_results_md_is_written_from_results_json(path: Path) -> None:
    page = page_of(json.loads(path.read_text()), path.parent.name)
    assert (path.parent / "results.md").read_text() == page, "run: python -m benchmarks.report"


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_results(page: str) -> None:
    assert (ROOT / page).read_text() == page_with(page), "run: python -m benchmarks.tables"


def test_pages_with_marks_are_written_and_every_block_has_its_place() -> None:
    every = {str(page.relative_to(ROOT)): page.read_text() for page in kit.PAGES}
    marked = {page: MARKED.findall(text) for page, text in every.items() if "benchmarks.tables -->" in text}
    assert sorted(marked) == sorted(PAGES)
    assert {name for names in marked.values() for name in names} == set(BLOCKS)


GAINS = ("What balancing gains", "What not waiting gains", "What pipelines gain", "How well steps are predicted")


@pytest.mark.parametrize("title", GAINS)
def test_no_measured_table_is_written_by_hand(title: str) -> None:
    text = section(ROOT / "docs" / "benchmarks.md", title)
    assert MARKED.search(text)
    assert not re.search(r"^\|", MARKED.sub("", text), flags=re.M)


def test_other_results_make_other_tables(tmp_path: Path) -> None:
    for path in RESULTS:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    assert page_with("README.md", results_root=tmp_path) == page_with("README.md")
    for name, benchmark in {name: benchmark for name, (benchmark, _) in BLOCKS.items()}.items():
        if benchmark not in measured() or name in ("overview", "goals"):  # no figures
            continue
        page = next(page for page in PAGES if f"<!-- {name}: " in (ROOT / page).read_text())
        copy = tmp_path / "benchmarks" / benchmark / "results.json"
        kept = copy.read_text()
        report = json.loads(kept)
        for figure in report["figures"]:
            figure["value"] *= 1.5
        lists = [rows for rows in report["raw"].values() if isinstance(rows, list)]
        for row in [row for rows in lists for row in rows if isinstance(row, dict)]:
            row.update({key: value * 1.5 for key, value in row.items() if type(value) is float})
        copy.write_text(json.dumps(report))
        before = re.search(rf"<!-- {name}: .*?<!-- end -->", page_with(page), re.S)
        after = re.search(rf"<!-- {name}: .*?<!-- end -->", page_with(page, results_root=tmp_path), re.S)
        assert before and after and (before[0] != after[0] or "have not been measured yet" in before[0]), name
        copy.write_text(kept)


def test_a_figure_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"has no figure 'no such': mend what asks for it"):
        Results("balanced")["no such"]
