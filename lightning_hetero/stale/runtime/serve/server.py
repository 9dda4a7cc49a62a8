"""The parameter server: parameters and optimizer state, and what happens to them (layer T).

    listener.events() -> ParameterServer.handle -> Membership, AnnouncedEpochs        who is there, what all agree on
                                                -> Pushes -> Coordinator -> effects -> OpenBatch   sums, optimizers,
                                                                            versions and answers out

The coordinator decides; this file takes events in and hands each to who knows about it. It has no clock (times are
passed in, except for measuring its own work) and no socket.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning_hetero.stale.decide.streams import Streams
from lightning_hetero.stale.runtime.messages import MetAtServer, failure_text, state_bytes
from lightning_hetero.stale.runtime.serve.open_batch import HalfUpdateError
from lightning_hetero.stale.runtime.serve.pushes import Pushes
from lightning_hetero.stale.runtime.serve.update import bits
from lightning_hetero.transport.base import Arrived, Ask, Gone, Happened, Joined, Request, Say
from lightning_hetero.transport.membership import Come, RunEndsError

_log = logging.getLogger(__name__)


class ParameterServer(Pushes):
    """Serves workers; see the module, and `Pushes` for what it is made of.

    Attributes:
        finished: all workers that were expected have come, and have left or are gone.
    """

    _meeting_due_s = math.inf  # when to see whether all have come [s]

    def abandoned(self, now: float) -> bool:
        """Whether it has no worker and need not wait for one, or all have been silent for too long.

        They get the reason, for the case that they wake.
        """
        workers = self._members
        if workers.deserted:
            return True
        if not workers.all_silent(now):
            return False
        for rank in sorted(workers.connected):
            self.listener.dismiss(
                rank,
                f"rank {rank} was left behind: rank 0 is gone, and no rank gave a sign of life for so long that the run"
                " has ended; start all ranks again, from the last checkpoint",
            )
        return True

    @property
    def finished(self) -> bool:
        return self._members.finished

    # ---- events -----------------------------------------------------------------------------------------------

    def handle(self, happened: Happened, now: float) -> None:
        """Takes in one event.

        Args:
            happened: from the listener.
            now: time [s], monotonic.
        """
        if not isinstance(happened, Gone):
            self._members.heard(happened.rank, now)
        if isinstance(happened, Arrived):
            self.stamp(happened.request.kind, happened.rank)
            self._request(happened.rank, happened.request, now)
        elif isinstance(happened, Joined):
            self._members.joined(happened.rank, now)
            if self.failure is None:
                self.carry_out(self.coordinator.joined(happened.rank, now), now)
        elif isinstance(happened, Gone):
            self._gone(happened, now)
        else:
            self._meeting_due_s = now  # of one that is silent all others may have waited for a sign

    def wake(self, now: float) -> None:
        """Does what is due by now."""
        for rank, reason in self._members.overdue(now).items():
            self._leave_behind(rank, reason, now)
        if self.failure is None:
            self.carry_out(self.coordinator.wake(now), now)
            self.settle()
            self._batch.settle()
            self._settle_meeting(now)

    def wake_s(self) -> float:
        """Returns when `wake` is due next [s]; inf: only an event can change anything."""
        due_s = self._members.overdue_s
        if self.failure is not None:
            return due_s
        return min(self.coordinator.wake_s(), due_s, self._meeting_due_s)

    @property
    def meets(self) -> bool:
        """Whether all who live have come to a meeting, which the next `wake` answers."""
        return self._meeting_due_s < math.inf and self._members.is_full

    def close(self) -> None:
        """Ends the server's threads; idempotent."""
        self._shards.close()

    def _gone(self, gone: Gone, now: float) -> None:
        rank = gone.rank
        self._miss_stream(rank, gone.reason)
        self._epochs.forget(rank)
        self._members.gone(rank, gone.reason)
        self._without(rank, now)

    def _leave_behind(self, rank: int, reason: str, now: float) -> None:
        """Nobody waits for a worker any more; should it live after all, it learns the reason."""
        self._miss_stream(rank, reason)
        self._members.gone(rank, reason, what="was left behind")
        self.listener.dismiss(rank, f"rank {rank} was left behind: {reason}. Start it again to have it join the others")
        self._gone(Gone(rank, reason), now)

    def _miss_stream(self, rank: int, reason: str) -> None:
        """A worker is gone that has not said goodbye: its own stream, if it has one, is nobody else's."""
        if self.coordinator.streams is not None and rank in self._members.live:
            self.fail(
                f"rank {rank} is gone{reason and f' ({reason})'}, and the samples that its own stream has left"
                " (stream='finite') are no other rank's: start all ranks again, from the last checkpoint"
            )

    def _without(self, rank: int, now: float) -> None:
        """The others go on without a worker."""
        self.forget(rank)
        if self.failure is None:
            self.carry_out(self.coordinator.lost(rank, now), now)
            self.settle()
            self._meeting_due_s = now

    def _request(self, rank: int, request: Request, now: float) -> None:
        kind = request.kind
        self._unanswered.add(rank)
        if kind is Ask.LEAVE:
            self.answer(rank, Say.DONE)
            self._members.left(rank)
            self._without(rank, now)
        elif kind is Ask.ABORT:
            self.answer(rank, Say.DONE)
            self._members.left(rank)
            self.fail(f"worker {rank} failed: {request.text}")
        elif self.failure is not None and kind is not Ask.STATE:  # a failed run may still be saved
            self.answer(rank, Say.FAILED, text=self.failure)
        else:
            try:
                self._serve(rank, request, now)
            except RunEndsError as error:
                self.fail(str(error))
            except HalfUpdateError as error:  # this server has nothing left that is worth saving
                self.fail(str(error))
                raise (error.__cause__ or error) from None
            except ValueError as error:
                self.fail(f"worker {rank} sent a {kind.name} that makes no sense: {error}")
            except Exception as error:  # the run ends; the server lives to tell everybody, and for a last checkpoint
                _log.exception("a message could not be handled")
                self.fail(
                    f"the parameter server could not handle a {kind.name} of worker {rank}:"
                    f" {type(error).__name__}: {error}"
                )

    def _serve(self, rank: int, request: Request, now: float) -> None:
        kind = request.kind
        if kind is Ask.EPOCH:
            self._begin(rank, request, now)
        elif kind is Ask.MEET:
            # Whoever meets computes nothing: it has left its batch, e.g. because a hook skips the rest of the epoch.
            self.carry_out(self.coordinator.give_back(rank, None, now), now)
            if request.global_step <= self._members.last:
                self._leave_behind(rank, "it came to a meeting that was over: the others took it for dead", now)
                return
            self._members.come(rank, Come(request.global_step, request.text, not request.flags, request.steps), now)
            self._meeting_due_s = now
        elif kind in (Ask.STATE, Ask.METRICS):
            try:
                self._tell(rank, request)
            except Exception as error:  # nothing has changed: it is the asker's alone
                words = f"the parameter server could not answer {kind.name}: {type(error).__name__}: {error}"
                self.answer(rank, Say.FAILED, text=failure_text(words, error))
        else:
            if request.epoch != self._epochs.number:
                raise ValueError(f"it is in epoch {request.epoch}, the server in {self._epochs.number}")
            if not 0 <= request.global_step <= self.coordinator.global_step:
                raise ValueError(f"it is in batch {request.global_step}, the server in {self.coordinator.global_step}")
            if request.numbers:
                read, through = request.numbers
                self.coordinator.told(rank, read, bool(through))
            serve = self.claim if kind is Ask.CLAIM else self.push
            serve(rank, request, now)

    def _tell(self, rank: int, request: Request) -> None:
        """Answers a question."""
        if request.kind is Ask.METRICS:
            alive = sorted(self._members.live)
            self.answer(rank, Say.DONE, numbers=alive, text=self.measures_text())
            return
        state = self.state()
        if request.numbers and request.numbers[0] != state["version"]:  # the version it has
            state["area"] = self.area
        self.listener.share_state(state_bytes(state))
        self.answer(rank, Say.STATE)

    # ---- epochs and meetings ----------------------------------------------------------------------------------

    def _begin(self, rank: int, request: Request, now: float) -> None:
        """Begins an epoch with the first worker that asks."""
        if (epoch := self._epochs.ask(rank, request)) is not None:
            streams = Streams(epoch.streams) if epoch.streams else None
            ends, spans = (epoch.ends, epoch.spans) if streams is None else (streams.ends, [(0, streams.used)])
            effects = self.coordinator.begin(
                request.epoch, ends, applied=spans, global_step=epoch.global_step, now=now, streams=streams
            )
            self.carry_out(effects, now)  # for those who are still held in the epoch before
            self._epochs.begin(request.epoch, epoch)
            self._batch.begin()
        hints = self.coordinator.hints(rank)
        self.answer(rank, Say.DONE, numbers=[number for span in hints for number in span])

    def _settle_meeting(self, now: float) -> None:
        """Answers the meeting if all have come; not before all that has happened is taken in, deaths above all."""
        if now < self._meeting_due_s:
            return
        self._meeting_due_s = math.inf
        try:
            if (met := self._members.meet()) is None:
                return
            why, alive, sound = met
            for o in bits(why.steps):  # they have met for a method that an optimizer has besides its step
                self._updater.call(o, why.what)
                self.publish()
        except RunEndsError as error:
            self.fail(str(error))
            return
        for rank in alive:
            text = MetAtServer.text(self.counts, self._members.take_notices(rank))
            self.answer(rank, Say.MET, global_step=why.number, numbers=alive, text=text, flags=not sound)

    # ---- state ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what a server needs to go on from here, besides the area."""
        return {
            "version": self.coordinator.version,
            "optimizers": self._updater.state_dicts(),
            "coordinator": self.coordinator.state_dict(),
        }
