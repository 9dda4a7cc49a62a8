"""Small results kept on disk between runs, one JSON file per key (layer T).

A cache is only ever a shortcut: what cannot be read counts as missing, and what cannot be written is a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any


def key_of(facts: Any) -> str:
    """Returns a key for JSON values; different facts get different keys, for all practical purposes (SHA-256)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load(folder: str | Path, kind: str, key: str) -> dict[str, Any] | None:
    """Returns what `save` kept under this key; ``None`` if there is nothing, or nothing that can be read."""
    try:
        entry = json.loads(_path(folder, kind, key).read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(entry, dict) and entry.get("key") == key and isinstance(entry.get("data"), dict)
    return entry["data"] if whole else None


def save(folder: str | Path, kind: str, key: str, data: dict[str, Any]) -> None:
    """Keeps ``data`` (JSON values) under this key; missing folders are made. Readers see the old file or the new one.

    A folder that cannot be written is reported as a RuntimeWarning.
    """
    path = _path(folder, kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": key, "data": data}, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        message = f"{kind} is measured again next time: {path} cannot be written ({error})"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _path(folder: str | Path, kind: str, key: str) -> Path:
    return Path(folder) / f"{kind}-{key[:16]}.json"
