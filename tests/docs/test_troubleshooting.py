"""docs/reference/troubleshooting.md: every message in it is one of ours, and has a paragraph of its own."""

from __future__ import annotations

import re

from tests.docs.kit import REFERENCE, source_strings

TEXT = (REFERENCE / "troubleshooting.md").read_text()
ENTRIES = re.findall(r"^### (.+)\n\n((?:(?!^#).*\n)+)", TEXT, flags=re.M)
THEIRS = {"Duplicate GPU detected", "DataLoader worker (pid(s) ...) exited unexpectedly"}


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    messages = [title.strip("`") for title, _ in ENTRIES if title.startswith("`")]
    pieces = {piece.strip(" :.") for text in messages if text not in THEIRS for piece in text.split("...")}
    assert len(messages) > 35
    source = source_strings()
    assert {piece for piece in pieces if not any(piece in text for text in source)} == set()


def test_every_entry_can_be_found_and_is_answered() -> None:
    assert len(ENTRIES) == TEXT.count("\n### ") == len(dict(ENTRIES))
    for title, answer in ENTRIES:
        assert len(re.findall(r"\w{2,}", title)) >= 3 and len(answer.split()) >= 12, title
