"""Pages, messages and docstrings are in plain English: without the turns that docs/reference/style.md lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.kit import PAGES, REFERENCE, ROOT, rows

STYLE = REFERENCE / "style.md"
SPAN = re.compile(r"`[^`\n]+`|\]\([^)\s]*\)")


def pattern(turn: str) -> re.Pattern[str]:
    """Returns what finds a turn of the style sheet, across the ends of lines; capitals count if it has any."""
    words = (r"(?:[\d.,]+|n|\{\})" if word == "n" else "(?:" + "|".join(map(re.escape, word.split("/"))) + ")"
             for word in turn.removesuffix(".").split())  # fmt: skip
    end = r"(?=\s*(?:[.,;:)|?!]|\n\s*\n|\Z))" if turn.endswith(".") else r"(?![\w-])"
    return re.compile(r"(?<![\w{-])" + r"\s+".join(words) + end, re.I if turn == turn.lower() else 0)


TURNS = [
    (pattern(turn), [pattern(phrase) for phrase in re.findall("`(.*?)`", allowed)])
    for banned, _, allowed in rows(STYLE.read_text())
    for turn in re.findall("`(.*?)`", banned)
]


def turns_in(text: str) -> Iterator[tuple[int, str]]:
    """Yields each banned turn, after how many ends of lines it stands."""
    text = SPAN.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text)
    for turn, allowed in TURNS:
        kept = [found.span() for phrase in allowed for found in phrase.finditer(text)]
        for found in turn.finditer(text):
            if not any(start <= found.start() and found.end() <= end for start, end in kept):
                yield text.count("\n", 0, found.start()), " ".join(found[0].split())


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields every text of a program that has two words or more, docstrings too, and the line it begins in."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if " " in text:
            yield node.lineno, text


@cache
def found_in(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        texts = list(strings_of(text))
    elif path.suffix == ".yaml":
        texts = [(n, line.partition("#")[2]) for n, line in enumerate(text.splitlines(), 1)]
    else:
        texts = [(1, text)]
    place = path.relative_to(ROOT)
    return sorted(f"{place}:{line + n}: {turn}" for line, text in texts for n, turn in turns_in(text))


PROGRAM = [path for folder in ("lightning_hetero", "conf") for path in sorted((ROOT / folder).rglob("*.*"))
           if path.suffix in (".py", ".yaml")]  # fmt: skip


def test_pages_are_in_plain_english() -> None:
    found = [turn for page in [*PAGES, ROOT / "CHANGELOG.md"] for turn in found_in(page)]
    assert not found, "\n".join(["see docs/reference/style.md:", *found])


def test_messages_and_docstrings_are_in_plain_english() -> None:
    found = [turn for path in PROGRAM for turn in found_in(path)]
    assert not found, "\n".join(["see docs/reference/style.md:", *found])


@pytest.mark.parametrize(
    "planted",
    [
        "The model trains so.",
        "a rank that trains so, and others",
        "batches\nof its\nown",
        "Module and loader stay as they are.",
        "A step takes 0.41 times stock DDP's.",
        "Who wants numbers puts a callback",
    ],
)
def test_a_banned_turn_is_found(planted: str) -> None:
    assert list(turns_in(planted))


def test_what_is_allowed_and_what_is_code_is_not_found() -> None:
    text = "If so, do so: `alike`, [x](anew.md), so that it says so. as they are computed, Who trains? so many (or so)"
    assert not list(turns_in(text))


def test_every_text_of_a_program_is_looked_at() -> None:
    source = '"""First anew."""\nraise ValueError(f"{x} is told"\n  " alike")\nkey = "alike"\nlog("a {} beside", 1)'
    found = sorted((line, turn) for line, text in strings_of(source) for _, turn in turns_in(text))
    assert found == [(1, "anew"), (2, "alike"), (2, "is told"), (5, "beside")]
