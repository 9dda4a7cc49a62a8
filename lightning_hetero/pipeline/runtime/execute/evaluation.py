"""Evaluation steps through the stages of a group, in flight behind one another, forward only (layer T).

    leader    step of batch 0 ─► suspended ─► its layers ── activation ──► stages ──► output ─► step 0 resumed ─► result
              step of batch 1 ─► suspended ─► ...                    first in, first out
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lightning_hetero.pipeline.decide.schedule import Kind, What
from lightning_hetero.pipeline.runtime.execute.execution import LocalStage, pass_of
from lightning_hetero.pipeline.runtime.execute.messages import Message, Pass
from lightning_hetero.pipeline.runtime.step.cut import BackboneCall
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.resumable import Done, ResumableStep, Suspended

_Bodies = Iterable[tuple[int, Callable[[], Any]]]


class Evaluation:
    """One turn: as many steps as the leader is given. See `StageRunner.evaluate`.

    Args:
        local: of this rank.
        step: of the random streams.
        samples: of each body, for the pace.
        within: entered by number around what runs of a body.
    """

    def __init__(
        self, local: LocalStage, *, step: int, samples: int = 0,
        within: Callable[[int], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._local, self._step, self._samples, self._within = local, step, samples, within
        stages = len(local.ranks)
        self._before, self._behind = (local.position - 1) % stages, (local.position + 1) % stages

    def alone(self, bodies: _Bodies, *, seed: int) -> list[Any]:
        """Runs the steps of a group of one rank; returns what they returned."""
        results: list[Any] = []
        for number, body in bodies:
            seed_streams(stream_seed(seed, self._step, number))
            with self._within(number):
                results.append(body())
        return results

    def lead(self, bodies: _Bodies, *, steps: ExitStack, seed: int) -> list[Any]:
        """Runs the steps inside the cut; returns what they returned.

        Raises:
            RuntimeError: the backbone was called with gradients enabled.
        """
        results: list[Any] = []
        waiting: deque[tuple[int, int, ResumableStep, BackboneCall]] = deque()

        def went(i: int, number: int, run: ResumableStep, outcome: Suspended | Done) -> None:
            if isinstance(outcome, Suspended):
                self._call(outcome.value, number)
                waiting.append((i, number, run, outcome.value))
            else:
                results[i] = outcome.value

        for i, (number, body) in enumerate(bodies):
            results.append(None)
            run = ResumableStep(body, seed=stream_seed(seed, self._step, number))
            steps.callback(run.close)
            with self._within(number):
                outcome = run.start()
            went(i, number, run, outcome)
        while waiting:
            i, number, run, call = waiting.popleft()
            due = self._message(len(self._local.ranks), number, self._samples)
            reply = call.reply(self._local.receive(self._before, due).value, requires_grad=False)
            with self._within(number):
                outcome = run.resume(reply)
            went(i, number, run, outcome)
        self._local.send(self._behind, Message(what=None, step=self._step))
        return results

    def serve(self) -> None:
        """Takes what comes through this rank's layers, until the leader says that all is done."""
        local = self._local
        while (message := local.receive_evaluation(self._before, self._step)).what is not None:
            assert message.way is not None
            self._forward(local.position, message.value, message.requires_grad, message.way, message.samples)
        if self._behind != 0:
            local.send(self._behind, message)

    def _call(self, call: BackboneCall, number: int) -> None:
        if call.grad_enabled:
            raise RuntimeError(
                "the backbone was called with gradients enabled in an evaluation step, where none come back: call it"
                " under torch.no_grad()"
            )
        way = pass_of(call, step=self._step, number=number)
        self._forward(0, call.value, [False] * len(call.inputs), way, self._samples)

    def _forward(self, stage: int, value: Any, flags: Sequence[bool], way: Pass, samples: int) -> None:
        """Takes a batch through this rank's layers, and sends the outputs."""
        start_s = self._local.pace.began()
        outputs, _ = self._local.stage.forward(value, flags, way)
        self._local.pace.ended(Kind.FORWARD, stage, samples, start_s)
        self._local.send(self._behind, self._message(stage + 1, way.number, samples, value=outputs, way=way))

    def _message(self, stage: int, number: int, samples: int, **fields: Any) -> Message:
        return Message(
            what=What.ACTIVATION, stage=stage, micro_batch=number, step=self._step, samples=samples, **fields
        )
