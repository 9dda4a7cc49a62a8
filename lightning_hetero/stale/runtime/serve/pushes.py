"""Takes in claims and pushes, and carries out what the coordinator decides on them (layer T).

    Accepted            a slot is added to the pool
    Updated             the pool becomes an update, and is published
    Assigned, Passed    a claim is answered
    Refused, Reissued   are counted

In manual optimization a batch pushes several times; all but the last (`PushFlag.FINAL`) are *sub-steps*. Sub-step k of
a global step has a separate pool, applied when all samples of the global step, or all live workers, are in it, and
at the latest with its update. A worker that pushed waits until it is applied at a barrier, and wherever the policy may
wait if further steps of the batch follow, which build on it; else it goes on at once (asynchronous policies apply every
push at once). What comes after its sub-step was applied counts in the next global step's; where that would exceed the
bound, or there is no next global step, it is applied at once, worth its samples.

Each sub-step counts once for a sample, also if its worker's last push is refused and the sample is issued again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Effect, Passed, Refused, Reissued, Updated
from lightning_hetero.stale.decide.policy import Asynchronous
from lightning_hetero.stale.decide.report import Counts, Measures
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.stale.runtime.serve.thread_shards import ThreadShards
from lightning_hetero.stale.runtime.serve.update import Updater, bits
from lightning_hetero.transport.base import Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.membership import Limits, Membership, RunEndsError
from lightning_hetero.transport.progress import Stamp

_WITHOUT = "the others go on without, on {} devices, with the same global batch: its samples go to them"



class Pushed(NamedTuple):
    """A push: the message, its gradients, and the version they were computed with."""

    request: Request
    slot: Tensor
    base: int


class Pushes:
    """See the module; knows which worker waits for what, and fills in what every answer says.

    Args:
        layout: of parameters, buffers and slots.
        area: uint8 flat parameters and buffers, the server's own memory; the parameters are views of it.
        parameters: in the layout's order.
        optimizers: the user's.
        listener: the transport's end; version 0 is published at once.
        coordinator: decides.
        divide_by: the pool's sum is divided by this instead of by its weight; for losses that are sums.
        nonfinite: a NaN or Inf gradient ends the run (``"stop"``), or its samples are left out (``"skip"``).
        shards: threads for pools and optimizers; None: by size.
        limits: how long workers wait for one that does not come; None: without limit.
        stamp: called whenever another work begins, see `transport.progress`.

    Attributes:
        counts: what was counted.
        failure: why the run cannot go on; None: it can.
        claims: workers that wait for work, with the claim and when it was made [s].
        paused: workers that wait for a sub-step to be applied, with its number.
    """

    def __init__(
        self, *, layout: FlatLayout, area: Tensor, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer],
        listener: Listener, coordinator: Coordinator, divide_by: float | None = None,
        nonfinite: Literal["stop", "skip"] = "stop", shards: int | None = None, limits: Limits | None = None,
        stamp: Stamp = lambda kind, number: None,
    ) -> None:  # fmt: skip
        self.stamp, self.area = stamp, area
        self.listener, self.coordinator, self.counts = listener, coordinator, Counts()
        self._stop = nonfinite == "stop"
        self._shards = ThreadShards([entry.numel for entry in layout.parameters], shards)
        self._updater = Updater(
            layout=layout, area=area, parameters=parameters, optimizers=optimizers, shards=self._shards,
            divide_by=divide_by, stamp=stamp,
        )  # fmt: skip
        self._batch = OpenBatch(self._updater, coordinator, self.counts)
        self._members = Membership(coordinator.live, limits, without=_WITHOUT)
        self._epochs = AnnouncedEpochs(layout.digest)
        self.failure: str | None = None
        self.claims: dict[int, tuple[Request, float]] = {}
        self.paused: dict[int, int] = {}
        self._unanswered: set[int] = set()
        self._wasted: set[int] = set()  # workers whose last push counts nothing, to be told with the answer
        self.publish()

    def publish(self) -> None:
        """Lets workers see the present parameters."""
        self.listener.publish(self.coordinator.version, self.area)

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
        return json.dumps(Measures.take(self.counts, self.coordinator).as_dict())

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
            flags=self.coordinator.policy.threshold_for(len(self._members.live)) or 0,
        )  # fmt: skip

    def _claim_of(self, rank: int, now: float) -> Request:
        claim, at_s = self.claims.pop(rank)
        self.counts.held(rank, now - at_s)
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
            "epoch": self._epochs.number, "global_step": self.coordinator.global_step,
            "version": self.coordinator.version,
            "total": 0 if (streams := self.coordinator.streams) is None else streams.total,
        }  # fmt: skip
        self.listener.reply(rank, Reply(kind=kind, **{**here, **said}))

    # ---- what comes in ----------------------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[Effect], now: float, pushed: Pushed | None = None) -> None:
        """Carries out what the coordinator decided.

        Args:
            effects: in order.
            now: time [s].
            pushed: what caused them, if a push did.
        """
        counts = self.counts
        for effect in effects:
            if isinstance(effect, Assigned):
                self.granted(effect, now)
            elif isinstance(effect, Passed):
                self.passed(effect, now)
            elif isinstance(effect, Accepted):
                assert pushed is not None
                counts.accepted(effect.rank, effect.samples, effect.staleness, pushed.request.compute_s)
                self._batch.accept(effect, pushed.request, pushed.slot, pushed.base)
            elif isinstance(effect, Updated):
                if (word := self._batch.update(effect)) is not None:
                    self._epochs.step_over(word)
                self.publish()
                self.resume(list(self.paused))  # all that was left of sub-steps was applied
            elif isinstance(effect, Refused):
                counts.discarded[effect.reason] += effect.samples
                if effect.reason != "nonfinite":  # these samples are nobody else's
                    self._wasted.add(effect.rank)
            else:
                assert isinstance(effect, Reissued)
                counts.reissued[effect.reason] += effect.samples

    def claim(self, rank: int, request: Request, now: float) -> None:
        """A worker asks for work."""
        self.claims[rank] = (request, now)
        self.carry_out(self.coordinator.claim(rank, request.global_step, now), now)
        self.settle()

    def push(self, rank: int, push: Request, now: float) -> None:
        """A worker has pushed gradients; with the last push of a batch it claims at once.

        Raises:
            RunEndsError: they are not finite, and the rule is to stop; the message names worker, place and parameter.
            TornSlotError: the slot is not whole.
            ValueError: no worker can mean this push.
        """
        self._check(push)
        slot = self.listener.gradient(rank, push.slot)
        if push.flags & PushFlag.FINAL:
            self._last_push(rank, push, slot, now)
            self.claim(rank, push, now)
        else:
            self._substep(rank, push, slot)

    def settle(self) -> None:
        """Applies the sub-steps that are complete."""
        for k in self._batch.apply_complete(self.claims.keys()):  # they push nothing more in this global step
            self.publish()
            self.resume([rank for rank, substep in self.paused.items() if substep == k])

    def _last_push(self, rank: int, push: Request, slot: Tensor, now: float) -> None:
        coordinator = self.coordinator
        assignment = coordinator.assignment(rank, push.assignment)
        finite = assignment is None or self._finite(rank, push, slot)
        if push.global_step == coordinator.global_step:
            self._batch.announce(push, slot)
        at, samples = push.global_step, push.samples
        effects = coordinator.push(rank, push.assignment, now, global_step=at, samples=samples, finite=finite)
        self.carry_out(effects, now, None if assignment is None else Pushed(push, slot, assignment.base))

    def _substep(self, rank: int, push: Request, slot: Tensor) -> None:
        coordinator, batch = self.coordinator, self._batch
        assignment = coordinator.assignment(rank, push.assignment)
        if assignment is None or assignment.void or not coordinator.within_bound(assignment.base):
            self.answer(rank, Say.APPLIED)  # the last push of the batch will be refused as a whole
            return
        finite = self._finite(rank, push, slot)
        # False: the sub-step counts for these samples already.
        counts, policy = coordinator.substep(assignment, push.substep, push.samples), coordinator.policy
        batch.add_substep(rank, push, slot, assignment.base, finite=finite, counts=counts)
        waits = policy.holds == "barrier" or (policy.holds == "grace" and push.flags & PushFlag.MORE)
        if counts and (isinstance(policy, Asynchronous) or not batch.may_wait(push.substep, assignment.base)):
            batch.apply_at_once(push)
            self.publish()
            self.answer(rank, Say.APPLIED, flags=ReplyFlag.CHANGED)
        elif waits and batch.is_open(push):
            self.paused[rank] = push.substep
        else:
            self.answer(rank, Say.APPLIED)
        self.settle()

    # ---- what is pushed ---------------------------------------------------------------------------------------

    def _check(self, push: Request) -> None:
        """Raises ValueError for a push that no worker can mean."""
        optimizers = len(self._updater.optimizers)
        if (push.steps | push.zeroes) >> optimizers:
            raise ValueError(f"optimizers {list(bits(push.steps | push.zeroes))} of {optimizers}")
        if not (math.isfinite(push.weight) and push.weight >= 0.0):
            raise ValueError(f"weight={push.weight!r} must be a finite number >= 0")

    def _finite(self, rank: int, push: Request, slot: Tensor) -> bool:
        """Returns whether the gradients are finite; if not, everybody learns it, or the run ends."""
        name = None if push.flags & PushFlag.OVERFLOW else self._updater.nonfinite(slot)
        if name is None:
            return True
        batch = f"epoch {push.epoch}, batch {push.global_step}"
        where = f"worker {rank} has a gradient with NaN or Inf in {batch}: {name!r}"
        if self._stop:
            raise RunEndsError(f"{where} is the first such parameter. Pass nonfinite='skip' to leave such batches out")
        self._members.notify(f"{where}; its {push.samples} samples are left out")
        return False
