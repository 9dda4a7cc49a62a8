"""``python -m tests.docs.stock_ddp``: writes the table of docs/reference/drop_in.md from the marks of the tests.

    @pytest.mark.stock_ddp("optimization: gradient accumulation", "balanced", "stale")
    @pytest.mark.stock_ddp("optimization: LBFGS", "pipeline", refused="each rank holds some of the parameters only")

The first argument is *part: what*, both as a reader of the table sees them. The engines are those that the test runs.
``refused``: the test checks that the engine refuses it; why, in a few words. A mark stands on a test function or on a
test class; the tests are read, not imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import NamedTuple

from tests.docs.kit import REFERENCE, ROOT

MARK = "stock_ddp"
PAGE = REFERENCE / "drop_in.md"
ENGINE_NAMES = ("balanced", "stale", "pipeline")
_BEGIN, _END = "<!-- from the tests: python -m tests.docs.stock_ddp -->", "<!-- end -->"


class Mark(NamedTuple):
    """One mark on one test."""

    what: str
    engines: tuple[str, ...]
    refused: str | None
    test: str


def marks() -> list[Mark]:
    """Returns the marks of all tests.

    Raises:
        ValueError: one is not as the module says; names the test.
    """
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text()
        if MARK not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                test = f"{file.relative_to(ROOT)}::{node.name}"
                decorators = [d for d in node.decorator_list if ast.unparse(d).startswith(f"pytest.mark.{MARK}")]
                found += [_mark(decorator, test) for decorator in decorators]
    return found


def _mark(decorator: ast.expr, test: str) -> Mark:
    try:
        assert isinstance(decorator, ast.Call)
        what, *engines = [ast.literal_eval(argument) for argument in decorator.args]
        refused = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}.pop("refused", None)
        assert engines and set(engines) <= set(ENGINE_NAMES) and re.fullmatch(r"[^:|]+: [^|]+", what)
        assert "|" not in (refused or "")
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f'{test}: write @pytest.mark.{MARK}("part: what", engine, ..., refused="why, if it is") with literal'
            f" strings and engines among {ENGINE_NAMES}"
        ) from error
    return Mark(what, tuple(engines), refused, test)


def table() -> str:
    """Returns what the tests show, in Markdown: a table of what some engine refuses, and lists of all else by part.

    Raises:
        ValueError: tests contradict one another: one shows that an engine takes it, another that it refuses.
    """
    cells: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for mark in marks():
        for engine in mark.engines:
            cells[mark.what][engine].add("yes" if mark.refused is None else f"no: {mark.refused}")
    rows = ["| | " + " | ".join(ENGINE_NAMES) + " |", "|---" * (len(ENGINE_NAMES) + 1) + "|"]
    works: dict[str, list[str]] = defaultdict(list)
    for what in sorted(cells, key=str.lower):
        for engine, said in cells[what].items():
            if len(said) > 1:
                raise ValueError(f"tests contradict one another on {what!r} under {engine}: {sorted(said)}")
        row = {engine: next(iter(cells[what][engine]), "") for engine in ENGINE_NAMES}
        part, _, name = what.partition(": ")
        if any(said.startswith("no") for said in row.values()):
            rows.append(f"| {name} | " + " | ".join(_repeated_once(row)) + " |")
        else:
            tested = ", ".join(engine for engine, said in row.items() if said)
            works[part].append(name if all(row.values()) else f"{name} ({tested})")
    lists = [f"- **{part}**: {'; '.join(names)}." for part, names in works.items()]
    head = "What tests show to work (under all three engines, or those in brackets):"
    return "\n".join([*rows, "", head, "", *lists])


def _repeated_once(row: dict[str, str]) -> list[str]:
    """Returns the cells of a row; a reason that an engine further left has given is not said again."""
    first: dict[str, str] = {}
    for engine, said in row.items():
        first.setdefault(said, engine)
    return [
        f"no: as {first[said]}" if said.startswith("no") and first[said] != engine else said
        for engine, said in row.items()
    ]


def page_with(text: str) -> str:
    """Returns the page with this table in the place of its own."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{PAGE.name} lacks the lines {_BEGIN!r} and {_END!r}"
    return f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
