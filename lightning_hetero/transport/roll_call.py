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

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from lightning_hetero.transport.base import LeftBehindError, RemoteFailureError, ServerLostError

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
        said: what the host had to say, plain.
    """

    present: tuple[int, ...]
    sound: bool
    lost: tuple[tuple[int, str], ...]
    said: Any


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

    def meet(self, what: str, *, sound: bool = True, said: Any = None) -> Roll:
        """Waits for all ranks that live; returns what everybody is told.

        Args:
            what: the purpose, the same on all ranks.
            sound: what was done since the last meeting has worked here.
            said: of the host: told to all.

        Raises:
            LeftBehindError: the others have gone on without this rank.
            RemoteFailureError: a rank has failed, ranks meet for different purposes, or too few are left.
            ServerLostError: the host has died, or is silent.
        """
        self.meetings += 1
        self._over = True  # unless this is answered
        told = self._told(what, sound, said)
        if ended := told.get("ended"):
            raise RemoteFailureError(ended)
        for rank, why in told["lost"]:
            if rank == self.rank:
                raise LeftBehindError(_left_behind(rank, why))
            self._ranks.pop(rank, None)
        self._over = False
        lost = tuple((rank, why) for rank, why in told["lost"])
        return Roll(tuple(told["present"]), told["sound"], lost, told["said"])

    def fail(self, text: str) -> None:
        """This rank has failed: tells the others, as far as they can be reached; not what it was told itself."""
        if not self._over:
            self._fail(text)

    def _name(self, rank: int) -> str:
        """Of a process: who comes again is another one."""
        return f"{rank}.{self._ranks[rank]}"

    @abstractmethod
    def _told(self, what: str, sound: bool, said: Any) -> dict[str, Any]:
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

    def _told(self, what: str, sound: bool, said: Any) -> dict[str, Any]:
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
            told = {"present": sorted(come), "sound": everything, "lost": sorted(lost.items()), "said": said}
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
        self._thread: _Caller | None = _Caller(store, rank, self._name(rank), self._beat_s)

    def _told(self, what: str, sound: bool, said: Any) -> dict[str, Any]:
        assert self._thread is not None
        text = json.dumps({"what": what, "sound": sound})
        return self._thread.ask(self.meetings, text, self._liveness_s, self._patience_s)

    def _fail(self, text: str) -> None:
        if self._thread is not None:
            self._thread.fail(text)

    def close(self, *, bye: bool = True) -> None:
        """Lets go of the store; without ``bye`` as a process that was killed does."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end(self._beat_s, bye=bye)


class _Caller(threading.Thread):
    """All that a guest says to the store: a host that is stopped would hold whoever speaks to it.

    Args:
        store: the host's.
        rank: this one.
        name: of this process.
        beat_s: time between two signs of life [s].
    """

    def __init__(self, store: Store, rank: int, name: str, beat_s: float) -> None:
        super().__init__(name=f"roll-call-{rank}", daemon=True)
        self._store: Store | None = store
        self._rank, self._key, self._beat_s = rank, name, beat_s
        self._condition = threading.Condition()
        self._errands, self._looks_for = list[tuple[str, str]](), 0  # to be written; meeting
        self._told: dict[str, Any] | None = None
        self._error: Exception | None = None
        self._ended = ""  # why, if the run has
        self._heard = 0  # answers of the store
        self._over = False
        self.start()

    def ask(self, number: int, text: str, liveness_s: float, patience_s: float) -> dict[str, Any]:
        """Comes to a meeting and returns what is told there."""
        with self._condition:
            self._errands.append((f"come/{number}/{self._rank}", text))
            self._told, self._looks_for = None, number
            self._condition.notify_all()
            self._wait_for(lambda: self._told is not None, liveness_s, patience_s)
            assert self._told is not None
            return self._told

    def fail(self, text: str) -> None:
        with self._condition:
            self._errands.append(("failed", text))
            self._condition.notify_all()
            with suppress(ServerLostError, RemoteFailureError):
                self._wait_for(lambda: not self._errands, _GOODBYE_S)

    def end(self, limit_s: float, *, bye: bool = True) -> None:
        """Ends the thread; one that the host holds is left to itself."""
        with self._condition:
            if bye:
                self._errands.append((f"bye/{self._key}", ""))
            self._over = True
            self._condition.notify_all()
        self.join(limit_s)

    def _wait_for(self, happened: Callable[[], bool], limit_s: float, patience_s: float = math.inf) -> None:
        heard, silent_s, waited_s, last_s = self._heard, 0.0, 0.0, time.monotonic()
        while not happened():
            if self._error is not None:
                raise self._lost(str(self._error)) from self._error
            self._condition.wait(self._beat_s)
            now_s = time.monotonic()
            passed_s, last_s = min(now_s - last_s, 2 * self._beat_s), now_s
            heard, silent_s = self._heard, 0.0 if self._heard != heard else silent_s + passed_s
            waited_s += passed_s
            if silent_s > limit_s:
                raise self._lost(f"no sign of life for {limit_s:g} s")
            if waited_s > patience_s:
                raise self._lost(f"it did not come to where the others met, for {patience_s:g} s")

    def _lost(self, why: str) -> Exception:
        if self._ended:
            return RemoteFailureError(self._ended)
        if isinstance(self._error, LeftBehindError):
            return self._error
        return ServerLostError(
            f"rank 0, without which the others cannot go on, has died or is cut off ({why}): resume from the last"
            " checkpoint"
        )

    def run(self) -> None:
        pause_s, signs, next_s = _FIRST_PAUSE_S, 0, 0.0
        try:
            while True:
                now_s = time.monotonic()
                if now_s >= next_s:
                    signs, next_s = signs + 1, now_s + self._beat_s
                    self._say(f"pulse/{self._key}", str(signs))
                    self._look("failed")
                with self._condition:
                    errands, self._errands = self._errands[:], []
                for key, value in errands:
                    self._say(key, value)
                    pause_s = _FIRST_PAUSE_S
                with self._condition:
                    if self._over and not self._errands:
                        return
                    number = self._looks_for
                if number:
                    self._look(f"met/{number}", number)
                    self._look(f"out/{self._key}")
                with self._condition:
                    if not self._errands and not self._over:
                        self._condition.wait(pause_s if self._looks_for else self._beat_s)
                pause_s = min(_PAUSE_S, 2 * pause_s)
        except Exception as error:
            if self._ended:  # nobody has to wait until this rank comes to a meeting, and hears of it
                with suppress(RuntimeError):
                    self._say(f"bye/{self._key}", "")
            with self._condition:
                self._error = error
                self._condition.notify_all()
        finally:
            self._store = None

    def _say(self, key: str, value: str) -> None:
        assert self._store is not None
        self._store.set(key, value)
        with self._condition:
            self._heard += 1
            self._condition.notify_all()

    def _look(self, key: str, number: int = 0) -> None:
        """Takes what stands there, if anything does."""
        store = self._store
        assert store is not None
        found = store.get(key).decode() if store.check([key]) else None
        with self._condition:
            self._heard += 1
            if found is None:
                return
            if number:
                self._told, self._looks_for = json.loads(found), 0
            elif key == "failed":
                self._ended = found
            elif self._looks_for:  # and not told otherwise
                raise LeftBehindError(_left_behind(self._rank, found))
            if self._ended and not number:
                raise RemoteFailureError(found)
            self._condition.notify_all()


def _left_behind(rank: int, why: str) -> str:
    return f"the others have gone on without rank {rank} ({why}): start it again, and it comes back in"
