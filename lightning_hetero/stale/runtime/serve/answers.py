"""What goes out of the server: published versions, and one answer to every request (layer T)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Assigned, Passed
from lightning_hetero.stale.decide.report import Counts, Measures
from lightning_hetero.stale.runtime.messages import measures_text
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.transport.base import Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.membership import Membership


class Answers:
    """Knows which worker waits for what, and fills in what every answer says.

    Args:
        listener: the transport's end.
        area: uint8 flat parameters and buffers, what is published.
        batch: its contributions may lie in a worker's slot until that is answered.
        coordinator: knows global step and version.
        members: have notices for workers.
        epochs: know the epoch's number, and what each global step did.
        counts: what is reported of them, and where held workers are counted.

    Attributes:
        failure: why the run cannot go on; None: it can.
        claims: workers that wait for work, with the claim and when it was made [s].
        paused: workers that wait for a sub-step to be applied, with its number.
    """

    def __init__(
        self, listener: Listener, area: Tensor, batch: OpenBatch, coordinator: Coordinator, members: Membership,
        epochs: AnnouncedEpochs, counts: Counts,
    ) -> None:  # fmt: skip
        self._listener, self._area, self._batch, self._coordinator = listener, area, batch, coordinator
        self._members, self._epochs, self._counts = members, epochs, counts
        self.failure: str | None = None
        self.claims: dict[int, tuple[Request, float]] = {}
        self.paused: dict[int, int] = {}
        self._unanswered: set[int] = set()
        self._wasted: set[int] = set()  # workers whose last push counts nothing, to be told with the answer

    def publish(self) -> None:
        """Lets workers see the present parameters."""
        self._listener.publish(self._coordinator.version, self._area)

    def asked(self, rank: int) -> None:
        """A request has come, which is to be answered some time."""
        self._unanswered.add(rank)

    def wasted(self, rank: int) -> None:
        """The push of a worker that is about to be answered counts nothing."""
        self._wasted.add(rank)

    def forget(self, rank: int) -> None:
        """A worker is gone, or has left: it waits for nothing."""
        self._unanswered.discard(rank)
        self._wasted.discard(rank)
        self.claims.pop(rank, None)
        self.paused.pop(rank, None)

    def fail(self, text: str) -> None:
        """Tells all who wait that the run cannot go on; the first reason stays."""
        self.failure = self.failure or text
        for rank in list(self._unanswered):
            self.answer(rank, Say.FAILED, text=self.failure)
        self.claims.clear()
        self.paused.clear()

    def measures_text(self) -> str:
        """Returns what was counted so far and is known now."""
        return measures_text(Measures.take(self._counts, self._coordinator))

    def passed(self, passed: Passed, now: float) -> None:
        """Answers a claim: the global step is over."""
        asked = self._claim_of(passed.rank, now)
        asks = asked.flags & PushFlag.MEASURES
        counted = {"flags": ReplyFlag.MEASURES, "text": self.measures_text()} if asks else {}
        words = self._epochs.words[asked.global_step :]
        self.answer(passed.rank, Say.PASSED, global_step=passed.global_step, numbers=words, **counted)

    def granted(self, granted: Assigned, now: float) -> None:
        """Answers a claim with work."""
        self._claim_of(granted.rank, now)
        self.answer(
            granted.rank, Say.ASSIGNED, global_step=granted.global_step, version=granted.base,
            assignment=granted.assignment,
            micro=granted.micro, numbers=[number for span in granted.spans for number in span],
            hint_start=granted.hint[0], hint_end=granted.hint[1],
            flags=self._coordinator.policy.threshold_for(len(self._members.live)) or 0,
        )  # fmt: skip

    def _claim_of(self, rank: int, now: float) -> Request:
        claim, at_s = self.claims.pop(rank)
        self._counts.held(rank, now - at_s)
        return claim

    def resume(self, ranks: Iterable[int]) -> None:
        """Lets workers go on whose sub-step was applied."""
        for rank in ranks:
            del self.paused[rank]
            self.answer(rank, Say.APPLIED, flags=ReplyFlag.CHANGED)

    def answer(self, rank: int, kind: Say, **said: Any) -> None:
        """Answers a worker.

        Args:
            said: fields of `Reply`. By default the place is the server's, and the text what the worker does not
                know yet.
        """
        self._unanswered.discard(rank)
        self._batch.settle(rank)  # the worker may write its slot from now on
        if kind in (Say.ASSIGNED, Say.PASSED) and rank in self._wasted:
            self._wasted.discard(rank)
            said["wasted"] = True
        if not said.get("text"):
            said["text"] = "\n".join(self._members.take_notices(rank))
        here = {
            "epoch": self._epochs.number, "global_step": self._coordinator.global_step,
            "version": self._coordinator.version,
        }  # fmt: skip
        self._listener.reply(rank, Reply(kind=kind, **{**here, **said}))
