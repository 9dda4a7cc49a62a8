"""docs/overview.rst, the page that Lightning's documentation takes from an integration: short, and its code runs."""

from __future__ import annotations

import re
from textwrap import dedent

from tests.docs.kit import ROOT

PAGE = (ROOT / "docs/overview.rst").read_text(encoding="utf-8")


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 60


def test_its_code_runs() -> None:
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", PAGE)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, object] = {}
        exec(dedent(block), names)
        assert type(names["trainer"].strategy).__name__ == "LoadBalancedStrategy"  # type: ignore[attr-defined]


def test_its_table_names_every_strategy() -> None:
    listed = re.findall(r"^``(hetero_\w+)`` ", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(file.stem for file in (ROOT / "conf/hetero/strategy").glob("hetero_*.yaml"))
