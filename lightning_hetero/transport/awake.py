"""The clock by which others are waited for: time in which this process was stopped itself does not count (layer T).

A job may be suspended as a whole: Ctrl-Z, ``scontrol suspend``, a freezer, a paused machine. The first to wake would
find that all others have been silent for longer than any timeout. So a thread looks at the clock once per beat, and
at most two beats count from one look to the next, however much time has passed.

Calls that may never end, next to the thread that waits for them.

Torch's store and gloo's connections wait for a process that is stopped without end, whatever their timeouts.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

BEAT_S = 0.25


class AwakeClock:
    """Counts the seconds in which it was looked at.

    Args:
        beat_s: how often it is looked at, at least; twice as much counts at most from one look to the next [s].

    Attributes:
        stopped_s: what did not count [s].
    """

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._most_s, self.stopped_s = 2 * beat_s, 0.0
        self._last_s: float | None = None
        self._awake_s = 0.0

    def at(self, now_s: float) -> float:
        """Looks at it.

        Args:
            now_s: of any clock that does not go back [s].
        """
        if self._last_s is not None:
            passed_s = max(0.0, now_s - self._last_s)
            self._awake_s += min(passed_s, self._most_s)
            self.stopped_s += max(0.0, passed_s - self._most_s)
        self._last_s = now_s
        return self._awake_s


class _ProcessClock:
    """The clock of this process, with a thread that looks at it; starts again in a forked process."""

    def __init__(self) -> None:
        self._lock, self.clock = threading.Lock(), AwakeClock()
        self._pid = -1

    def now(self) -> float:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                threading.Thread(target=self._look, name="awake-clock", daemon=True).start()
            return self.clock.at(time.monotonic())

    def _look(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.now()


_clock = _ProcessClock()
if hasattr(os, "register_at_fork"):
    # Another thread may hold the lock at the moment of a fork.
    os.register_at_fork(after_in_child=lambda: setattr(_clock, "_lock", threading.Lock()))


def awake_s() -> float:
    """Returns the time in which this process was not stopped, from an arbitrary moment on [s]."""
    return _clock.now()


def stopped_s() -> float:
    """Returns for how long this process has been stopped so far [s]."""
    _clock.now()
    return _clock.clock.stopped_s


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
    if calls := [thread for thread in threading.enumerate() if isinstance(thread, _Call)]:  # else start no clock
        end_s = awake_s() + _EXIT_S
        for call in calls:
            call.join(max(0.0, end_s - awake_s()))
