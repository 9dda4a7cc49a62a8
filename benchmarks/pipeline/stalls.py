"""Where the time of a step that took much longer than the others went: garbage collection, or the machine (no torch).

Every rank notes its garbage collections; beside them a process that only sleeps notes how late it is woken. While it
was, the machine was busy or a virtual machine stood still. All stamps are of `time.perf_counter`, which the processes
of a machine share on Linux.

``python -m benchmarks.pipeline.stalls FILE``: the sleeping process; ends when its standard input is closed.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.steps import percentile

NAP_S, LATE_S = 0.01, 0.002
STALL = 1.3  # times the median of the engine


@dataclass(frozen=True, slots=True)
class Span:
    """From ``start_s`` for ``seconds``."""

    start_s: float
    seconds: float


class Collections:
    """Notes this process's garbage collections while it is entered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._began_s = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self.spans.append(Span(self._began_s, now_s - self._began_s))


class Sleeper:
    """A process of its own that sleeps 10 ms at a time, while it is entered.

    Args:
        path: file for what it notes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sleeper:
        command = [sys.executable, "-m", "benchmarks.pipeline.stalls", str(self.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def late(self) -> list[Span]:
        """Returns from when on, and by how much, it was woken too late."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        return [Span(*map(float, line.split())) for line in lines if line.endswith("\n")]


def nap(path: Path) -> None:
    """Sleeps and notes, until standard input is closed."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    with path.open("w", buffering=1) as file:
        while not over.is_set():
            due_s = time.perf_counter() + NAP_S
            time.sleep(NAP_S)
            late_s = time.perf_counter() - due_s
            if late_s > LATE_S:
                file.write(f"{due_s!r} {late_s!r}\n")


def within(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Returns how much of ``start_s`` to ``end_s`` the spans, which do not overlap, cover [s]."""
    return sum(
        max(0.0, min(end_s, span.start_s + span.seconds) - max(start_s, span.start_s)) for span in spans
    )


def stalls(steps_s: Sequence[Sequence[float]], *others: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Returns the steps that took more than 1.3 times the median of all, each with its entries of ``others``."""
    every = [value for run in steps_s for value in run]
    limit_s = STALL * percentile(every, 50)
    rows = zip(every, *([value for run in other for value in run] for other in others), strict=True)
    return [row for row in rows if row[0] > limit_s]


if __name__ == "__main__":
    nap(Path(sys.argv[1]))
