"""Ranks meet in a store: who has come goes on, who is silent is left out, and all are told the same (layer T).

    every rank     come/<meeting>/<rank>   here I am, for this purpose; what I did since the last meeting has worked
    the host       met/<meeting>           who is here, whether it has worked for all: written once, for everybody
    other ranks    pulse/<rank>            a sign of life, from a thread of their own: a long batch is no death

The host is rank 0: the store is in its process, and it decides while it waits for the others. A rank without a sign of
life for `liveness_s` of its waiting is out, whatever has become of it; should it wake, it is told. Ranks that wait for
the host notice in the same time if it is silent, and at once if it has died.

What several ranks have to do together or not at all takes two meetings, one before and one behind it (`sound`).
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore

from lightning_hetero.transport.aside import Aside
from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError, ServerLostError

T = TypeVar("T")

_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.05
_BEATS = 10  # signs of life within `liveness_s`, but one per second at least
_GOODBYE_S = 3.0  # for the others to have read how the run has ended


@dataclass(frozen=True, slots=True)
class Roll:
    """What all were told at a meeting.

    Attributes:
        present: ranks that have come, ascending.
        sound: whether all of them have said so.
        lost: (rank, why) of those that were left out now.
    """

    present: tuple[int, ...]
    sound: bool
    lost: tuple[tuple[int, str], ...]


class RollCall(ABC):
    """One rank's end.

    Args:
        rank: its permanent number.
        ranks: all that take part, by number: since which meeting.
        liveness_s: silence after which a rank is out [s].
        met: meetings so far.

    Attributes:
        meetings: so far.
    """

    def __init__(self, rank: int, ranks: dict[int, int], *, liveness_s: float, met: int) -> None:
        self.rank, self.meetings = rank, met
        self._ranks = dict(ranks)
        self._over = False  # the run has ended for this rank
        self._liveness_s = liveness_s
        self._beat_s = min(1.0, liveness_s / _BEATS)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who takes part, ascending."""
        return tuple(sorted(self._ranks))

    def expect(self, rank: int) -> None:
        """A rank that comes late, or again, takes part from the next meeting on; said by all members alike."""
        self._ranks[rank] = self.meetings

    def meet(self, what: str, *, sound: bool = True) -> Roll:
        """Waits for all ranks that live; returns what everybody is told.

        Args:
            what: the purpose, the same on all ranks.
            sound: what was done since the last meeting has worked here.

        Raises:
            LeftBehindError: the others have gone on without this rank.
            RemoteFailureError: a rank has failed, ranks meet for different purposes, or too few are left.
            ServerLostError: the host has died, or is silent.
        """
        self.meetings += 1
        self._over = True  # unless this is answered
        told = self._told(what, sound)
        if ended := told.get("ended"):
            raise RemoteFailureError(ended)
        for rank, why in told["lost"]:
            if rank == self.rank:
                raise LeftBehindError(_left_behind(rank, why))
            self._ranks.pop(rank, None)
        self._over = False
        lost = tuple((rank, why) for rank, why in told["lost"])
        return Roll(tuple(told["present"]), told["sound"], lost)

    def fail(self, text: str) -> None:
        """This rank has failed: tells the others, as far as they can be reached; not what it was told itself."""
        if not self._over:
            self._fail(text)

    def _name(self, rank: int) -> str:
        """Of a process: who comes again is another one."""
        return f"{rank}.{self._ranks[rank]}"

    @abstractmethod
    def _told(self, what: str, sound: bool) -> dict[str, Any]:
        """Returns what the host has decided."""

    @abstractmethod
    def _fail(self, text: str) -> None:
        """Tells the others."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the store; idempotent."""


class HostRollCall(RollCall):
    """The end that decides.

    Args:
        store: hosted by this process.
        rank, ranks, liveness_s: see `RollCall`.
        patience_s: how long a rank that lives may let the others wait [s].
        least: ranks that must be left.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Iterable[int], *, liveness_s: float, patience_s: float, least: int
    ) -> None:
        super().__init__(rank, dict.fromkeys(ranks, 0), liveness_s=liveness_s, met=0)
        self._store: Store | None = store
        self._patience_s, self._least = patience_s, least
        self._heard: dict[str, bytes] = {}

    def _told(self, what: str, sound: bool) -> dict[str, Any]:
        store, number = self._store, self.meetings
        assert store is not None
        come: dict[int, dict[str, Any]] = {self.rank: {"what": what, "sound": sound}}
        lost = dict(self._missing(store, number, come))
        others = {rank: one["what"] for rank, one in sorted(come.items())}
        if store.check(["failed"]):
            told: dict[str, Any] = {"ended": store.get("failed").decode()}
        elif len(set(others.values())) > 1:
            told = {
                "ended": f"ranks meet for different reasons: {others}. They have taken different ways through the"
                " program, e.g. a condition that depends on the rank"
            }
        elif lost and len(come) < self._least:
            words = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(lost.items()))
            told = {
                "ended": f"{len(come)} ranks are left, and min_clients={self._least} must be ({words}): resume from the"
                " last checkpoint, with fewer ranks if need be, or set min_clients lower"
            }
        else:
            everything = all(one["sound"] for one in come.values())
            told = {"present": sorted(come), "sound": everything, "lost": sorted(lost.items())}
        for rank, why in lost.items():
            store.set(f"out/{self._name(rank)}", why)
            del self._ranks[rank]
        store.set(f"met/{number}", json.dumps(told))
        # All who are here have read the meeting before, and who is not is told that he is out.
        for key in (*(f"come/{number}/{rank}" for rank in come if rank != self.rank), f"met/{number - 1}"):
            store.delete_key(key)
        return told

    def _missing(self, store: Store, number: int, come: dict[int, dict[str, Any]]) -> Iterator[tuple[int, str]]:
        """Waits for the others, who are added to ``come``; yields who is out, and why."""
        missing = {rank: 0.0 for rank in self._ranks if rank not in come}  # silent so long [s]
        waited_s, pause_s, last_s = 0.0, _FIRST_PAUSE_S, time.monotonic()
        while missing and not store.check(["failed"]):
            now_s = time.monotonic()
            # Not more than a few beats at a time: if this process was stopped, so perhaps was the whole job.
            passed_s, last_s = min(now_s - last_s, 2 * self._beat_s), now_s
            waited_s += passed_s
            for rank in list(missing):
                if store.check([f"come/{number}/{rank}"]):
                    come[rank] = json.loads(store.get(f"come/{number}/{rank}"))
                    del missing[rank]
                    continue
                missing[rank] = 0.0 if self._gave_a_sign(store, rank) else missing[rank] + passed_s
                why = ""
                if missing[rank] > self._liveness_s:
                    why = f"no sign of life for {self._liveness_s:g} s: it died, or its machine or network failed"
                elif waited_s > self._patience_s:
                    why = f"it did not come to where the others met, for {self._patience_s:g} s"
                if why:
                    del missing[rank]
                    yield rank, why
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S, 2 * pause_s)

    def _gave_a_sign(self, store: Store, rank: int) -> bool:
        key = f"pulse/{self._name(rank)}"
        heard = store.get(key) if store.check([key]) else b""
        if self._heard.get(key, b"") == heard:
            return False
        self._heard[key] = heard
        return True

    def _fail(self, text: str) -> None:
        if self._store is not None:
            self._store.set("failed", text)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        left, deadline_s = [rank for rank in self._ranks if rank != self.rank], time.monotonic() + _GOODBYE_S
        while left and time.monotonic() < deadline_s:  # the store ends with this process
            left = [rank for rank in left if not store.check([f"bye/{self._name(rank)}"])]
            time.sleep(_PAUSE_S if left else 0.0)


class GuestRollCall(RollCall):
    """The end of a rank that comes to the host.

    Whatever it asks the store is asked from a thread: a host that is stopped would hold this one.

    Args:
        host, port: of the host's store.
        rank, ranks, liveness_s, met: see `RollCall`; ``ranks`` has this one.
        patience_s: how long the host may let this rank wait while it waits for another; itself, as long again [s].
    """

    def __init__(
        self, host: str, port: int, rank: int, ranks: dict[int, int], *, liveness_s: float, patience_s: float,
        met: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(rank, ranks, liveness_s=liveness_s, met=met)
        self._patience_s = 2 * patience_s
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(10.0, liveness_s)))
        self._store: Store | None = store
        self._pulse = _Pulse(store, self._name(rank), self._beat_s)

    def _told(self, what: str, sound: bool) -> dict[str, Any]:
        number, come = self.meetings, json.dumps({"what": what, "sound": sound})
        self._ask(lambda store: store.set(f"come/{number}/{self.rank}", come))
        end_s, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            key, found = self._ask(self._look)
            if key == "met":
                return json.loads(found)
            if key == "failed":
                raise RemoteFailureError(found)
            if key == "out":
                raise LeftBehindError(_left_behind(self.rank, found))
            if time.monotonic() > end_s:
                raise self._lost(f"it did not come to where the others met, for {self._patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S, 2 * pause_s)

    def _look(self, store: Store) -> tuple[str, str]:
        """Returns what there is to be read, the more important first, and its kind; empty if there is nothing."""
        for key in (f"met/{self.meetings}", "failed", f"out/{self._name(self.rank)}"):
            if store.check([key]):
                return key.partition("/")[0], store.get(key).decode()
        return "", ""

    def _ask(self, question: Callable[[Store], T]) -> T:
        """Returns the store's answer; raises ServerLostError if it has none, or is silent."""
        if (store := self._store) is None:
            raise ServerLostError("this rank has left")
        aside = Aside(lambda: question(store), f"roll-call-{self.rank}")
        # In turns: if this process was stopped, so perhaps was the whole job.
        for _ in range(math.ceil(self._liveness_s / self._beat_s)):
            if aside.ends_within(self._beat_s):
                try:
                    return aside.result()
                except RuntimeError as error:
                    raise self._lost(str(error)) from error
        raise self._lost(f"no sign of life for {self._liveness_s:g} s")

    def _lost(self, why: str) -> Exception:
        if self._pulse.ended:
            return RemoteFailureError(self._pulse.ended)
        return ServerLostError(
            f"rank 0, without which the others cannot go on, has died or is cut off ({why}): resume from the last"
            " checkpoint"
        )

    def _fail(self, text: str) -> None:
        self._leave(lambda store: store.set("failed", text))

    def close(self) -> None:
        self._leave(lambda store: store.set(f"bye/{self._name(self.rank)}", ""))
        self.vanish()

    def vanish(self) -> None:
        """Lets go of the store without a word, as a process does that was killed; idempotent."""
        self._pulse.over.set()
        self._store = None

    def _leave(self, last: Callable[[Store], object]) -> None:
        with suppress(ServerLostError, RemoteFailureError):
            self._ask(last)


class _Pulse(threading.Thread):
    """Gives signs of life, and notices that the run has ended: no other rank waits for this one then.

    Args:
        store: the host's.
        name: of this process, see `RollCall`.
        beat_s: time between two signs of life [s].

    Attributes:
        over: set to end it.
        ended: why the run has ended; empty if it has not.
    """

    def __init__(self, store: Store, name: str, beat_s: float) -> None:
        super().__init__(name=f"pulse-{name}", daemon=True)
        self._store, self._key, self._beat_s = store, name, beat_s
        self.over, self.ended = threading.Event(), ""
        self.start()

    def run(self) -> None:
        with suppress(RuntimeError):  # who asks the store hears of it, too
            for sign in itertools.count(1):
                self._store.set(f"pulse/{self._key}", str(sign))
                if self._store.check(["failed"]):
                    self.ended = self._store.get("failed").decode()
                    self._store.set(f"bye/{self._key}", "")
                    break
                if self.over.wait(self._beat_s):
                    break
        del self._store


def _left_behind(rank: int, why: str) -> str:
    return f"the others have gone on without rank {rank} ({why}): start it again, and it comes back in"
