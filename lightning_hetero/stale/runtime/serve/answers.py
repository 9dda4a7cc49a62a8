"""What goes out of the server: published versions, and one answer to every request (layer T)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Assigned, Passed
from lightning_hetero.stale.decide.report import Counts, Measures
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs
from lightning_hetero.stale.runtime.serve.open_batch import OpenBatch
from lightning_hetero.stale.runtime.serve.thread_shards import ThreadShards
from lightning_hetero.stale.runtime.serve.update import Updater
from lightning_hetero.transport.base import Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag, ReplyFlag
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.membership import Limits, Membership
from lightning_hetero.transport.progress import Stamp

_WITHOUT = "the others go on without, on {} devices, with the same global batch: its samples go to them"


class Answers:
    """Knows which worker waits for what, and fills in what every answer says; and what a server is made of.

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
        }  # fmt: skip
        self.listener.reply(rank, Reply(kind=kind, **{**here, **said}))
