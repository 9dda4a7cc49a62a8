"""The epochs that all workers must begin in the same way (layer T)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.intervals import pairs
from lightning_hetero.transport.base import Request
from lightning_hetero.transport.membership import RunEndsError

_ADVICE = (
    "The ranks do not run the same program: check that code, data, loader arguments and library versions are equal on"
    " all machines"
)


@dataclass(slots=True)
class AnnouncedEpoch:
    """What the server keeps of an epoch.

    Attributes:
        ends, global_step, spans, streams: as the workers began it; see `Streams.numbers`, empty without.
        by: the worker that did so first.
        begun: who has.
        words: one `Word` per global step gone by.
    """

    ends: tuple[int, ...]
    global_step: int
    spans: tuple[Span, ...]
    streams: tuple[int, ...]
    by: int
    begun: set[int] = field(default_factory=set[int])
    words: array[int] = field(default_factory=lambda: array("q"))

    def __str__(self) -> str:
        if self.streams:
            return f"streams {self.streams}, from batch {self.global_step} on"
        samples = self.ends[-1] if self.ends else 0
        return f"{samples} samples in {len(self.ends)} batches, from batch {self.global_step} on"


class AnnouncedEpochs:
    """The present epoch. A worker begins one after it has met all others behind the one before.

    Args:
        digest: of the layout, which every worker must have, too.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._present: AnnouncedEpoch | None = None
        self.number = -1

    @property
    def words(self) -> Sequence[int]:
        """The words of the present epoch."""
        return () if self._present is None else self._present.words

    def forget(self, rank: int) -> None:
        """A worker is gone; if it comes again, it joins the present epoch."""
        if self._present is not None:
            self._present.begun.discard(rank)

    def ask(self, rank: int, request: Request) -> AnnouncedEpoch | None:
        """A worker begins an epoch; returns it if it is the first to do so, else None.

        One that begins the present epoch a second time begins it again for all.

        Raises:
            RunEndsError: it says otherwise than the first one.
            ValueError: the epoch is over, or there are no spans.
        """
        if request.text != self._digest:
            raise RunEndsError(
                f"worker {rank} and the server disagree on the model, its optimizers or the compression. {_ADVICE}"
            )
        if request.epoch < self.number:
            raise ValueError(f"epoch {request.epoch} is over (the server is in {self.number})")
        epoch = self._present if request.epoch == self.number else None
        first, (batches, *numbers) = request.global_step, request.numbers
        streams = tuple(numbers) if batches < 0 else ()
        ends, spans = ((), ()) if streams else (tuple(numbers[:batches]), pairs(numbers[batches:]))
        asked = AnnouncedEpoch(ends, first, spans, streams, rank, {rank}, array("q", [0] * first))
        if epoch is None or rank in epoch.begun:
            return asked
        if any(getattr(epoch, name) != getattr(asked, name) for name in ("ends", "global_step", "spans", "streams")):
            raise RunEndsError(
                f"worker {rank} and worker {epoch.by} disagree on epoch {request.epoch}: {asked} or {epoch}. {_ADVICE}"
            )
        epoch.begun.add(rank)
        return None

    def begin(self, number: int, epoch: AnnouncedEpoch) -> None:
        """Makes an epoch the present one."""
        self._present, self.number = epoch, number

    def step_over(self, word: int) -> None:
        """A global step of the present epoch is over; ``word`` says what it did, see `Word`."""
        assert self._present is not None
        self._present.words.append(word)
