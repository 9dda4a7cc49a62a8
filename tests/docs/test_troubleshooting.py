"""docs/reference/troubleshooting.md: every message in it is one of ours."""

from __future__ import annotations

import ast
import re

from tests.docs.kit import REFERENCE, ROOT, rows


def strings_of_the_package() -> list[str]:
    """Returns all texts in the package's code, cut where an f-string inserts a value."""
    trees = (ast.parse(file.read_text()) for file in sorted((ROOT / "lightning_hetero").rglob("*.py")))
    constants = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in constants if isinstance(node.value, str)]


def troubles() -> set[str]:
    """Pieces of messages that the page answers."""
    cells = [row[0] for row in rows((REFERENCE / "troubleshooting.md").read_text())]
    return {piece for cell in cells if cell.startswith("`") for piece in re.findall(r"`([^`]+)`", cell)}


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    pieces = troubles()
    assert len(pieces) > 30
    source = strings_of_the_package()
    assert {piece for piece in pieces if not any(piece in text for text in source)} == set()
