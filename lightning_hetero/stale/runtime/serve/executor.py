"""Carries out what the coordinator decided, and says when pushes inside a batch become an update (layer T).

    Accepted            a slot is added to the pool
    Updated             the pool becomes an update, and is published
    Assigned, Passed     a claim is answered
    Refused, Reissued   are counted

In manual optimization a batch pushes several times; all but the last (`PushFlag.FINAL`) are *sub-steps*. Sub-step k of
a tick has a pool of its own, applied when the tick's samples, or all live workers, are in it, and at the latest with
the tick's update. Who pushed waits for that as long as the policy waits for anybody (a barrier: until it is applied; a
grace: so long, but until it is applied if further steps of the batch follow, which build on it; asynchronous policies
apply every push at once). What comes after its sub-step was applied counts in the
next tick's; where that would exceed the bound, or there is no next tick, it is applied at once, worth its samples.

Each sub-step counts once for a sample, also if its worker's last push is refused and the sample is issued again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Assigned,
    Effect,
    Passed,
    Refused,
    Reissued,
    Updated,
)
from lightning_hetero.stale.decide.policy import Asynchronous
from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs
from lightning_hetero.stale.runtime.serve.answers import Answers
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.transport.base import Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag


class Pushed(NamedTuple):
    """A push: the message, its gradients, and the version they were computed with."""

    request: Request
    slot: Tensor
    base: int


class Executor:
    """See the module; what it knows is in these.

    Args:
        coordinator: whose decisions they are.
        batch: the sums of gradients.
        answers: which workers wait for what.
        epochs: keep what each tick did.
        counts: where all is counted.
    """

    def __init__(
        self, coordinator: Coordinator, batch: OpenBatch, answers: Answers, epochs: AnnouncedEpochs, counts: Counts
    ) -> None:
        self._coordinator, self._batch, self._answers = coordinator, batch, answers
        self._epochs, self._counts = epochs, counts

    def carry_out(self, effects: Sequence[Effect], now: float, pushed: Pushed | None = None) -> None:
        """Carries out what the coordinator decided.

        Args:
            effects: in order.
            now: time [s].
            pushed: what caused them, if a push did.
        """
        answers, counts = self._answers, self._counts
        for effect in effects:
            if isinstance(effect, Assigned):
                answers.granted(effect, now)
            elif isinstance(effect, Passed):
                answers.passed(effect, now)
            elif isinstance(effect, Accepted):
                assert pushed is not None
                counts.accepted(effect.rank, effect.samples, effect.staleness, pushed.request.compute_s)
                self._batch.accept(effect, pushed.request, pushed.slot, pushed.base)
            elif isinstance(effect, Updated):
                if (word := self._batch.update(effect)) is not None:
                    self._epochs.tick_over(word)
                answers.publish()
                answers.resume(list(answers.paused), ReplyFlag.CHANGED)  # all that was left of sub-steps was applied
            elif isinstance(effect, Refused):
                counts.discarded[effect.reason] += effect.samples
                if effect.reason != "nonfinite":  # these samples are nobody else's
                    answers.wasted(effect.rank)
            else:
                assert isinstance(effect, Reissued)
                counts.reissued[effect.reason] += effect.samples

    # ---- sub-steps --------------------------------------------------------------------------------------------

    def push_substep(
        self, rank: int, pushed: Pushed, now: float, *, granted_s: float, finite: bool, counts: bool
    ) -> None:
        """Takes in a push inside a batch.

        Args:
            rank: its worker.
            pushed: what it says.
            now: time [s].
            granted_s: when its samples were granted [s].
            finite: False: its samples count, its gradients do not.
            counts: False: the sub-step counts for these samples already, see `Coordinator.substep`.
        """
        policy, batch, answers = self._coordinator.policy, self._batch, self._answers
        push, slot, base = pushed
        batch.add_substep(rank, push, slot, base, finite=finite, counts=counts)
        if counts and (isinstance(policy, Asynchronous) or not batch.may_wait(push.substep, base)):
            batch.apply_at_once(push)
            answers.publish()
            answers.answer(rank, Say.APPLIED, flags=ReplyFlag.CHANGED)
        elif batch.is_open(push):
            patience_s = policy.grace * (self._coordinator.step_s or now - granted_s)
            if policy.holds == "barrier" or (policy.holds == "grace" and push.flags & PushFlag.MORE):
                patience_s = math.inf
            answers.paused[rank] = (push.substep, now + patience_s)
            self.settle(now)
        else:
            answers.answer(rank, Say.APPLIED)

    def settle(self, now: float) -> None:
        """Applies the sub-steps that are complete, and lets the workers go on that have waited long enough."""
        answers = self._answers
        for k in self._batch.apply_complete(answers.claiming):
            answers.publish()
            answers.resume([r for r, (substep, _) in answers.paused.items() if substep == k], ReplyFlag.CHANGED)
        answers.resume([r for r, (_, until_s) in answers.paused.items() if until_s <= now], ReplyFlag(0))

    def wake_s(self) -> float:
        """Returns when the first has waited long enough [s]; inf: nobody waits, or without end."""
        return min((until_s for _, until_s in self._answers.paused.values()), default=math.inf)
