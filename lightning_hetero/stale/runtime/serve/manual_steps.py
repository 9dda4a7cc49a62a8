"""When pushes that are not the last of their batch become an update, and who waits for that (layer T).

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
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from torch import Tensor

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Asynchronous
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.stale.runtime.serve.replies import Replies
from lightning_hetero.transport.base import Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag

__all__ = ["ManualSteps"]


class ManualSteps:
    """See the module.

    Args:
        batch: has the pools.
        coordinator: knows policy, version and the time of a step.
        replies: answers.
    """

    def __init__(self, batch: OpenBatch, coordinator: Coordinator, replies: Replies) -> None:
        self._batch, self._coordinator, self._replies = batch, coordinator, replies
        self._paused: dict[int, tuple[int, float]] = {}  # sub-step it waits for, and until when [s]

    def push(
        self,
        rank: int,
        push: Request,
        slot: Tensor,
        now: float,
        *,
        base: int,
        granted_s: float,
        finite: bool,
        counts: bool,
        done: AbstractSet[int],
    ) -> None:
        """Takes in a push.

        Args:
            rank, push, slot: whose, what it says, and its gradients.
            now: time [s].
            base, granted_s: version it was computed with, and when that was granted [s].
            finite: False: its samples count, its gradients do not.
            counts: False: the sub-step counts for these samples already, see `Coordinator.substep`.
            done: see `settle`.
        """
        policy, batch = self._coordinator.policy, self._batch
        batch.add_substep(rank, push, slot, base, finite=finite, counts=counts)
        if counts and (isinstance(policy, Asynchronous) or not batch.may_wait(push.substep, base)):
            batch.apply_at_once(push)
            self._replies.publish()
            self._replies.answer(rank, Say.APPLIED, flags=ReplyFlag.CHANGED)
        elif batch.is_open(push):
            patience_s = policy.grace * (self._coordinator.step_s or now - granted_s)
            if policy.holds == "barrier" or (policy.holds == "grace" and push.flags & PushFlag.MORE):
                patience_s = math.inf
            self._paused[rank] = (push.substep, now + patience_s)
            self.settle(done, now)
        else:
            self._replies.answer(rank, Say.APPLIED)

    def settle(self, done: AbstractSet[int], now: float) -> None:
        """Applies the sub-steps that are complete, and lets go whoever has waited long enough.

        Args:
            done: workers that will push nothing more for any sub-step of this tick.
            now: time [s].
        """
        for k in self._batch.apply_complete(done):
            self._replies.publish()
            self._resume(
                [rank for rank, (substep, _) in self._paused.items() if substep == k], ReplyFlag.CHANGED
            )
        self._resume([rank for rank, (_, until_s) in self._paused.items() if until_s <= now], ReplyFlag(0))

    def applied(self) -> None:
        """The tick's update has applied all that was left; nobody waits any more."""
        self._resume(list(self._paused), ReplyFlag.CHANGED)

    def _resume(self, ranks: Iterable[int], flags: ReplyFlag) -> None:
        for rank in ranks:
            del self._paused[rank]
            self._replies.answer(rank, Say.APPLIED, flags=flags)

    def wake_s(self) -> float:
        """Returns when the first has waited long enough [s]; inf: nobody waits, or without end."""
        return min((until_s for _, until_s in self._paused.values()), default=math.inf)

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self._paused.pop(rank, None)

    def clear(self) -> None:
        """The run has failed; all have been told."""
        self._paused.clear()
