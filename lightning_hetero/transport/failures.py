"""Why a run ends: the first rank that fails says so to all others, before they notice by themselves (layer T).

Whoever waits for another rank looks here at least once a second, and here first when a connection breaks. So everybody
ends with the cause, e.g. "rank 2 failed: OutOfMemoryError: ...", and not with its consequences.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta

from torch import distributed as dist

from lightning_hetero.transport.aside import Aside
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.run_store import RunStore, SignedStore, SilentError
from lightning_hetero.transport.sockets import FOREVER, first_line

_FIRST, _MET, _LEFT = "failures/first", "failures/met-", "failures/left-"
_POLL_S = 0.05
_LEAVE_S = 0.005  # how often who hosts the store looks whether all have left
_CHECK_S = 1.0  # how often a wait looks for failures elsewhere
_ASK_S = 2e-4  # how often a wait that asks does so


class RemoteTraceback(Exception):
    """Carries another rank's traceback, as text, as the ``__cause__`` of the error raised here."""


class FailureBoard:
    """What failed first, known to all ranks of a run, of whatever group. One thread per rank uses it.

    Args:
        store: of the run.
        rank: this process, global.
        patience_s: how long a rank that lost a peer waits for somebody to say why.

    Attributes:
        reported: whether this rank has said that it fails.
    """

    def __init__(self, store: RunStore, rank: int, *, patience_s: float = 3.0) -> None:
        self._store, self._rank = store, rank
        self._patience_s = patience_s
        self.reported = False

    def report(self, error: BaseException) -> None:
        """Says that this rank fails; only the first report of the run counts. Never raises because of the store."""
        if self.reported:
            return
        self.reported = True
        report = json.dumps(
            {
                "rank": self._rank,
                "cause": f"{type(error).__name__}: {error}",
                "trace": "".join(traceback.format_exception(error)),
            }
        )
        with contextlib.suppress(RuntimeError):  # the store's process is gone; so are the others' hopes
            self._store.ask(lambda store: store.first(_FIRST, report), self._patience_s)

    def check(self) -> None:
        """Raises RuntimeError if a rank has failed: names it and the cause, its traceback as ``__cause__``."""
        if (error := self._reported()) is not None:
            raise error

    def wait(self, work: dist.Work, *, polled: bool = False) -> None:
        """Waits for a collective, with a look here once a second.

        Args:
            work: of gloo; of any backend if it is ``polled``.
            polled: ask whether it is done, again and again. NCCL would end its communicator when a wait times out.

        Raises:
            RuntimeError: as `check`; or the collective failed and nobody says why.
        """
        if polled:
            self._poll(work)
            return
        while True:
            try:
                work.wait(timedelta(seconds=_CHECK_S))
                return
            except RuntimeError:
                self.check()  # whoever made it fail may have said why
                if work.is_completed():
                    work.wait()  # returns, if it was done just now, or raises what went wrong
                    return

    def wait_for_peer(self, work: dist.Work) -> None:
        """Waits for a send or a receive of gloo, however long the peer takes, with a look here once a second.

        When a wait for one of these times out, gloo closes all its connections. So a thread waits, without a timeout.

        Raises:
            RuntimeError: as `wait`.
        """
        aside = Aside(lambda: work.wait(FOREVER), "pipeline-wait")
        while not aside.ends_within(_CHECK_S):
            self.check()
        try:
            aside.result()
        except RuntimeError:
            self.check()
            raise

    def _poll(self, work: dist.Work) -> None:
        look_s = awake_s() + _CHECK_S
        while not work.is_completed():
            time.sleep(_ASK_S)
            if awake_s() >= look_s:
                self.check()
                look_s += _CHECK_S
        try:
            work.wait()  # of NCCL: for the stream, and raises what went wrong
        except RuntimeError:
            self.check()
            raise

    def lost(self, peer: int, how: str) -> RuntimeError:
        """Returns the error to raise when ``peer`` does not answer any more: its report, if one comes in time.

        Args:
            peer: global rank.
            how: it was noticed, e.g. "its connection is closed".
        """
        deadline_s = awake_s() + self._patience_s
        while (error := self._reported(self._patience_s)) is None:
            if awake_s() >= deadline_s:
                return RuntimeError(
                    f"rank {peer} is gone without a word ({how}): killed, out of memory, or cut off from the network;"
                    " look into its log"
                )
            time.sleep(_POLL_S)
        return error

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

    def leave(self, ranks: Iterable[int], *, patience_s: float = 5.0) -> None:
        """Called last by every rank; its process may end then. Never raises because of the store, and lets go of it.

        Who hosts the store waits for the others: a cause would go with it before they have read it.

        Args:
            ranks: that take part.
            patience_s: how long to wait for them at most; ranks that were killed never come.
        """
        deadline_s, left = awake_s() + patience_s, {*ranks} - {self._rank}

        def look(store: SignedStore) -> None:
            left.difference_update([rank for rank in left if store.has(f"{_LEFT}{rank}")])

        with contextlib.suppress(RuntimeError):
            self._store.ask(lambda store: store.set(f"{_LEFT}{self._rank}", "left"), patience_s)
            while self._store.hosts and left and awake_s() < deadline_s:
                self._store.ask(look, patience_s)
                time.sleep(_LEAVE_S)
        self._store.let_go()

    def _reported(self, answer_s: float | None = None) -> RuntimeError | None:
        try:
            told = self._store.ask(lambda store: store.get(_FIRST), answer_s)
        except SilentError as error:
            return error
        except RuntimeError as error:
            return RuntimeError(f"the run's store is gone, and with it the process that held it: {first_line(error)}")
        if told is None:
            return None
        report = json.loads(told)
        failed = RuntimeError(f"rank {report['rank']} failed: {report['cause']}")
        failed.__cause__ = RemoteTraceback(f"rank {report['rank']}:\n{report['trace']}")
        return failed
