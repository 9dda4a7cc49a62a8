"""Calls that may never end, next to the thread that waits for them (layer T).

Torch's store and gloo's connections wait for a process that is stopped without end, whatever their timeouts.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_hetero.transport.awake import BEAT_S, awake_s

T = TypeVar("T")

_EXIT_S = 3.0


class _Call(threading.Thread):
    """A call's thread."""


class Aside(Generic[T]):
    """A call in its own thread, which is left alone if it does not end.

    Args:
        call: what is done.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._found = list[T | Exception]()
        self._thread = _Call(target=self._run, args=(call,), name=name, daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._found.append(call())
        except Exception as error:
            self._found.append(error)

    def ends_within(self, seconds: float) -> bool:
        """Waits so long at most, by `awake_s`; returns whether it has ended."""
        end_s = awake_s() + seconds
        while not self._found and (left_s := end_s - awake_s()) > 0.0:
            self._thread.join(min(left_s, BEAT_S))
        return bool(self._found)

    def result(self) -> T:
        """Returns or raises what it did."""
        (found,) = self._found
        if isinstance(found, Exception):
            raise found
        return found


@atexit.register
def _let_end() -> None:
    """Waits for calls that were left alone: one that ends while Python is taken down would abort the process."""
    end_s = awake_s() + _EXIT_S
    for thread in threading.enumerate():
        if isinstance(thread, _Call):
            thread.join(max(0.0, end_s - awake_s()))
