"""Ranks meet in the run's store: who comes continues, silent ones are left out, all get the same answer (layer T).

    every rank     come/<meeting>/<rank>   here I am, for this purpose; what I did since the last meeting has worked
    the host       met/<meeting>           who is here, whether it has worked for all: written once, for everybody
                   out/<rank>              why the others go on without this rank
                   over                    they have finished
    other ranks    pulse/<rank>            a sign of life, from their own thread: a long batch is no death

The host is the rank in whose process the store is; it decides while it waits for the others. A rank without a sign of
life for `liveness_s` of its waiting is out, whatever has become of it; it learns that if it wakes. One whose process
has ended is out at once, see `lines`. Ranks that wait for the host notice in the same time if it is silent, and at once
if it has died.

What several ranks have to do together or not at all takes two meetings, one before and one behind it (`sound`).
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from lightning_hetero.transport.awake import BEAT_S, Aside, awake_s
from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError, ServerLostError
from lightning_hetero.transport.membership import Come, Limits, Membership, Met, RunEndsError
from lightning_hetero.transport.run_store import HostLines, RunStore, SignedStore, StoreAddress, guest_line

T = TypeVar("T")

_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.05
_SOON = 100  # first signs of life, quick ones until the host takes a line
_BEATS = 10  # signs of life within `liveness_s`, but one per second at least
_WITHOUT = "the others go on without it, {} ranks"


class RollCall(ABC):
    """One rank's end.

    Args:
        store: of the run.
        rank: its permanent number.
        ranks: all that take part, by number: since which meeting.
        liveness_s: silence after which a rank is out [s].
        met: meetings so far.
        check: raises if a rank has failed.

    Attributes:
        meetings: so far.
        steps: of this rank, in whatever unit; told to all where they meet.
    """

    def __init__(
        self, store: RunStore, rank: int, ranks: dict[int, int], *, liveness_s: float, met: int,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self.rank, self.meetings, self.steps = rank, met, 0
        self._store, self._check, self._check_s = store, check, 0.0
        self._ranks = dict(ranks)
        self._liveness_s = liveness_s
        self._beat_s = min(1.0, liveness_s / _BEATS)

    @property
    def address(self) -> StoreAddress | None:
        """Of the store; None: there is one rank, and no other one can come."""
        return self._store.address

    def alive(self) -> Collection[int]:
        """Returns who takes part."""
        return set(self._ranks)

    def expect(self, ranks: Collection[int]) -> None:
        """Ranks that come late, or again, take part from the next meeting on; said by all members."""
        self._ranks |= dict.fromkeys(ranks, self.meetings)

    def meet(self, what: str, *, sound: bool = True) -> Met:
        """Waits for all ranks that live; returns what everybody gets.

        Args:
            what: the purpose, the same on all ranks.
            sound: what was done since the last meeting has worked here.

        Raises:
            LeftBehindError: the others have gone on without this rank.
            RuntimeError: a rank has failed, ranks meet for different purposes, or too few are left.
            ServerLostError: the host has died, or is silent.
        """
        self.meetings += 1
        told = self._told(Come(self.meetings, what, sound, self.steps))
        if ended := told.get("ended"):
            raise RemoteFailureError(ended)
        alive = told["alive"]
        self._ranks = {rank: self._ranks[rank] for rank in alive}
        return Met(tuple(alive), told["sound"], tuple(told["notices"]), tuple(told["steps"]))

    def look(self) -> None:
        """Called at times by who waits for others elsewhere.

        Raises:
            RuntimeError: one of them is lost: look for new ones, or meet.
        """

    def _name(self, rank: int) -> str:
        """Of a process: who comes again is another one."""
        return f"{rank}.{self._ranks[rank]}"

    def _ask(self, question: Callable[[SignedStore], T]) -> T:
        """Returns the store's answer."""
        try:
            return self._store.ask(question, self._liveness_s)
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def _wait(self, pause_s: float) -> float:
        """Waits, looks at times whether a rank has failed, and returns how long to wait next [s]."""
        time.sleep(pause_s)
        if (now_s := awake_s()) > self._check_s:
            self._check_s = now_s + BEAT_S
            try:
                self._check()
            except RuntimeError as error:
                raise self._too_late() or error from None
        return min(_PAUSE_S, 2 * pause_s)

    def _too_late(self) -> Exception | None:
        """Returns what to raise if the others have finished without this rank."""

    def _lost(self, why: str) -> Exception:
        try:
            self._check()
        except RuntimeError as error:
            if error.__cause__ is not None:  # a rank's error, by which the host has ended, too
                return error
        return self._too_late() or ServerLostError(
            f"rank 0, without which the others cannot go on, has died or is cut off ({why}): resume from the last"
            " checkpoint"
        )

    @abstractmethod
    def _told(self, come: Come) -> dict[str, Any]:
        """Returns what the host has decided."""

    @abstractmethod
    def close(self, *, well: bool = False) -> None:
        """This rank takes part no longer; idempotent. ``well``: all have finished."""


class HostRollCall(RollCall):
    """The end that decides.

    Args:
        store: hosted by this process.
        rank, liveness_s, check: see `RollCall`.
        ranks: all that take part.
        patience_s: how long a rank that lives may let the others wait [s].
        least: ranks that must be left.
        asked_by: name of the argument that says so.
    """

    def __init__(
        self, store: RunStore, rank: int, ranks: Iterable[int], *, liveness_s: float, patience_s: float, least: int,
        check: Callable[[], None], asked_by: str = "min_clients",
    ) -> None:  # fmt: skip
        super().__init__(store, rank, dict.fromkeys(ranks, 0), liveness_s=liveness_s, met=0, check=check)
        limits = Limits(silence_s=liveness_s, meeting_s=patience_s)
        self._members, self._least, self._asked_by = Membership((), limits, without=_WITHOUT), least, asked_by
        self._looked_s = 0.0
        self._lines: HostLines | None = None
        if (address := store.address) is not None:
            with suppress(OSError, RuntimeError):  # then silence tells
                self._lines = self._ask(lambda signed: HostLines(address.host, signed))
        self._pulses: dict[str, str] = {}
        self._told_last = ""
        self._known: set[str] = set()  # all that there were
        self.expect(self._ranks)

    def expect(self, ranks: Collection[int]) -> None:
        super().expect(ranks)
        self._known |= {self._name(rank) for rank in ranks}
        for rank in ranks:
            self._members.joined(rank, awake_s())

    def _hear(self, store: SignedStore) -> None:
        """Hears who has given a sign of life."""
        for rank in self._members.live - {self.rank}:
            key = f"pulse/{self._name(rank)}"
            if (pulse := store.get(key)) is not None and pulse != self._pulses.get(key):
                self._pulses[key] = pulse
                self._members.heard(rank, awake_s())

    def _ended(self, store: SignedStore) -> dict[int, str]:
        """Returns whose process has ended, and why that is thought, in words."""
        live = {self._name(rank): rank for rank in self._members.live - {self.rank}}
        ended = [] if self._lines is None else self._lines.ended(store, live)
        return dict.fromkeys((live[name] for name in ended), "its connection has ended: killed, or out of memory")

    def look(self) -> None:
        lost, now_s, before_s = {*self._ask(self._ended)}, awake_s(), self._looked_s
        if now_s - before_s >= self._beat_s:
            self._looked_s, begins = now_s, now_s - before_s > 3 * self._beat_s  # a wait: silence counts from here on
            for rank in self._ranks if begins else (self.rank,):
                self._members.heard(rank, now_s)
            self._ask(self._hear)
            lost |= self._members.silent(self._liveness_s)
        if lost:
            raise RuntimeError(f"contact with rank {', '.join(map(str, sorted(lost)))} is lost")

    def _told(self, come: Come) -> dict[str, Any]:
        members, out, pause_s, pulse_s = self._members, dict[int, str](), _FIRST_PAUSE_S, 0.0
        for rank in self._ranks:  # silence counts from here on
            members.heard(rank, awake_s())
        members.come(self.rank, come, awake_s())
        steps = {self.rank: come.steps}

        def look(store: SignedStore) -> dict[int, str]:
            for rank in members.missing:
                if (said := store.get(f"come/{come.number}/{rank}")) is not None:
                    steps[rank] = (told := Come(*json.loads(said))).steps
                    members.come(rank, told, awake_s())
            if awake_s() >= pulse_s:
                if self._told_last:  # said again: strangers may write over it
                    store.set(f"met/{come.number - 1}", self._told_last)
                self._hear(store)
            return self._ended(store)

        while True:
            ended = self._ask(look)
            members.heard(self.rank, awake_s())
            if lost := members.overdue(awake_s()) | ended:
                self._check()  # a rank that has failed has said so before its connection ended
            for rank, why in lost.items():
                members.gone(rank, why, what="is left out")
                out[rank] = why
            if members.is_full:
                break
            pulse_s = pulse_s if awake_s() < pulse_s else awake_s() + self._beat_s
            pause_s = self._wait(pause_s)
        try:
            met = members.meet(apart=True)
            assert met is not None
            told: dict[str, Any] = {"alive": met[1], "sound": met[2], "steps": [steps[rank] for rank in met[1]]}
            told["notices"], *_ = [members.take_notices(rank) for rank in met[1]]
            if out and len(met[1]) < self._least:
                words = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(out.items()))
                told["ended"] = (
                    f"{len(met[1])} ranks are left, and {self._asked_by}={self._least} must be ({words}): resume from"
                    f" the last checkpoint, with fewer ranks if need be, or set {self._asked_by} lower"
                )
        except RunEndsError as error:
            told = {"ended": str(error)}

        def tell(store: SignedStore) -> None:
            for rank, why in out.items():
                store.set(f"out/{self._name(rank)}", why)
            store.set(f"met/{come.number}", json.dumps(told))
            # All who are here have read the meeting before, and who is not is told that he is out.
            for key in (*(f"come/{come.number}/{rank}" for rank in self._ranks), f"met/{come.number - 1}"):
                store.delete(key)

        self._ask(tell)
        self._told_last = json.dumps(told)
        return told

    def close(self, *, well: bool = False) -> None:
        if well:
            with suppress(RuntimeError):
                self._store.ask(lambda store: [store.say(f"over/{name}") for name in self._known])
        if self._lines is not None:
            self._lines.close()


class GuestRollCall(RollCall):
    """The end of a rank that comes to the host.

    Args:
        store, rank, ranks, liveness_s, met, check: see `RollCall`; ``ranks`` has this one.
        patience_s: how long the host may let this rank wait while it waits for another; itself, as long again [s].
    """

    def __init__(
        self, store: RunStore, rank: int, ranks: dict[int, int], *, liveness_s: float, patience_s: float,
        check: Callable[[], None], met: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(store, rank, ranks, liveness_s=liveness_s, met=met, check=check)
        self._patience_s = 2 * patience_s
        self._left, self._own_name = threading.Event(), self._name(rank)
        self._line: socket.socket | None = None
        threading.Thread(target=self._beat, name=f"pulse-{self._own_name}", daemon=True).start()
        # On a connection of its own: what comes there while this process is stopped is found when it wakes.
        own = RunStore.join(store.address, timedelta(seconds=max(10.0, liveness_s)))
        self._finished = Aside(lambda: own.wait(f"over/{self._own_name}"), f"roll-call-{self._own_name}")

    def _beat(self) -> None:
        with suppress(RuntimeError):  # who asks the store hears of it, too
            for sign in itertools.count():
                self._store.ask(lambda store, sign=sign: store.set(f"pulse/{self._own_name}", str(sign)))
                if self._line is None and self._store.address is not None:
                    with suppress(OSError):  # then silence tells
                        self._line = guest_line(self._store.address.host, self._own_name, self._store.ask)
                soon = self._line is None and sign < _SOON
                if self._left.wait(min(_PAUSE_S, self._beat_s) if soon else self._beat_s):
                    break

    def _told(self, come: Come) -> dict[str, Any]:
        def look(store: SignedStore) -> str | None:
            if (why := store.get(f"out/{self._own_name}")) is not None:
                raise LeftBehindError(
                    f"the others have gone on without rank {self.rank} ({why}): start it again, and it comes back in"
                )
            if (found := store.get(f"met/{come.number}")) is None:  # said again: strangers may write over it
                store.set(f"come/{come.number}/{self.rank}", json.dumps(come))
            return found

        end_s, pause_s = awake_s() + self._patience_s, _FIRST_PAUSE_S
        while (found := self._ask(look)) is None:
            if awake_s() > end_s:
                raise self._lost(f"it did not come to where the others met, for {self._patience_s:g} s")
            try:
                pause_s = self._wait(pause_s)
            except RuntimeError:  # of a rank that has read the verdict already
                with suppress(RuntimeError, ConnectionError):
                    found = self._ask(look)
                if found is None:
                    raise
                break
        return json.loads(found)

    def _too_late(self) -> Exception | None:
        with suppress(RuntimeError):
            if self._finished.ends_within(_PAUSE_S):
                self._finished.result()
                return LeftBehindError(
                    f"the others have finished training without rank {self.rank}, of which they had not heard for"
                    f" {self._liveness_s:g} s"
                )
        return None

    def close(self, *, well: bool = False) -> None:
        if not self._left.is_set():
            with suppress(RuntimeError):
                self._store.ask(lambda store: store.say(f"over/{self._own_name}"), self._liveness_s)
        self._left.set()
        if self._line is not None:
            self._line.close()
