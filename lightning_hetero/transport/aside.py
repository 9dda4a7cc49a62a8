"""Calls that may never end, beside the thread that waits for them (layer T).

Torch's store and gloo's connections wait for a process that is stopped without end, whatever their timeouts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """A call in a thread of its own, which is left alone if it does not end.

    Args:
        call: what is done.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._found = call, list[T | Exception]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except Exception as error:
            self._found.append(error)

    def ends_within(self, seconds: float) -> bool:
        """Waits so long at most; returns whether it has ended."""
        self._thread.join(seconds)
        return bool(self._found)

    def result(self) -> T:
        """Returns or raises what it did."""
        (found,) = self._found
        if isinstance(found, Exception):
            raise found
        return found
