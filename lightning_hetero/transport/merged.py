"""Several transports as one: workers of this node by shared memory, those of other nodes by pairs (layer T)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_hetero.transport.base import Happened, Listener, QueuedListener, Reply

__all__ = ["Several"]


class Several(Listener):
    """One listener out of several with different ranks.

    Args:
        listeners: at most one of them waits by itself (shared memory); the others are a `QueuedListener` each, which
            wakes it.

    Raises:
        ValueError: there is none, a rank is in two of them, or two wait by themselves.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        if not listeners:
            raise ValueError("listeners=[]: at least one is needed")
        self.ranks = frozenset().union(*(listener.ranks for listener in listeners))
        if len(self.ranks) != sum(len(listener.ranks) for listener in listeners):
            raise ValueError(f"a rank is in two listeners: {[sorted(listener.ranks) for listener in listeners]}")
        queued = [listener for listener in listeners if isinstance(listener, QueuedListener)]
        waiting = [listener for listener in listeners if listener not in queued]
        if len(waiting) > 1:
            raise ValueError(f"{len(waiting)} listeners wait by themselves, at most one can: {waiting}")
        self._first = waiting[0] if waiting else listeners[0]
        self._others = [listener for listener in queued if listener is not self._first]
        self._home = {rank: listener for listener in listeners for rank in listener.ranks}
        for other in self._others:
            other.subscribe(self._first.wake)

    def events(self, timeout_s: float | None) -> list[Happened]:
        if found := [event for other in self._others for event in other.events(0.0)]:
            return self._first.events(0.0) + found
        # What the others get from now on wakes the first.
        found = self._first.events(timeout_s)
        return found + [event for other in self._others for event in other.events(0.0)]

    def wake(self) -> None:
        self._first.wake()

    def reply(self, rank: int, reply: Reply) -> None:
        self._of(rank).reply(rank, reply)

    def gradient(self, rank: int, slot: int) -> Tensor:
        return self._of(rank).gradient(rank, slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        for listener in (self._first, *self._others):
            listener.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        for listener in (self._first, *self._others):
            listener.share_state(data)

    def disconnect(self, rank: int) -> None:
        self._of(rank).disconnect(rank)

    def dismiss(self, rank: int, reason: str) -> None:
        self._of(rank).dismiss(rank, reason)

    def close(self) -> None:
        for listener in (*self._others, self._first):  # those that wake the first one before it
            listener.close()

    def _of(self, rank: int) -> Listener:
        if rank not in self._home:
            raise ValueError(f"rank={rank} is unknown, there are {sorted(self.ranks)}")
        return self._home[rank]
