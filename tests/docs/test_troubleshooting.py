"""docs/reference/troubleshooting.md: every message in it is one of ours."""

from __future__ import annotations

import re

from tests.docs.kit import REFERENCE, rows, source_strings


def troubles() -> set[str]:
    """Pieces of messages that the page answers."""
    cells = [row[0] for row in rows((REFERENCE / "troubleshooting.md").read_text())]
    return {piece for cell in cells if cell.startswith("`") for piece in re.findall(r"`([^`]+)`", cell)}


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    pieces = troubles()
    assert len(pieces) > 30
    source = source_strings()
    assert {piece for piece in pieces if not any(piece in text for text in source)} == set()
