"""What is done while a rank waits for a neighbour: a look at the failure board, and at the clock (layer T)."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.groups import close_connections
from lightning_hetero.transport.sockets import FOREVER, first_line


class NeighbourWatch:
    """Has the thread of the failure board look after the training thread, while that waits for a neighbour.

    Args:
        wire: whose connections are closed when there is a reason to.
        failures: looked at.
        timeout_s: how long a message is waited for at most.
    """

    def __init__(self, wire: Any, failures: FailureBoard, timeout_s: float) -> None:
        self._wire, self._failures, self._timeout_s = wire, failures, timeout_s
        self._found: RuntimeError | None = None

    def wait(self, work: Any, peer: int, what: str) -> None:
        """Waits for a work of gloo.

        Args:
            work: a send, or a receive.
            peer: global rank.
            what: it has not done if it does not come, e.g. "sent nothing".

        Raises:
            RuntimeError: a rank has failed, the peer is gone, or the timeout has passed; names rank and cause.
        """
        self._failures.watch()
        self._failures.waiting = partial(self._look, peer, self.deadline_s(), what)
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            raise self.lost(peer, f"its connection is closed: {first_line(error)}") from None
        finally:
            self._failures.waiting = None

    def lost(self, peer: int, why: str | Exception) -> Exception:
        """Returns the error to raise: what the watch has found, what went wrong here, or that a peer is gone."""
        if self._found is not None:
            return self._found
        return why if isinstance(why, Exception) else self._failures.lost(peer, why)

    def deadline_s(self) -> float:
        """Returns until when what is waited for from now on must come [s, `awake_s`]."""
        return awake_s() + self._timeout_s

    def look(self, peer: int, deadline_s: float, what: str) -> None:
        """Looks once, for a thread that waits in short turns.

        Args:
            peer: global rank.
            deadline_s: see `deadline_s`.
            what: it has done, or not, e.g. "sent nothing".

        Raises:
            RuntimeError: a rank has failed, or the deadline has passed; names rank and cause.
        """
        self._failures.check()
        if awake_s() >= deadline_s:
            raise self._failures.lost(peer, f"it {what} for {self._timeout_s:g} s, the timeout")

    def _look(self, peer: int, deadline_s: float, what: str) -> None:
        if self._found is not None:
            return
        try:
            self.look(peer, deadline_s, what)
        except RuntimeError as error:
            self._found = error
            if self._wire is not None:
                close_connections(self._wire)

    def end(self) -> None:
        """Lets the wire go."""
        self._wire = None
