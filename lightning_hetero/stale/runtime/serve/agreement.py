"""Who takes part, and what all must do alike: epochs and meetings (layer T)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_hetero.stale.runtime.messages import EpochBegin
from lightning_hetero.transport.base import Request

__all__ = ["AnnouncedEpoch", "AnnouncedEpochs", "DisagreementError", "LiveWorkers", "Meeting"]


class DisagreementError(ValueError):
    """Two workers, or a worker and the server, do not run the same program; the message names both."""


_ADVICE = (
    "The ranks do not run the same program: check that code, data, loader arguments and library versions are equal on"
    " all machines"
)


class LiveWorkers:
    """The workers of a run.

    Args:
        expected: ranks that take part from the start, connected or not.

    Attributes:
        live: expected or connected, and neither gone nor left; all are waited for at meetings.
        connected: with a connection.
        generation: number of changes so far: workers lost, and workers that joined late or again.
    """

    def __init__(self, expected: Iterable[int]) -> None:
        self.live = set(expected)
        self.connected: set[int] = set()
        self.generation = 0
        self._anybody = False
        self._notices: dict[int, list[str]] = {}

    @property
    def finished(self) -> bool:
        """Whether there were workers, and all have left or are gone."""
        return self._anybody and not self.connected & self.live

    def joined(self, rank: int) -> None:
        """A worker connected."""
        self._anybody = True
        if rank not in self.live:
            self.generation += 1
        self.live.add(rank)
        self.connected.add(rank)

    def gone(self, rank: int, reason: str) -> None:
        """A worker's connection ended; the others are told, unless it had left."""
        self.connected.discard(rank)
        self._notices.pop(rank, None)
        if rank in self.live:
            self.live.discard(rank)
            self.generation += 1
            self.notify(
                f"rank {rank} died{f' ({reason})' if reason else ''}; the others go on without, on {len(self.live)}"
                " devices, with the same global batch: its samples go to them"
            )

    def left(self, rank: int) -> None:
        """A worker is done, or has failed and said so."""
        self.live.discard(rank)

    def notify(self, text: str, *, only: int | None = None) -> None:
        """Has everybody, or one, told something with the next answer."""
        for rank in self.live if only is None else (only,):
            self._notices.setdefault(rank, []).append(text)

    def take_notices(self, rank: int) -> list[str]:
        """Returns what a worker has still to be told."""
        return self._notices.pop(rank, [])


class Meeting:
    """Answered when all who live have come, for the same reason."""

    def __init__(self) -> None:
        self._asked: dict[int, Request] = {}

    def ask(self, rank: int, request: Request) -> None:
        """A worker has come."""
        self._asked[rank] = request

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._asked.pop(rank, None)

    def complete(self, live: set[int]) -> dict[int, Request]:
        """Returns who has met, if all have; then the next meeting begins.

        Raises:
            DisagreementError: they meet for different reasons.
        """
        if not self._asked or not live <= self._asked.keys():
            return {}
        asked, self._asked = self._asked, {}
        (first, one), *others = sorted(asked.items())
        for rank, request in others:
            if (request.tick, request.text) != (one.tick, one.text):
                raise DisagreementError(
                    f"workers meet for different reasons: {first} at meeting {one.tick} ({one.text or 'no reason'}),"
                    f" {rank} at meeting {request.tick} ({request.text or 'no reason'}). They have taken different ways"
                    " through the program, e.g. a condition that depends on the rank"
                )
        return asked


@dataclass(slots=True)
class AnnouncedEpoch:
    """What the server keeps of an epoch.

    Attributes:
        ends, tick, spans: as the workers began it.
        by: the worker that did so first.
        begun: who has.
        words: one `Word` per tick gone by.
    """

    ends: tuple[int, ...]
    tick: int
    spans: tuple[tuple[int, int], ...]
    by: int
    begun: set[int] = field(default_factory=set[int])
    words: array[int] = field(default_factory=lambda: array("q"))

    def __str__(self) -> str:
        samples = self.ends[-1] if self.ends else 0
        return f"{samples} samples in {len(self.ends)} batches, from batch {self.tick} on"


class AnnouncedEpochs:
    """The present epoch, and what is to be said of earlier ones to a worker that slept.

    Args:
        digest: of the layout, which every worker must have, too.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._kept: dict[int, AnnouncedEpoch] = {}
        self.number = -1

    def words(self, number: int) -> Sequence[int]:
        """Returns the words of an epoch, none if there was no such epoch."""
        return self._kept[number].words if number in self._kept else ()

    def forget(self, rank: int) -> None:
        """A worker is gone; if it comes again, it joins the epoch as it is."""
        for epoch in self._kept.values():
            epoch.begun.discard(rank)

    def ask(self, rank: int, request: Request) -> AnnouncedEpoch | None:
        """A worker begins an epoch; returns it if it is the first to do so, else None.

        One that begins the present epoch a second time begins it anew for all.

        Raises:
            DisagreementError: it says otherwise than the first one.
            ValueError: it says nothing that could be understood.
        """
        said = EpochBegin.read(request.text)
        if said.layout != self._digest:
            raise DisagreementError(
                f"worker {rank} and the server disagree on the model, its optimizers or the compression. {_ADVICE}"
            )
        epoch = self._kept.get(request.epoch)
        if request.epoch < self.number:
            return None
        words = array("q", [0] * said.tick)
        asked = AnnouncedEpoch(tuple(request.numbers), said.tick, said.applied, rank, {rank}, words)
        if epoch is None or rank in epoch.begun:
            return asked
        if (epoch.ends, epoch.tick, epoch.spans) != (asked.ends, asked.tick, asked.spans):
            raise DisagreementError(
                f"worker {rank} and worker {epoch.by} disagree on epoch {request.epoch}: {asked} or {epoch}. {_ADVICE}"
            )
        epoch.begun.add(rank)
        return None

    def begin(self, number: int, epoch: AnnouncedEpoch) -> None:
        """Makes an epoch the present one."""
        self._kept[number] = epoch
        self.number = number

    def tick_over(self, word: int) -> None:
        """A tick of the present epoch is over; ``word`` says what it did, see `Word`."""
        self._kept[self.number].words.append(word)
