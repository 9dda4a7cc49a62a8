"""``python -m tests.docs.stock_ddp``: writes the tables of docs/reference/drop_in.md from the marks of the tests.

    @pytest.mark.stock_ddp("accumulate_grad_batches", "balanced", "stale")
    @pytest.mark.stock_ddp("lbfgs", "pipeline", refused="each rank has the gradients of its own layers only")
    @pytest.mark.stock_ddp("log_step", "stale", differs="the value is the rank's own")

Rows are those of `tests.docs.features`, by key; one mark may name several. The engines are those that the test runs;
none named: all three. ``refused``: the test checks that the engine refuses it; why, in a few words. ``differs``: it
works, but not as under DDP, or needs a word; what. A mark stands on a test function; the tests are read, not imported.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import NamedTuple

from tests.docs.features import features
from tests.docs.kit import REFERENCE, ROOT

MARK = "stock_ddp"
PAGE = REFERENCE / "drop_in.md"
ENGINE_NAMES = ("balanced", "stale", "pipeline")
_BEGIN, _END = "<!-- from the tests: python -m tests.docs.stock_ddp -->", "<!-- end -->"


class Mark(NamedTuple):
    """One mark on one test."""

    rows: tuple[str, ...]
    engines: tuple[str, ...]
    said: str
    test: str


def marks() -> list[Mark]:
    """Returns the marks of all tests.

    Raises:
        ValueError: one is not as the module says; names the test.
    """
    found = []
    known = {key for group in features().values() for key in group}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text()
        if MARK not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                test = f"{file.relative_to(ROOT)}::{node.name}"
                decorators = [d for d in node.decorator_list if ast.unparse(d).startswith(f"pytest.mark.{MARK}")]
                found += [_mark(decorator, test, known) for decorator in decorators]
    return found


def _mark(decorator: ast.expr, test: str, known: set[str]) -> Mark:
    try:
        assert isinstance(decorator, ast.Call)
        names = [ast.literal_eval(argument) for argument in decorator.args]
        words = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords}
        rows = tuple(name for name in names if name not in ENGINE_NAMES)
        assert rows and len(words) <= 1 and words.keys() <= {"refused", "differs"}
        assert all(isinstance(word, str) and word and "|" not in word for word in words.values())
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f'{test}: write @pytest.mark.{MARK}("row", ..., engine, ..., refused="why", or differs="what") with literal'
            f" strings and engines among {ENGINE_NAMES}"
        ) from error
    if unknown := set(rows) - known:
        raise ValueError(f"{test}: no row {sorted(unknown)} in tests/docs/features.py")
    engines = tuple(name for name in names if name in ENGINE_NAMES) or ENGINE_NAMES
    said = next((f"{'no' if kind == 'refused' else kind}: {word}" for kind, word in words.items()), "yes")
    return Mark(rows, engines, said, test)


def table(found: list[Mark]) -> str:
    """Returns what the tests show, in Markdown: a table for each group of rows.

    Raises:
        ValueError: tests contradict one another on a cell, or a cell has none.
    """
    cells: dict[tuple[str, str], set[str]] = defaultdict(set)
    for mark in found:
        for row in mark.rows:
            for engine in mark.engines:
                cells[row, engine].add(mark.said)
    if wrong := [f"{row} under {engine}: {sorted(said)}" for (row, engine), said in cells.items() if len(said) > 1]:
        raise ValueError(f"tests contradict one another: {wrong}")
    every = [(row, engine) for group in features().values() for row in group for engine in ENGINE_NAMES]
    if missing := [f"{row} ({engine})" for row, engine in every if (row, engine) not in cells]:
        raise ValueError(f"no test shows, by a mark {MARK}, what holds of: {', '.join(missing)}")
    parts = []
    for group, rows in features().items():
        lines = [f"| {group} | " + " | ".join(ENGINE_NAMES) + " |", "|---" * (len(ENGINE_NAMES) + 1) + "|"]
        for key, text in rows.items():
            lines.append(f"| {text} | " + " | ".join(next(iter(cells[key, engine])) for engine in ENGINE_NAMES) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def page_with(text: str) -> str:
    """Returns the page with these tables in the place of its own."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{PAGE.name} lacks the lines {_BEGIN!r} and {_END!r}"
    return f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table(marks())))
