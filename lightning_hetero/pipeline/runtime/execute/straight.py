"""Training steps that run through, where there is no other rank to suspend them for (layer T).

    StraightExecution    body: ... ─► loss ─► backward                               a module without layers to divide
    InPlaceExecution     body: ... ─► backbone, layer by layer ─► ... ─► loss ─► backward        a group of one rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime
from lightning_hetero.pipeline.runtime.execute.stages import Stage
from lightning_hetero.pipeline.runtime.execute.work import LeaderWork, wrong_count
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.tensor_trees import detached, weighted_loss


class StraightExecution:
    """One training step, micro-batch by micro-batch.

    Args:
        work: what there is to do.
        pace: of this rank.

    Attributes:
        results: what the bodies returned, detached, by micro-batch.
    """

    _ends_with: ClassVar[tuple[Kind, int]] = Kind.FORWARD, 0  # what a body computes last, and of which stage

    def __init__(self, work: LeaderWork, pace: BusyTime) -> None:
        self._work, self._pace = work, pace
        self._now = work.micro_batches[0]
        self._began_s = 0.0
        self.results: list[Any] = []

    def run(self) -> None:
        """Runs forward and backward of all micro-batches."""
        work = self._work
        for micro_batch in work.micro_batches:
            self._now = micro_batch
            loss = self._forward()
            self._began_s = self._pace.began()
            if micro_batch is work.micro_batches[-1] and work.before_last_backward is not None:
                work.before_last_backward()
            self._backward(loss)
            self._end(Kind.BACKWARD, 0)

    def _forward(self) -> Tensor:
        seed = self._body_seed()
        self._began_s = self._pace.began()
        seed_streams(seed)
        output = self._body()
        loss = weighted_loss(output, self._now.weight, self._work.scale)
        self.results.append(detached(output))
        self._end(*self._ends_with)
        return loss

    def _body(self) -> Any:
        return self._now.body()

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward([loss])

    def _body_seed(self) -> int:
        return self._work.body_seed(self._now.number)

    def _end(self, kind: Kind, stage: int) -> None:
        self._pace.ended(kind, stage, self._now.samples, self._began_s)


class InPlaceExecution(StraightExecution):
    """As a part of it, the backbone where it is called; computes and draws what `LeaderExecution` does.

    That is faster by what suspending a step, cutting its graph and going back in three pieces take. What a pipeline
    refuses is not looked for.

    Args:
        work: what there is to do.
        pace: of this rank.
        stage: all layers.
        cut: of the backbone, entered; the backbone is one module, called once per training step.
    """

    _ends_with = Kind.HEAD, 1

    def __init__(self, work: LeaderWork, pace: BusyTime, *, stage: Stage, cut: BackboneCut) -> None:
        super().__init__(work, pace)
        self._stage, self._cut = stage, cut
        self._calls = 0  # of the backbone, in this micro-batch
        self._goes_back = False

    def run(self) -> None:
        """Runs forward and backward of all micro-batches.

        Raises:
            RuntimeError: a body did not call the backbone once.
        """
        self._cut.in_place = self._layers
        try:
            super().run()
        finally:
            self._cut.in_place = None

    def _body(self) -> Any:
        self._calls, self._goes_back = 0, False
        output = super()._body()
        if self._calls != 1:
            raise RuntimeError(wrong_count(self._now.number, str(self._calls), expected=1))
        return output

    def _layers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands for the backbone: the body's random streams go on behind it as behind a suspension."""
        step, number = self._work.step, self._now.number
        if self._goes_back:  # the step checkpoints it
            return self._stage.in_place(args, kwargs, step=step, number=number, again=True)
        self._calls += 1
        output = self._stage.in_place(args, kwargs, step=step, number=number)
        seed_streams(stream_seed(self._body_seed(), self._calls))
        self._end(Kind.FORWARD, 0)
        self._began_s = self._pace.began()
        return output

    def _backward(self, loss: Tensor) -> None:
        self._goes_back = True
        with self._stage.going_back():
            super()._backward(loss)
