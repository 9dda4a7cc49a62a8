"""Sizes and names, as CONTRIBUTING.md limits them; each check is shown to bite by a planted case."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import lightning_hetero

PACKAGE = Path(lightning_hetero.__file__).resolve().parent


# ---- the size of things, which may only fall ----------------------------------------------------------------------

MOST_LINES_OF_CODE = 33_772
MOST_LINES, MOST_ATTRIBUTES, MOST_ARGUMENTS = 400, 16, 12


def code_lines(text: str) -> int:
    """Lines that are not blank, comment or docstring."""
    kept = sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))
    return kept - sum(
        node.body[0].end_lineno - node.body[0].lineno + 1  # type: ignore[operator]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
    )


def attributes(cls: ast.ClassDef) -> set[str]:
    """What a class declares in its body, and what its methods set on their first argument; keys of a dict are none."""
    if any(ast.unparse(base) == "TypedDict" for base in cls.bases):
        return set()
    declared = [node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    found = {n.target.id for n in declared if not ast.unparse(n.annotation).startswith("ClassVar")}  # type: ignore[union-attr]
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and method.args.args:
            own = method.args.args[0].arg
            stored = (n for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            found |= {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == own}
    return found


def arguments(cls: ast.ClassDef) -> int:
    """How many a class's own constructor takes."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
    return 0


def too_large(place: str, text: str) -> list[str]:
    """What is too large in a module."""
    found = []
    if (lines := len(text.splitlines())) > MOST_LINES:
        found.append(f"{place}: {lines} lines, at most {MOST_LINES}")
    for cls in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        if len(names := attributes(cls)) > MOST_ATTRIBUTES:
            found.append(f"{place}: {cls.name} has {len(names)} attributes, at most {MOST_ATTRIBUTES}")
        if not place.endswith("strategy.py") and (count := arguments(cls)) > MOST_ARGUMENTS:
            found.append(f"{place}: {cls.name}() takes {count} arguments, at most {MOST_ARGUMENTS}")
    return found


def test_the_package_does_not_grow() -> None:
    assert sum(code_lines(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")) <= MOST_LINES_OF_CODE


def test_no_file_class_or_constructor_is_too_large() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        found += too_large(file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8"))
    assert found == []


def test_what_is_too_large_is_found() -> None:
    many = "\n".join(f"        self.a{n} = n" for n in range(MOST_ATTRIBUTES + 1))
    planted = f"class A:\n    def __init__(self, {', '.join(f'b{n}' for n in range(13))}):\n{many}\n"
    assert [said.partition(": ")[2] for said in too_large("x.py", planted + "\n" * MOST_LINES)] == [
        f"{MOST_LINES + MOST_ATTRIBUTES + 3} lines, at most {MOST_LINES}",
        f"A has {MOST_ATTRIBUTES + 1} attributes, at most {MOST_ATTRIBUTES}",
        f"A() takes 13 arguments, at most {MOST_ARGUMENTS}",
    ]
    text = '"""Module."""\n\n# comment\nx = 1  # code\ndef f():\n    """Doc\n    string."""\n    return x\n'
    assert code_lines(text) == 3


# ---- one name, one class -------------------------------------------------------------------------------------------


def twice(modules: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Names of public classes that stand in more than one place."""
    places: dict[str, list[str]] = {}
    for place, tree in modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_public_class_name_is_used_twice() -> None:
    assert twice((f.as_posix(), ast.parse(f.read_text(encoding='utf-8'))) for f in sorted(PACKAGE.rglob('*.py'))) == {}


def test_a_name_that_is_used_twice_is_found() -> None:
    one = ast.parse("class Place: ...\nclass _Own: ...")
    assert twice([("a", one), ("b", one)]) == {"Place": ["a", "b"]}
