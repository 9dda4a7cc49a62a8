"""Training steps that run through, where there is no other rank to suspend them for (layer T).

    body: ... ─► loss ─► backward                                                    a module without layers to divide
    body: ... ─► backbone, layer by layer ─► ... ─► loss ─► backward                 a group of one rank
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime
from lightning_hetero.pipeline.runtime.execute.stages import Stage
from lightning_hetero.pipeline.runtime.execute.work import LeaderWork, wrong_count
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.tensor_trees import detached, weighted_loss


class StraightExecution:
    """One training step, micro-batch by micro-batch; of a backbone it computes and draws what `LeaderExecution` does.

    That is faster by what suspending a step, cutting its graph and going back in three pieces take. What a pipeline
    refuses is not looked for.

    Args:
        work: what there is to do.
        pace: of this rank.
        stage: all layers; None: they are not told apart.
        cut: of the backbone, entered; the backbone is one module, called once per training step.

    Attributes:
        results: what the bodies returned, detached, by micro-batch.
    """

    def __init__(
        self, work: LeaderWork, pace: BusyTime, *, stage: Stage | None = None, cut: BackboneCut | None = None
    ) -> None:
        self._work, self._pace, self._stage = work, pace, stage
        self._now = work.micro_batches[0]
        self._began_s = 0.0
        self._calls, self._goes_back = 0, False  # of the backbone, in this micro-batch; which is in its backward pass
        self.results: list[Any] = []
        if cut is not None:
            cut.in_place = self._layers

    def run(self) -> None:
        """Runs forward and backward of all micro-batches.

        Raises:
            RuntimeError: a body did not call the backbone once.
        """
        work, pace, stage = self._work, self._pace, self._stage
        for micro_batch in work.micro_batches:
            self._now, self._calls, self._goes_back = micro_batch, 0, False
            seed = work.body_seed(micro_batch.number)
            self._began_s = pace.began()
            seed_streams(seed)
            output = micro_batch.body()
            if stage is not None and self._calls != 1:
                raise RuntimeError(wrong_count(micro_batch.number, str(self._calls), expected=1))
            loss = weighted_loss(output, micro_batch.weight, work.scale)
            self.results.append(detached(output))
            del output
            self._end(*((Kind.FORWARD, 0) if stage is None else (Kind.HEAD, 1)))
            self._began_s, self._goes_back = pace.began(), True
            if micro_batch is work.micro_batches[-1] and work.before_last_backward is not None:
                work.before_last_backward()
            with nullcontext() if stage is None else stage.going_back():
                torch.autograd.backward([loss])
            self._end(Kind.BACKWARD, 0)

    def _layers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands for the backbone: the body's random streams go on behind it as behind a suspension."""
        assert self._stage is not None
        step, number = self._work.step, self._now.number
        if self._goes_back:  # the step checkpoints it
            return self._stage.in_place(args, kwargs, step=step, number=number, again=True)
        self._calls += 1
        output = self._stage.in_place(args, kwargs, step=step, number=number)
        seed_streams(stream_seed(self._work.body_seed(number), self._calls))
        self._end(Kind.FORWARD, 0)
        self._began_s = self._pace.began()
        return output

    def _end(self, kind: Kind, stage: int) -> None:
        self._pace.ended(kind, stage, self._now.samples, self._began_s)
