"""What a long simulation has computed already, kept in a file, so that it can be stopped and go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Values = dict[str, Any]


class Kept:
    """Plain values by what they were computed for, a line each.

    Args:
        path: of the file; made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, dict[str, Values]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._known = dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __call__(self, key: str, compute: Callable[[], Values], shown: Callable[[Values], str]) -> Values:
        """Returns what is known, or computes it, keeps it and prints what is shown of it."""
        if key not in self._known:
            self._known[key] = compute()
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps([key, self._known[key]]) + "\n")
            print(shown(self._known[key]), flush=True)
        return self._known[key]
