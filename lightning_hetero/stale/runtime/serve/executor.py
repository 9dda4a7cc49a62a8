"""Carries out what the coordinator decided (layer T).

    Accepted            a slot is added to the pool
    Updated             the pool becomes an update, and is published
    Granted, Passed     a claim is answered
    Refused, Reissued   are counted
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Effect,
    Granted,
    Passed,
    Refused,
    Reissued,
    Updated,
)
from lightning_hetero.stale.decide.report.counts import Counts, Measures
from lightning_hetero.stale.runtime.messages import measures_text
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs, LiveWorkers
from lightning_hetero.stale.runtime.serve.manual_steps import ManualSteps
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.stale.runtime.serve.replies import Replies
from lightning_hetero.transport.base import Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag

__all__ = ["Executor", "Pushed"]


class Pushed(NamedTuple):
    """A push: the message, its gradients, and the version they were computed with."""

    request: Request
    slot: Tensor
    base: int


class Executor:
    """Keeps the claims that wait for an answer, which effects are about.

    Args:
        coordinator: whose effects they are.
        batch: the sums of gradients.
        manual_steps: end with the tick's update.
        replies: answers and publishes.
        epochs: keep what each tick did.
        live_workers: the workers that live.
        counts: where all is counted.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        batch: OpenBatch,
        manual_steps: ManualSteps,
        replies: Replies,
        epochs: AnnouncedEpochs,
        live_workers: LiveWorkers,
        counts: Counts,
    ) -> None:
        self._coordinator, self._batch, self._manual_steps = coordinator, batch, manual_steps
        self._replies, self._epochs = replies, epochs
        self._live_workers, self._counts = live_workers, counts
        self._claims: dict[int, tuple[Request, float]] = {}  # and when they were made [s]
        self._wasted: set[int] = set()  # workers whose last push counts nothing, to be told with the answer

    @property
    def claiming(self) -> KeysView[int]:
        """Workers whose claim is unanswered."""
        return self._claims.keys()

    def claimed(self, rank: int, claim: Request, now: float) -> None:
        """A worker claims work; some effect will answer it."""
        self._claims[rank] = (claim, now)

    def wasted(self, rank: int) -> None:
        """The push of a worker that is about to be answered counts nothing."""
        self._wasted.add(rank)

    def _told(self, rank: int) -> bool:
        """Returns whether a worker is to be told, now, that its push counts nothing."""
        wasted = rank in self._wasted
        self._wasted.discard(rank)
        return wasted

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._claims.pop(rank, None)
        self._wasted.discard(rank)

    def forget_claims(self) -> None:
        """The run has failed; all who claimed have been told."""
        self._claims.clear()

    def carry_out(self, effects: Sequence[Effect], now: float, pushed: Pushed | None = None) -> None:
        """Carries out what the coordinator decided.

        Args:
            effects: in order.
            now: time [s].
            pushed: what caused them, if a push did.
        """
        for effect in effects:
            if isinstance(effect, Granted):
                self._granted(effect, now)
            elif isinstance(effect, Passed):
                asked = self._answered(effect.rank, now)
                words = self._epochs.words(self._epochs.number)[asked.tick :]
                flags, text = self.measures_for(asked)
                self._replies.answer(
                    effect.rank, Say.PASSED, tick=effect.tick, numbers=words, flags=flags,
                    wasted=self._told(effect.rank), text=text,
                )  # fmt: skip
            elif isinstance(effect, Accepted):
                assert pushed is not None
                self._counts.accepted(effect.rank, effect.samples, effect.staleness, pushed.request.compute_s)
                self._batch.accept(effect, pushed.request, pushed.slot, pushed.base)
            elif isinstance(effect, Updated):
                if (word := self._batch.update(effect)) is not None:
                    self._epochs.tick_over(word)
                self._replies.publish()
                self._manual_steps.applied()
            elif isinstance(effect, Refused):
                self._counts.discarded[effect.reason] += effect.samples
                if effect.reason != "nonfinite":  # these samples are nobody else's
                    self.wasted(effect.rank)
            else:
                assert isinstance(effect, Reissued)
                self._counts.reissued[effect.reason] += effect.samples

    def measures_for(self, request: Request) -> tuple[int, str]:
        """Returns flags and text of an answer: what was counted, if the request asks for it."""
        if not request.flags & PushFlag.MEASURES:
            return 0, ""
        return int(ReplyFlag.MEASURES), self.measures_text()

    def measures_text(self) -> str:
        """Returns what was counted so far and is known now."""
        return measures_text(Measures.take(self._counts, self._coordinator))

    def _answered(self, rank: int, now: float) -> Request:
        """Takes the claim of a worker that is answered now."""
        claim, at_s = self._claims.pop(rank)
        self._counts.held(rank, now - at_s)
        return claim

    def _granted(self, granted: Granted, now: float) -> None:
        self._answered(granted.rank, now)
        self._replies.answer(
            granted.rank, Say.GRANT, tick=granted.tick, version=granted.base, lease=granted.lease, micro=granted.micro,
            numbers=[number for span in granted.spans for number in span], hint=granted.hint,
            flags=self._coordinator.policy.threshold_for(len(self._live_workers.live)) or 0,
            wasted=self._told(granted.rank),
        )  # fmt: skip
