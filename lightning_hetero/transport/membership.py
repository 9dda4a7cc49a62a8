"""Who takes part in a run, who is gone and why, and the meeting in progress: no socket, store or clock (layer T).

The stale engine's server tells it what comes in at its sockets, the host of a roll call what it finds in the store.

Where ranks meet, time counts while somebody shows life: at most two signs' worth from one sign to the next, whoever
gives them. So a job that was suspended as a whole loses nobody, also if the process that counts was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_hetero.transport.awake import AwakeClock

_SIGNS = 12  # of life that a rank gives within `Limits.silence_s`, at least


class RunEndsError(Exception):
    """The run cannot go on; the message says why, and everybody receives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long the others wait for a rank [s]; by default without limit.

    Attributes:
        connect_s: for one that takes part from the start to connect, from the first connection on.
        silence_s: at a meeting, for one that gives no sign of life, while others do; anywhere, for all, when whoever
            started the server is gone.
        meeting_s: at a meeting, for one that lives and does not come.
    """

    connect_s: float = math.inf
    silence_s: float = math.inf
    meeting_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Met:
    """What all who have met learn.

    Attributes:
        alive: ranks that take part, ascending.
        sound: what was done since the last meeting has worked for all of them.
        notices: what is to be said to people.
        steps: what each of them has said of its steps; empty where nobody asks.
    """

    alive: tuple[int, ...]
    sound: bool = True
    notices: tuple[str, ...] = ()
    steps: tuple[int, ...] = field(default=(), compare=False)


class Come(NamedTuple):
    """What a rank says when it comes to a meeting.

    Attributes:
        number: of the meeting, the same on all ranks.
        what: its purpose, the same on all ranks.
        sound: what was done since the last meeting has worked here.
        steps: whatever else the host has to know.
    """

    number: int
    what: str
    sound: bool = True
    steps: int = 0


class Membership:
    """The ranks of a run.

    Args:
        expected: ranks that take part from the start, connected or not.
        limits: how long they are waited for.
        without: what is said of those that are left, with their number for ``{}``.

    Attributes:
        live: expected or connected, and neither gone nor left; all are waited for at meetings.
        connected: with a connection.
        awaited: of the expected ones, those that have not connected yet.
        last: number of the last meeting that was over; -1 before.
    """

    def __init__(self, expected: Iterable[int], limits: Limits | None = None, *, without: str = "") -> None:
        self.live = set(expected)
        self.connected: set[int] = set()
        self.awaited = set(self.live)
        self.last = -1
        self._limits, self._without = limits or Limits(), without
        self._begun_s = math.inf  # when the first one connected
        self._newest_s = math.inf  # when anybody was heard of
        self._signs = AwakeClock(self._limits.silence_s / _SIGNS)
        self._sign_s = self._meeting_s = 0.0  # of that clock: now; when the first one came to the meeting
        self._heard_s: dict[int, float] = {}  # of that clock
        self._come: dict[int, Come] = {}
        self._notices: dict[int, list[str]] = {}

    @property
    def finished(self) -> bool:
        """Whether there were ranks, and all have left or are gone; one that is late has still to hear how it went."""
        return math.isfinite(self._begun_s) and not self.connected & self.live and not self.awaited

    @property
    def deserted(self) -> bool:
        """Whether nobody is connected, and nobody will be of those who know that there is a run."""
        return not self.connected and not (self.awaited and math.isfinite(self._begun_s))

    # ---- who comes and goes -----------------------------------------------------------------------------------

    def joined(self, rank: int, now: float) -> None:
        """A rank connected."""
        self._begun_s = min(self._begun_s, now)
        self.live.add(rank)
        self.connected.add(rank)
        self.awaited.discard(rank)
        self.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """A rank gave a sign of life."""
        self._newest_s = now
        self._heard_s[rank] = self._sign_s = self._signs.at(now)

    def gone(self, rank: int, reason: str, *, what: str = "died") -> None:
        """A rank's connection ended, or nobody waits for it any more; the others learn it, unless it had left."""
        self.connected.discard(rank)
        self.awaited.discard(rank)
        self._notices.pop(rank, None)
        if rank in self.live:
            self.left(rank)
            self.notify(f"rank {rank} {what}{reason and f' ({reason})'}; {self._without.format(len(self.live))}")

    def left(self, rank: int) -> None:
        """A rank is done, or has failed and said so, or is gone."""
        self.live.discard(rank)
        self._come.pop(rank, None)

    def notify(self, text: str) -> None:
        """Has everybody told something with the next answer."""
        for rank in self.live:
            self._notices.setdefault(rank, []).append(text)

    def take_notices(self, rank: int) -> tuple[str, ...]:
        """Returns what a rank does not know yet."""
        return tuple(self._notices.pop(rank, ()))

    # ---- who is waited for ------------------------------------------------------------------------------------

    def overdue(self, now: float) -> dict[int, str]:
        """Returns who need not be waited for any longer, and why, in words."""
        limits, found = self._limits, dict[int, str]()
        if now >= self.overdue_s:
            words = f"it did not connect within {limits.connect_s:g} s: killed before, or a firewall"
            found |= dict.fromkeys(self.awaited, words)
        if self._come and self._sign_s - self._meeting_s >= limits.meeting_s:
            words = f"it did not come to where the others met, for {limits.meeting_s:g} s"
            found |= dict.fromkeys(self.missing & self.connected, words)
        words = f"no sign of life for {limits.silence_s:g} s: stopped, or its machine or network failed"
        return found | dict.fromkeys(self.silent(limits.silence_s) if self._come else (), words)

    @property
    def overdue_s(self) -> float:
        """When `overdue` is to be asked next [s]; inf: only an event can change anything."""
        return self._begun_s + self._limits.connect_s if self.awaited else math.inf

    def silent(self, for_s: float) -> set[int]:
        """Returns who has been silent for so long [s], of others' signs of life."""
        return {rank for rank in self.live & self.connected if self._sign_s - self._heard_s[rank] >= for_s}

    def all_silent(self, now: float) -> bool:
        """Whether nobody has given a sign of life for so long that it need not be waited for."""
        return now - self._newest_s >= self._limits.silence_s

    # ---- the meeting ------------------------------------------------------------------------------------------

    def come(self, rank: int, come: Come, now: float) -> None:
        """A rank has come to the meeting."""
        self.heard(rank, now)
        self._meeting_s = self._meeting_s if self._come else self._sign_s
        self._come[rank] = come

    @property
    def missing(self) -> set[int]:
        """Who is waited for, whether anybody has come or not."""
        return self.live - self._come.keys()

    @property
    def is_full(self) -> bool:
        """Whether all who live have come; of one that is silent that is not known, though it may have come."""
        return bool(self._come) and not self.missing and not self.silent(self._limits.silence_s / 2)

    def meet(self, *, apart: bool = False) -> tuple[Come, tuple[int, ...], bool] | None:
        """Ends the meeting if all have come, and the next one begins.

        Args:
            apart: they may meet for different reasons where one has lost contact: then all of them come again.

        Returns:
            Why they have met, who, ascending, and whether it has worked for all since the last one; None: not all
            have come.

        Raises:
            RunEndsError: they meet for different reasons.
        """
        if not self.is_full:
            return None
        come, self._come = self._come, {}
        (_, first), *_ = told = sorted(come.items())
        sound, numbers = all(one.sound for one in come.values()), len({one.number for one in come.values()})
        if numbers > 1 or ((sound or not apart) and len({one.what for one in come.values()}) > 1):
            reasons = {rank: one.what if numbers == 1 else f"{one.what} at meeting {one.number}" for rank, one in told}
            raise RunEndsError(
                f"ranks meet for different reasons: {reasons}. They have taken different ways through the program, e.g."
                " a condition that depends on the rank"
            )
        self.last = first.number
        return first, tuple(sorted(come)), sound
