"""The training steps of a group of one rank: they run through, there is nobody to suspend them for (layer T).

    body: ... ─► backbone: the layers, seeded one by one as in any plan ─► head ─► loss        one graph, one backward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.execution import LocalStage, MicroBatch
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.pipeline.runtime.step.tensor_trees import detached, weighted_loss
from lightning_hetero.pipeline.runtime.step.torch_state import (
    TorchStreams,
    seed_host_streams,
    seed_torch_streams,
    stream_seed,
)

__all__ = ["StraightExecution"]


class StraightExecution:
    """One training step, micro-batch by micro-batch; computes and draws what `LeaderExecution` does.

    That is faster by what suspending a step, cutting its graph and going back in three pieces take. What a pipeline
    refuses is not looked for.

    Args:
        local: of this rank, which has all layers.
        micro_batches: in order.
        step: of the random streams.
        cut: of the backbone, entered; the backbone is one module, called once per training step.
        seed: of the run.
        scale: applied to the weighted loss, e.g. a gradient scaler's.
        before_last_backward: called before the last backward.

    Attributes:
        results: what the bodies returned, detached, by micro-batch.
    """

    def __init__(
        self,
        local: LocalStage,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        cut: BackboneCut,
        seed: int,
        scale: Callable[[Tensor], Tensor] | None,
        before_last_backward: Callable[[], None] | None,
    ) -> None:
        self._local, self._micro_batches, self._step, self._cut = local, micro_batches, step, cut
        self._seed, self._scale, self._before_last_backward = seed, scale, before_last_backward
        self._now = micro_batches[0]
        self._began_s = 0.0
        self._calls = 0  # of the backbone, in this micro-batch
        self._goes_back = False
        self.results: list[Any] = []

    def run(self) -> None:
        """Runs forward and backward of all micro-batches.

        Raises:
            RuntimeError: a body did not call the backbone once.
        """
        self._cut.in_place = self._layers
        try:
            for micro_batch in self._micro_batches:
                self._now = micro_batch
                self._backward(self._forward())
        finally:
            self._cut.in_place = None

    def _forward(self) -> Tensor:
        now, self._calls, self._goes_back = self._now, 0, False
        seed = self._body_seed()
        self._began_s = self._local.began()
        seed_torch_streams(seed)
        seed_host_streams(seed)
        output = now.body()
        if self._calls != 1:
            raise RuntimeError(
                f"the training step of micro-batch {now.number} called the backbone {self._calls} times, expected 1:"
                " every training step must call it equally often, and at least once"
            )
        loss = weighted_loss(output, now.weight, self._scale)
        self.results.append(detached(output))
        self._computed(Kind.HEAD)
        return loss

    def _layers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Stands for the backbone: the body's random streams go on behind it as behind a suspension."""
        stage, step, number = self._local.stage, self._step, self._now.number
        if self._goes_back:  # the step checkpoints it
            return stage.in_place(args, kwargs, step=step, number=number, again=True)
        self._calls += 1
        streams = TorchStreams()
        output = stage.in_place(args, kwargs, step=step, number=number)
        streams.put_back()
        seed_host_streams(stream_seed(self._body_seed(), self._calls))
        self._computed(Kind.FORWARD)
        self._began_s = self._local.began()
        return output

    def _backward(self, loss: Tensor) -> None:
        self._goes_back = True
        self._began_s = self._local.began()
        if self._now is self._micro_batches[-1] and self._before_last_backward is not None:
            self._before_last_backward()
        with self._local.stage.going_back():
            torch.autograd.backward([loss])
        self._computed(Kind.BACKWARD)

    def _body_seed(self) -> int:
        return stream_seed(self._seed, self._step, self._now.number)

    def _computed(self, kind: Kind) -> None:
        stage = 1 if kind is Kind.HEAD else 0
        self._local.paced(kind, stage, self._now.samples, self._began_s)
