"""The epochs that all workers must begin in the same way (layer T)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hetero.stale.runtime.messages import EpochBegin
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
        ends, global_step, spans: as the workers began it.
        by: the worker that did so first.
        begun: who has.
        words: one `Word` per global step gone by.
    """

    ends: tuple[int, ...]
    global_step: int
    spans: tuple[tuple[int, int], ...]
    by: int
    begun: set[int] = field(default_factory=set[int])
    words: array[int] = field(default_factory=lambda: array("q"))

    def __str__(self) -> str:
        samples = self.ends[-1] if self.ends else 0
        return f"{samples} samples in {len(self.ends)} batches, from batch {self.global_step} on"


class AnnouncedEpochs:
    """The present epoch, and what is to be said of earlier ones to a worker that slept.

    Args:
        digest: of the layout, which every worker must have, too.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._present: AnnouncedEpoch | None = None
        self._words: dict[int, array[int]] = {}  # by epoch
        self._at: dict[int, int] = {}  # the epoch that a worker has begun last
        self.number = -1

    def words(self, number: int) -> Sequence[int]:
        """Returns the words of an epoch, none if there was no such epoch."""
        return self._words.get(number, ())

    def forget(self, rank: int) -> None:
        """A worker is gone; if it comes again, it joins the present epoch."""
        self._at.pop(rank, None)
        if self._present is not None:
            self._present.begun.discard(rank)

    def ask(self, rank: int, request: Request) -> AnnouncedEpoch | None:
        """A worker begins an epoch; returns it if it is the first to do so, else None.

        One that begins the present epoch a second time begins it again for all.

        Raises:
            RunEndsError: it says otherwise than the first one.
            ValueError: it says nothing that could be understood.
        """
        said = EpochBegin.read(request.text)
        if said.layout != self._digest:
            raise RunEndsError(
                f"worker {rank} and the server disagree on the model, its optimizers or the compression. {_ADVICE}"
            )
        self._at[rank] = request.epoch
        if request.epoch < self.number:
            return None
        epoch = self._present if request.epoch == self.number else None
        words = array("q", [0] * said.global_step)
        asked = AnnouncedEpoch(tuple(request.numbers), said.global_step, said.applied, rank, {rank}, words)
        if epoch is None or rank in epoch.begun:
            return asked
        if (epoch.ends, epoch.global_step, epoch.spans) != (asked.ends, asked.global_step, asked.spans):
            raise RunEndsError(
                f"worker {rank} and worker {epoch.by} disagree on epoch {request.epoch}: {asked} or {epoch}. {_ADVICE}"
            )
        epoch.begun.add(rank)
        return None

    def begin(self, number: int, epoch: AnnouncedEpoch, live: Iterable[int]) -> None:
        """Makes an epoch the present one; what no live worker can ask for any more is forgotten."""
        self._present, self.number, self._words[number] = epoch, number, epoch.words
        first = min((self._at.get(rank, -1) for rank in live), default=-1)
        self._words = {n: words for n, words in self._words.items() if n >= first}

    def step_over(self, word: int) -> None:
        """A global step of the present epoch is over; ``word`` says what it did, see `Word`."""
        self._words[self.number].append(word)
