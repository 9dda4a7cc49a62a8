"""Where other threads leave what happened for the server's thread to collect (layer T)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_hetero.transport.base import Happened

__all__ = ["Mailbox"]


class Mailbox:
    """A queue of events. Every method may be called from any thread; `collect` is meant for one."""

    def __init__(self) -> None:
        self._filled = threading.Condition()
        self._events: list[Happened] = []
        self._woken = False
        self._notify: Callable[[], None] | None = None

    def put(self, event: Happened) -> None:
        """Leaves an event and wakes who waits."""
        with self._filled:
            self._events.append(event)
            self._filled.notify_all()
        self._tell()

    def wake(self) -> None:
        """Makes the present or next `collect` return early."""
        with self._filled:
            self._woken = True
            self._filled.notify_all()
        self._tell()

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Has ``notify`` called after each `put` or `wake`: for one who waits somewhere else."""
        with self._filled:
            self._notify = notify
            waiting = bool(self._events) or self._woken
        if waiting:
            notify()

    def collect(self, timeout_s: float | None) -> list[Happened]:
        """Takes out all events, after waiting at most ``timeout_s`` (None: without limit) for one."""
        with self._filled:
            self._filled.wait_for(lambda: self._events or self._woken, timeout_s)
            events, self._events, self._woken = self._events, [], False
            return events

    def _tell(self) -> None:
        if (notify := self._notify) is not None:
            notify()
