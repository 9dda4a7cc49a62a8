"""What a step of `tests.gpu.check` finds is appended at once to one file: one JSON object a line, in one piece."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

FILE, LINE, DRY = "GPU_CHECK_FILE", "GPU_CHECK_LINE", "GPU_CHECK_DRY"
"""Variables of a step's environment: where lines go, what each begins with, and whether the GPUs are simulated."""


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("ab", buffering=0) as file:  # several steps do
        file.write(f"{json.dumps(line, default=str)}\n".encode())


def begin_with(**facts: Any) -> None:
    """Has every further line of this step begin with these."""
    os.environ[LINE] = json.dumps({**json.loads(os.environ.get(LINE, "{}")), **facts})


def _write(kind: str, what: dict[str, Any]) -> None:
    line = {**json.loads(os.environ.get(LINE, "{}")), kind: what}
    if FILE in os.environ:
        append(Path(os.environ[FILE]), line)
    print(json.dumps({kind: what}, default=str), flush=True)


def found(**numbers: Any) -> None:
    """Notes what the table at the end shows."""
    _write("found", numbers)


def detail(**numbers: Any) -> None:
    """Notes what is in the file only."""
    _write("detail", numbers)


def skip(reason: str) -> NoReturn:
    """Ends the step: here it cannot be done."""
    _write("skipped", {"reason": reason})
    raise SystemExit(0)


def is_dry() -> bool:
    """Whether the GPUs are simulated: sizes are small, and times mean nothing."""
    return DRY in os.environ
