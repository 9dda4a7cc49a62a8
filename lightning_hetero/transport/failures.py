"""Why a run ends: the first rank that fails says so to all others, and who says nothing is named (layer T).

A thread of each rank looks here once a second. So everybody ends with the cause, e.g. "rank 2 failed: OutOfMemoryError:
...", and not with its consequences. A rank that has lost contact with another one does not guess which: it calls, and
all that live answer, whatever they are doing. Who does not is gone.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch import distributed as dist

from lightning_hetero.transport.awake import Aside, awake_s, stopped_s
from lightning_hetero.transport.run_store import RunStore, SignedStore, SilentError
from lightning_hetero.transport.sockets import FOREVER, first_line

LOOK_S = 1.0  # from one look to the next
_NEWS, _FIRST, _STATE, _MET = (f"failures/{name}" for name in ("news", "first", "state-", "met-"))
_HERE, _HEARD, _LEFT = "here", "has read the first cause", "left"  # what a rank says of itself
_POLL_S = 0.05
_LEAVE_S = 0.005  # how often who hosts the store looks whether all have left
_ASK_S = 2e-4  # how often a wait that asks does so
_LOST = ("closed by peer", "connection reset", "connection refused", "broken pipe", "timed out", "pair closure")


class RemoteTraceback(Exception):
    """Carries another rank's traceback, as text, as the ``__cause__`` of the error raised here."""


def lost_contact(error: BaseException) -> bool:
    """Whether a collective, or a message, may have failed because of another rank."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(s in text for s in _LOST))


class FailureBoard:
    """What failed first, known to all ranks of a run, of whatever group.

    Args:
        store: of the run.
        rank: this process, global.
        ranks: returns those that take part.
        timeout_s: how long a collective may take.
        patience_s: how long a rank that lost contact waits for the others to answer.

    Attributes:
        reported: whether this rank has said that it fails.
    """

    def __init__(
        self, store: RunStore, rank: int, *, ranks: Callable[[], Iterable[int]] = tuple, timeout_s: float = 1800.0,
        patience_s: float = 3.0,
    ) -> None:  # fmt: skip
        self._store, self._rank, self._ranks = store, rank, ranks
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._state = ""  # that this rank has said last
        self._first: RuntimeError | None = None  # why the run ends
        self._unheard: RuntimeError | None = None  # what is known of the store's host, which does not answer
        self._own = False  # this rank was the first to fail
        self._host_left = False
        self._gone: set[int] = set()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._stopped_s = stopped_s()  # when the store answered last
        self.reported = False

    # ---- this rank fails --------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Says that this rank fails; only the first report of the run counts. Never raises because of the store.

        Where it has lost contact with another rank, that one is the cause.
        """
        if self.reported:
            return
        self.reported = True
        if not (lost_contact(error) and self.explain(first_line(error))):
            trace = "".join(traceback.format_exception(error))
            self._tell(f"rank {self._rank} failed: {type(error).__name__}: {error}", f"rank {self._rank}:\n{trace}")

    @property
    def cause(self) -> RuntimeError | None:
        """Why the run ends, as far as this rank knows; None: nothing is known, or it was the first to fail itself."""
        return None if self._own else self._known()

    def lost(self, peer: int, how: str) -> RuntimeError:
        """Returns the error to raise when ``peer`` does not answer any more.

        Args:
            peer: global rank.
            how: it was noticed, e.g. "its connection is closed".
        """
        said = f"rank {self._rank} gave up waiting for rank {peer}, which is still there: {how}"
        return self.explain(how, peer) or self._tell(said) or RuntimeError(said)

    def explain(self, how: str, peer: int | None = None) -> RuntimeError | None:
        """Calls all ranks; returns why contact was lost. Never raises because of the store.

        Args:
            how: it was noticed.
            peer: with whom, global rank; None: that is not known.

        Returns:
            The first cause, or who is gone without a word; None: all are there, and nobody has failed.
        """
        others = {*self._ranks(), *(() if peer is None else (peer,))} - {self._rank}
        said: dict[int, str | None] = dict.fromkeys(others)
        end_s = awake_s() + self._patience_s

        def call(store: SignedStore) -> None:
            store.set(_NEWS, "somebody has lost contact")

        def look(store: SignedStore) -> None:
            said.update({rank: store.get(f"{_STATE}{rank}") for rank in others})

        with contextlib.suppress(RuntimeError):
            self._store.ask(call, self._patience_s)
            while (error := self._look(self._patience_s)) is None and not all(said.values()) and awake_s() < end_s:
                time.sleep(_POLL_S)
                self._store.ask(look, self._patience_s)
            if error is not None:
                return error
            self._gone = {rank for rank in others if not said[rank]}
            if self._gone:
                return self._tell(_without_a_word(self._gone, how))
            if left := [rank for rank in others if said[rank] == _LEFT]:
                return self._tell(f"{_named(left)} has ended this run, and others have not ({how})")
            return None
        return self._look(self._patience_s)

    def _tell(self, cause: str, trace: str = "") -> RuntimeError | None:
        """Says why the run ends, unless somebody has; returns what holds."""

        def tell(store: SignedStore) -> str:
            first = store.first(_FIRST, json.dumps([self._rank, cause, trace]))
            store.set(_NEWS, "somebody has failed")
            store.set(f"{_STATE}{self._rank}", _HEARD)
            return first

        with contextlib.suppress(RuntimeError):  # the store's process is gone; so are the others' hopes
            self._take(self._store.ask(tell, self._patience_s))
        return self._first

    # ---- others fail ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Looks here once a second from now on, in a thread, until this rank leaves; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_look_on, args=(weakref.ref(self), self._over, min(LOOK_S, self._patience_s / 3)),
                name="failure-board", daemon=True,
            )  # fmt: skip
            self._thread.start()

    def check(self) -> None:
        """Raises RuntimeError if a rank has failed: names it and the cause, its traceback as ``__cause__``."""
        if (error := self._look()) is not None:
            raise error

    def _look(self, answer_s: float | None = None) -> RuntimeError | None:
        """Returns why the run ends, if it does; answers who has called."""

        def look(store: SignedStore) -> str | None:
            if not store.has(_NEWS):
                return None
            first, host = store.get(_FIRST), f"{_STATE}{self._store.rank}"
            self._host_left = store.get(host) == _LEFT
            if (state := _HERE if first is None else _HEARD) != self._state and not self._over.is_set():
                store.set(f"{_STATE}{self._rank}", state)
                self._state = state
            return first

        if self._first is None and self._unheard is None and not self._over.is_set():
            try:
                self._take(self._store.ask(look, answer_s))
                self._stopped_s = stopped_s()
            except SilentError as error:
                self._unheard = RuntimeError(f"rank {self._store.rank} does not answer: {error}")
            except RuntimeError as error:
                said = _without_a_word([self._store.rank], first_line(error))
                if self._host_left:
                    said = f"rank {self._store.rank} has ended this run, and others have not"
                elif (slept_s := stopped_s() - self._stopped_s) > self._patience_s:
                    said = f"rank {self._rank} was stopped for {slept_s:.0f} s, and the others have ended meanwhile"
                self._unheard = RuntimeError(said)
        return self._known()

    def _known(self) -> RuntimeError | None:
        """Returns what this rank knows; that the store's host is gone counts where the run cannot go on without it."""
        ranks = {*self._ranks()}
        return self._unheard if self._first is None and (not ranks or self._store.rank in ranks) else self._first

    def _take(self, record: str | None) -> None:
        if record is not None:
            rank, cause, trace = json.loads(record)
            first = RuntimeError(cause)
            first.__cause__ = RemoteTraceback(trace) if trace else None
            self._first, self._own = first, bool(trace) and rank == self._rank

    def wait(self, work: dist.Work, *, polled: bool = False) -> None:
        """Waits for a collective, with a look here once a second.

        Args:
            work: of gloo; of any backend if it is ``polled``.
            polled: ask whether it is done, again and again. NCCL would end its communicator when a wait times out.

        Raises:
            RuntimeError: as `check`; or the collective failed and nobody says why, or has not ended in time.
        """
        end_s = awake_s() + self._timeout_s
        if polled:
            self._poll(work, end_s)
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                self._look_while_waiting(end_s)  # whoever made it fail may have said why
                if work.is_completed():
                    work.wait()  # returns, if it was done just now, or raises what went wrong
                    return

    def wait_for_peer(self, work: dist.Work) -> None:
        """Waits for a send or a receive of gloo, however long the peer takes, with a look here once a second.

        When a wait for one of these times out, gloo closes all its connections. So a thread waits, without a timeout.

        Raises:
            RuntimeError: as `wait`.
        """
        aside, end_s = Aside(lambda: work.wait(FOREVER), "pipeline-wait"), awake_s() + self._timeout_s
        while not aside.ends_within(LOOK_S):
            self._look_while_waiting(end_s)
        try:
            aside.result()
        except RuntimeError:
            self.check()
            raise

    def _look_while_waiting(self, end_s: float) -> None:
        self.check()
        if awake_s() >= end_s:
            how = f"it has not come to where all meet for {self._timeout_s:g} s, the timeout"
            raise self.explain(how) or RuntimeError(f"all ranks are there, and one of them: {how}")

    def _poll(self, work: dist.Work, end_s: float) -> None:
        look_s = time.monotonic() + LOOK_S
        while not work.is_completed():
            time.sleep(_ASK_S)
            if time.monotonic() >= look_s:
                self._look_while_waiting(end_s)
                look_s += LOOK_S
        try:
            work.wait()  # of NCCL: for the stream, and raises what went wrong
        except RuntimeError:
            self.check()
            raise

    # ---- all come, all leave ----------------------------------------------------------------------------------

    def meet(
        self, note: str, world_size: int, patience_s: float, *, place: str = _MET, heed: bool = False
    ) -> list[str]:
        """Waits for all ranks to come to a place, once in a run; each leaves a note.

        Args:
            note: of this rank, not empty.
            world_size: ranks of the run.
            patience_s: how long to wait for them.
            place: its name; by default where ranks come after a failure.
            heed: raise if a rank has failed.

        Returns:
            The notes by rank; empty ones of ranks that have not come in time.

        Raises:
            RuntimeError: as `check`, if that is heeded.
        """
        notes = [""] * world_size
        deadline_s, poll_s = awake_s() + patience_s, _ASK_S

        def look(store: SignedStore) -> None:
            for rank in range(world_size):
                notes[rank] = notes[rank] or store.get(f"{place}{rank}") or ""

        try:
            self._store.ask(lambda store: store.set(f"{place}{self._rank}", note), patience_s)
            while not all(notes):
                self._store.ask(look, patience_s)
                if awake_s() >= deadline_s:
                    break
                if not all(notes):
                    if heed:
                        self.check()
                    time.sleep(poll_s)
                    poll_s = min(2 * poll_s, _POLL_S)
        except RuntimeError:  # the store is gone, and with it the rank that held it
            if heed:
                raise
        return notes

    def forget(self, place: str) -> None:
        """Takes this rank's note away, when all have read it."""
        self._store.ask(lambda store: store.delete(f"{place}{self._rank}"), self._patience_s)

    def leave(self, *, patience_s: float = 5.0) -> None:
        """Called last by every rank; its process may end then. Never raises because of the store, and lets go of it.

        Who hosts the store waits for the others: a cause would go with it before they have read it.

        Args:
            patience_s: how long to wait for them at most; ranks that were killed never come.
        """
        self._over.set()
        left, deadline_s = {*self._ranks()} - {self._rank} - self._gone, awake_s() + patience_s

        def leave(store: SignedStore) -> None:
            store.set(f"{_STATE}{self._rank}", _LEFT)
            if self._store.hosts:
                store.set(_NEWS, "the host leaves")

        def look(store: SignedStore) -> None:
            enough = (_HEARD, _LEFT) if store.has(_FIRST) else (_LEFT,)
            left.difference_update([rank for rank in left if store.get(f"{_STATE}{rank}") in enough])

        with contextlib.suppress(RuntimeError):
            self._store.ask(leave, patience_s)
            while self._store.hosts and left and awake_s() < deadline_s:
                self._store.ask(look, patience_s)
                time.sleep(_LEAVE_S)
        self._store.let_go()
        if self._thread is not None:
            self._thread.join(LOOK_S)  # longer only if it asks a store that does not answer


def _look_on(board_ref: weakref.ref[FailureBoard], over: threading.Event, every_s: float) -> None:
    """The thread; ends with the board, too, if nobody has left it."""
    while not over.wait(every_s) and (board := board_ref()) is not None:
        board._look()
        del board


def _named(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def _without_a_word(ranks: Iterable[int], how: str) -> str:
    return (
        f"{_named(ranks)} is gone without a word ({how}): killed, out of memory, stopped, or cut off from the network;"
        " look into its log"
    )
