"""Who takes part, and what all must do alike: epochs and meetings (layer T)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hetero.stale.runtime.messages import EpochBegin
from lightning_hetero.transport.base import Request


class RunEndsError(Exception):
    """The run cannot go on; the message says why, and everybody is told it."""


_ADVICE = (
    "The ranks do not run the same program: check that code, data, loader arguments and library versions are equal on"
    " all machines"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long the others wait for a worker [s]; by default without limit.

    Attributes:
        connect_s: for one that takes part from the start to connect, from the first connection on.
        silence_s: at a meeting, for one that gives no sign of life, while others who have come do; anywhere, for all,
            when whoever started the server is gone.
        meeting_s: at a meeting, for one that lives and does not come.
    """

    connect_s: float = math.inf
    silence_s: float = math.inf
    meeting_s: float = math.inf


_DOUBT = 1 / 12  # of a limit: a server that was itself stopped first hears what came meanwhile


class _Wait(NamedTuple):
    """A worker that others wait for: from when on, at most how long [s], and what to say of it then."""

    rank: int
    from_s: float
    limit_s: float
    words: str

    @property
    def doubted_s(self) -> float:
        return self.from_s + (1.0 - _DOUBT) * self.limit_s


class LiveWorkers:
    """The workers of a run.

    Args:
        expected: ranks that take part from the start, connected or not.
        limits: how long they are waited for.

    Attributes:
        live: expected or connected, and neither gone nor left; all are waited for at meetings.
        connected: with a connection.
        awaited: of the expected ones, those that have not connected yet.
        generation: number of changes so far: workers lost, and workers that joined late or again.
    """

    def __init__(self, expected: Iterable[int], limits: Limits | None = None) -> None:
        self.live = set(expected)
        self.connected: set[int] = set()
        self.awaited = set(self.live)
        self.generation = 0
        self._limits = limits or Limits()
        self._begun_s = math.inf
        self._heard_s: dict[int, float] = {}
        self._doubted: dict[_Wait, float] = {}  # since when [s]
        self._doubted_all_s = math.inf
        self._notices: dict[int, list[str]] = {}

    @property
    def finished(self) -> bool:
        """Whether there were workers, and all have left or are gone; one that is late has still to hear how it went."""
        return math.isfinite(self._begun_s) and not self.connected & self.live and not self.awaited

    @property
    def deserted(self) -> bool:
        """Whether nobody is connected, and nobody will be of those who know that there is a server."""
        return not self.connected and not (self.awaited and math.isfinite(self._begun_s))

    def joined(self, rank: int, now: float) -> None:
        """A worker connected."""
        self._begun_s = min(self._begun_s, now)
        if rank not in self.live:
            self.generation += 1
        self.live.add(rank)
        self.connected.add(rank)
        self.awaited.discard(rank)
        self.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """A worker gave a sign of life."""
        self._heard_s[rank] = now

    def gone(self, rank: int, reason: str, *, what: str = "died") -> None:
        """A worker's connection ended, or is not waited for any more; the others are told, unless it had left."""
        self.connected.discard(rank)
        self.awaited.discard(rank)
        self._notices.pop(rank, None)
        if rank in self.live:
            self.live.discard(rank)
            self.generation += 1
            self.notify(
                f"rank {rank} {what}{f' ({reason})' if reason else ''}; the others go on without, on {len(self.live)}"
                " devices, with the same global batch: its samples go to them"
            )

    def overdue(self, meeting: Meeting, now: float) -> list[tuple[int, str]]:
        """Returns who need not be waited for any longer, and why, in words; each once."""
        waits = [wait for wait in self._waits(meeting) if now >= wait.doubted_s]
        self._doubted = {wait: self._doubted.get(wait, now) for wait in waits}
        return [*{wait.rank: wait.words for wait in waits if now >= self._given_up_s(wait)}.items()]

    def overdue_s(self, meeting: Meeting) -> float:
        """Returns when `overdue` is to be asked next [s]; inf: only an event can change anything."""
        due = (self._given_up_s(w) if w in self._doubted else w.doubted_s for w in self._waits(meeting))
        return min(due, default=math.inf)

    def _given_up_s(self, wait: _Wait) -> float:
        return self._doubted[wait] + _DOUBT * wait.limit_s

    def _waits(self, meeting: Meeting) -> Iterator[_Wait]:
        limits = self._limits
        for rank in sorted(self.awaited):
            words = f"it did not connect within {limits.connect_s:g} s: killed before, or a firewall"
            yield _Wait(rank, self._begun_s, limits.connect_s, words)
        for rank in sorted(meeting.missing(self.live & self.connected)):
            words = f"it did not come to where the others met, for {limits.meeting_s:g} s"
            yield _Wait(rank, meeting.begun_s, limits.meeting_s, words)
        for rank in sorted(self.silent(meeting)):
            words = f"no sign of life for {limits.silence_s:g} s: stopped, or its machine or network failed"
            yield _Wait(rank, self._heard_s[rank], limits.silence_s, words)

    def silent(self, meeting: Meeting) -> set[int]:
        """Returns who may be silent for ever, has come to the meeting or not; nobody while nobody has come.

        Those who have come show life meanwhile. If they do not either, the whole job is suspended: Ctrl-Z, SLURM.
        """
        here = self.live & self.connected
        if not (come := here & meeting.come):
            return set()
        newest_s = max(self._heard_s[rank] for rank in come)
        return {rank for rank in here if newest_s - self._heard_s[rank] > self._limits.silence_s / 2}

    def all_silent(self, now: float) -> bool:
        """Whether nobody who is connected has given a sign of life for so long that it need not be waited for.

        To be asked again and again: a server that was stopped itself first hears what came meanwhile.
        """
        limit_s = self._limits.silence_s
        newest_s = max((self._heard_s[rank] for rank in self.connected), default=math.inf)
        if now - newest_s < (1.0 - _DOUBT) * limit_s:
            self._doubted_all_s = math.inf
            return False
        self._doubted_all_s = min(self._doubted_all_s, now)
        return now >= self._doubted_all_s + _DOUBT * limit_s

    def left(self, rank: int) -> None:
        """A worker is done, or has failed and said so."""
        self.live.discard(rank)

    def notify(self, text: str) -> None:
        """Has everybody told something with the next answer."""
        for rank in self.live:
            self._notices.setdefault(rank, []).append(text)

    def take_notices(self, rank: int) -> list[str]:
        """Returns what a worker has still to be told."""
        return self._notices.pop(rank, [])


class Meeting:
    """Answered when all who live have come, for the same reason.

    Attributes:
        begun_s: when the first one came [s]; inf: nobody has.
        last: number of the last one that was answered; -1 before.
    """

    def __init__(self) -> None:
        self._asked: dict[int, Request] = {}
        self.begun_s = math.inf
        self.last = -1

    def ask(self, rank: int, request: Request, now: float) -> None:
        """A worker has come."""
        self._asked[rank] = request
        self.begun_s = min(self.begun_s, now)

    @property
    def come(self) -> set[int]:
        """Those who wait."""
        return set(self._asked)

    def missing(self, live: set[int]) -> set[int]:
        """Returns who is waited for; nobody while nobody has come."""
        return live - self._asked.keys() if self._asked else set()

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._asked.pop(rank, None)
        if not self._asked:
            self.begun_s = math.inf

    def is_full(self, live: set[int]) -> bool:
        """Whether all have come."""
        return bool(self._asked) and live <= self._asked.keys()

    def complete(self, live: set[int]) -> dict[int, Request]:
        """Returns who has met, if all have; then the next meeting begins.

        Raises:
            RunEndsError: they meet for different reasons.
        """
        if not self.is_full(live):
            return {}
        asked, self._asked, self.begun_s = self._asked, {}, math.inf
        (first, one), *others = sorted(asked.items())
        for rank, request in others:
            if (request.global_step, request.text) != (one.global_step, one.text):
                raise RunEndsError(
                    f"workers meet for different reasons: {first} at meeting {one.global_step}"
                    f" ({one.text or 'no reason'}), {rank} at meeting {request.global_step}"
                    f" ({request.text or 'no reason'}). They have taken different ways through the program, e.g. a"
                    " condition that depends on the rank"
                )
        self.last = one.global_step
        return asked


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
        """A worker is gone; if it comes again, it joins the epoch as it is."""
        self._at.pop(rank, None)
        if self._present is not None:
            self._present.begun.discard(rank)

    def ask(self, rank: int, request: Request) -> AnnouncedEpoch | None:
        """A worker begins an epoch; returns it if it is the first to do so, else None.

        One that begins the present epoch a second time begins it anew for all.

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
