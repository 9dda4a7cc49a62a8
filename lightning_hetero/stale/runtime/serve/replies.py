"""What goes out of the server: published versions, and one answer to every request (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs, LiveWorkers
from lightning_hetero.transport.base import Listener, Reply, Say

__all__ = ["Replies"]


class Replies:
    """Knows who waits for an answer, and fills in what every answer says.

    Args:
        listener: the transport's end.
        area: uint8 flat parameters and buffers, what is published.
        coordinator: knows tick and version.
        live_workers: have notices for workers.
        epochs: knows the epoch's number.
        before: called with a worker's rank before it is answered; it may write its slot then.

    Attributes:
        failure: why the run cannot go on; None: it can.
    """

    def __init__(
        self,
        listener: Listener,
        area: Tensor,
        coordinator: Coordinator,
        live_workers: LiveWorkers,
        epochs: AnnouncedEpochs,
        before: Callable[[int], None],
    ) -> None:
        self._listener, self._area, self._coordinator = listener, area, coordinator
        self._live_workers, self._epochs, self._before = live_workers, epochs, before
        self._unanswered: set[int] = set()
        self.failure: str | None = None

    def publish(self) -> None:
        """Lets workers see the present parameters."""
        self._listener.publish(self._coordinator.version, self._area)

    def asked(self, rank: int) -> None:
        """A request has come, which is to be answered some time."""
        self._unanswered.add(rank)

    def forget(self, rank: int) -> None:
        """A worker is gone: nobody to answer."""
        self._unanswered.discard(rank)

    def fail(self, text: str) -> None:
        """Tells all who wait that the run cannot go on; the first reason stays."""
        self.failure = self.failure or text
        for rank in list(self._unanswered):
            self.answer_failed(rank)

    def answer_failed(self, rank: int) -> None:
        """Tells a worker that the run cannot go on."""
        self.answer(rank, Say.FAILED, text=self.failure or "")

    def answer(
        self, rank: int, kind: Say, *, epoch: int | None = None, tick: int | None = None, version: int | None = None,
        lease: int = 0, micro: int = 0, numbers: Sequence[int] = (), hint: tuple[int, int] = (0, 0),
        flags: int = 0, wasted: bool = False, text: str = "",
    ) -> None:  # fmt: skip
        """Answers a worker; see `Reply`.

        Args:
            epoch, tick, version: None: the server's.
            text: empty: what the worker has still to be told.
        """
        self._unanswered.discard(rank)
        self._before(rank)
        reply = Reply(
            kind=kind,
            epoch=self._epochs.number if epoch is None else epoch,
            tick=self._coordinator.tick if tick is None else tick,
            version=self._coordinator.version if version is None else version,
            lease=lease,
            micro=micro,
            hint_start=hint[0],
            hint_end=hint[1],
            generation=self._live_workers.generation,
            flags=flags,
            wasted=wasted,
            numbers=numbers,
            text=text or "\n".join(self._live_workers.take_notices(rank)),
        )
        self._listener.reply(rank, reply)
