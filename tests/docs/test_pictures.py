"""docs/pictures: they are what the results make of them, can be read, and are shown."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import FOLDER, files
from benchmarks.provenance import ROOT

MADE = files()
LETTER = 0.58  # of the font's size: a letter's mean width in a wide font
SIZES = {"": 13.0, "mute": 12.0, "inside": 12.0, "title": 15.0}


@pytest.mark.parametrize("name", MADE)
def test_pictures_are_those_of_the_results(name: str) -> None:
    assert (ROOT / FOLDER / name).read_text() == MADE[name], "run: python -m benchmarks.pictures"


def test_no_other_picture_is_kept() -> None:
    kept = {path.name for path in (ROOT / FOLDER).glob("*.svg")}
    assert kept == set(MADE)


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.svg)", page.read_text())}
    assert {path.name for path in (ROOT / FOLDER).glob("*.svg")} == shown


def texts(element: ElementTree.Element, x: float = 0.0, y: float = 0.0) -> Iterator[tuple[str, float, float, float]]:
    """Yields every text with its left end, its right end and its base line, by the number of letters."""
    for child in element:
        tag = child.tag.rpartition("}")[2]
        if tag == "svg":
            yield from texts(child, x + float(child.get("x", 0)), y + float(child.get("y", 0)))
        elif tag == "text":
            text = "".join(child.itertext())
            wide = LETTER * SIZES.get(child.get("class", ""), 13.0) * len(text)
            before = wide * {"middle": 0.5, "end": 1.0}.get(child.get("text-anchor", ""), 0.0)
            left = x + float(child.get("x", 0)) - before
            yield text, left, left + wide, y + float(child.get("y", 0))


@pytest.mark.parametrize("name", MADE)
def test_no_text_leaves_the_picture(name: str) -> None:
    root = ElementTree.fromstring(MADE[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = list(texts(root))
    assert len(found) > 5
    for text, left, right, base in found:
        assert left >= 0.0 and right <= width and 8.0 < base <= height - 2.0, text


@pytest.mark.parametrize("name", MADE)
def test_colours_are_values_and_nothing_is_fetched(name: str) -> None:
    assert "var(" not in MADE[name] and "href" not in MADE[name] and "@import" not in MADE[name]
    both = "@media (prefers-color-scheme:dark)" in MADE[name]
    assert both == (not name.endswith(("-light.svg", "-dark.svg")))


def scaled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: scaled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [scaled(one) for one in value]
    return value * 1.25 if isinstance(value, float) else value


def test_other_results_make_other_pictures_and_none_makes_none(tmp_path: Path) -> None:
    assert files(tmp_path) == {}
    for path in (ROOT / "benchmarks").glob("*/results.json"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    assert files(tmp_path) == MADE
    for path in (tmp_path / "benchmarks").glob("*/results.json"):
        path.write_text(json.dumps(scaled(json.loads(path.read_text()))))
    others = files(tmp_path)
    counts = ("drop_in.svg",)  # whole numbers
    assert [name for name in MADE if others[name] == MADE[name] and name not in counts] == []
