"""How long another rank may keep this one waiting, and what became of it (layer T)."""

from __future__ import annotations

import time
from typing import Protocol


class Failures(Protocol):
    """What became of other ranks, see `FailureBoard`."""

    def check(self) -> None: ...

    def lost(self, peer: int, how: str) -> RuntimeError: ...


class Patience:
    """For whoever waits, with a look now and then.

    Args:
        failures: looked at while waiting.
        timeout_s: how long one waits for something at most.
    """

    def __init__(self, failures: Failures, timeout_s: float) -> None:
        self.failures, self._timeout_s = failures, timeout_s

    def deadline_s(self) -> float:
        """Returns until when something that is waited for from now on must come [s, time.monotonic]."""
        return time.monotonic() + self._timeout_s

    def look(self, peer: int, deadline_s: float, what: str) -> None:
        """To be called while a peer is waited for.

        Args:
            peer: global rank.
            deadline_s: see `deadline_s`.
            what: it has done, or not, e.g. "sent nothing".

        Raises:
            RuntimeError: a rank has failed; or the deadline has passed. It names rank and cause.
        """
        self.failures.check()
        if time.monotonic() >= deadline_s:
            raise self.out(peer, what)

    def out(self, peer: int, what: str) -> RuntimeError:
        """Returns the error when the deadline has passed; see `look`."""
        return self.failures.lost(peer, f"it {what} for {self._timeout_s:g} s, the timeout")
