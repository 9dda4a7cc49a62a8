"""Executes one rank's part of a schedule: computations, and what is handed over between them (layer T).

`Execution` is the part of any stage; `LeaderExecution` adds the training steps, which are suspended at the backbone.
Several calls of the backbone are several passes through the stages: with S of them, stage s of call k has the number
k * S + s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import Kind, Operation, Schedule, What
from lightning_hetero.pipeline.runtime.execute.messages import Message, Pass
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime
from lightning_hetero.pipeline.runtime.execute.stage_links import StageLinks
from lightning_hetero.pipeline.runtime.execute.stages import Flight, Stage
from lightning_hetero.pipeline.runtime.execute.work import LeaderWork, MicroBatch, wrong_count
from lightning_hetero.pipeline.runtime.step.cut import BackboneCall, graphs_to_retain
from lightning_hetero.pipeline.runtime.step.resumable import Done, ResumableStep, Suspended
from lightning_hetero.pipeline.runtime.step.tensor_trees import detached, weighted_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStage:
    """A stage as its own rank sees it: the layers, and the ways to the other stages.

    Attributes:
        ranks: of the group, in the order of stages.
        position: this rank's.
        stage: its layers.
        links: to its neighbours.
        pace: of this rank.
    """

    ranks: tuple[int, ...]
    position: int
    stage: Stage
    links: StageLinks
    pace: BusyTime

    def send(self, position: int, message: Message) -> None:
        """Posts a message to another stage's rank."""
        self.links.send(self.ranks[position], message)

    def receive(self, position: int, due: Message) -> Message:
        """Waits for a message with the place of ``due``.

        Raises:
            RuntimeError: another one came; or as `StageLinks.receive`.
        """
        message = self.links.receive(self.ranks[position])
        if message.place != due.place:
            raise RuntimeError(
                f"rank {self.ranks[position]} sent {message} where {due} is due: the ranks of the group do not follow"
                " the same schedule; they must be given the same steps, micro-batches and times"
            )
        return message

    def receive_evaluation(self, position: int, step: int) -> Message:
        """Waits for the next activation, or the end, of an evaluation step.

        Raises:
            RuntimeError: as `receive`.
        """
        message = self.links.receive(self.ranks[position])
        if message.micro_batches or message.step != step:
            raise RuntimeError(
                f"rank {self.ranks[position]} sent {message} where evaluation step {step} is due: the ranks of the"
                " group have taken different ways through the program"
            )
        return message


class Execution:
    """One rank's part of one training step.

    Args:
        local: of this rank.
        schedule: of the group.
        step: global step, of the random streams.
        samples: of each micro-batch.
        before_last_backward: called before the last backward through this rank's layers.
    """

    def __init__(
        self, local: LocalStage, schedule: Schedule, *, step: int, samples: Sequence[int],
        before_last_backward: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        self._local, self._schedule = local, schedule
        self._step, self._samples = step, samples
        self._before_last_backward = before_last_backward
        self._devices = (*schedule.devices, schedule.devices[0])
        self._flights: dict[tuple[int, int], Flight] = {}  # by stage and micro-batch, as all below
        self._inbox: dict[tuple[What, int, int], Message | None] = {}  # by the stage that uses it
        self._outbox: dict[tuple[What, int, int], Message | None] = {}  # by the stage whose result it is

    def run(self) -> None:
        """Executes this rank's operations in order."""
        operations = self._schedule.operations[self._local.position]
        last = max((i for i, op in enumerate(operations) if op.kind is Kind.BACKWARD), default=-1)
        compute = {Kind.FORWARD: self._forward, Kind.HEAD: self._head, Kind.BACKWARD: self._backward}
        for i, op in enumerate(operations):
            if i == last and self._before_last_backward is not None:
                self._before_last_backward()
            if op.kind is Kind.SEND:
                self._send(op)
            elif op.kind is Kind.RECEIVE:
                self._receive(op)
            else:
                start_s = self._local.pace.began()
                compute[op.kind](op.stage, op.micro_batch)
                self._local.pace.ended(op.kind, op.stage, self._samples[op.micro_batch], start_s)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _send(self, op: Operation) -> None:
        assert op.what is not None and op.peer is not None
        message = self._outbox.pop((op.what, op.stage, op.micro_batch))
        if message is not None:
            self._local.send(op.peer, message)

    def _receive(self, op: Operation) -> None:
        assert op.what is not None and op.peer is not None
        message = None
        if op.what is What.ACTIVATION or any(self._flights[op.stage, op.micro_batch].output_flags):
            message = self._local.receive(op.peer, self._message(op.what, op.stage, op.micro_batch))
        self._inbox[op.what, op.stage, op.micro_batch] = message

    def _message(self, what: What, stage: int, m: int, **fields: Any) -> Message:
        return Message(
            what=what, stage=stage, micro_batch=m, micro_batches=len(self._samples), step=self._step,
            samples=self._samples[m], **fields,
        )  # fmt: skip

    def _hand_over(self, what: What, stage: int, to_stage: int, m: int, message: Message | None) -> None:
        if self._devices[stage] == self._devices[to_stage]:
            self._inbox[what, to_stage, m] = message
        else:
            self._outbox[what, stage, m] = message

    def _hand_gradients_back(self, stage: int, m: int, flags: Sequence[bool], grads: Sequence[Tensor | None]) -> None:
        """Leaves gradients for the stage before; none where it does not wait for any."""
        message = None
        if any(flags):
            message = self._message(What.GRADIENT, stage - 1, m, value=tuple(grads))
        self._hand_over(What.GRADIENT, stage, stage - 1, m, message)

    # ---- computations ----------------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        message = self._inbox.pop((What.ACTIVATION, stage, m))
        assert message is not None and message.way is not None
        self._through(stage, m, message.value, message.requires_grad, message.way)

    def _through(self, stage: int, m: int, value: Any, flags: Sequence[bool], way: Pass) -> None:
        """Takes a micro-batch through this rank's layers, and leaves the outputs for the next stage."""
        outputs, flight = self._local.stage.forward(value, flags, way)
        self._flights[stage, m] = flight
        message = self._message(
            What.ACTIVATION, stage + 1, m, value=outputs, requires_grad=flight.output_flags, way=way
        )
        self._hand_over(What.ACTIVATION, stage, stage + 1, m, message)

    def _head(self, stage: int, m: int) -> None:
        raise AssertionError("the head stands on the leader")

    def _backward(self, stage: int, m: int) -> None:
        flags, grads = self._back_through(stage, m)
        self._hand_gradients_back(stage, m, flags, grads)

    def _back_through(self, stage: int, m: int) -> tuple[Sequence[bool], list[Tensor | None]]:
        """Takes gradients back through this rank's layers; returns those of the input, and which are wanted."""
        message = self._inbox.pop((What.GRADIENT, stage, m))
        flight = self._flights.pop((stage, m))
        grads = message.value if message is not None else None
        del message
        return flight.input_flags, flight.backward(grads)


@dataclass(slots=True)
class _Body:
    """One micro-batch's training step.

    Attributes:
        micro_batch: as given.
        step: suspended or ended.
        calls: of the backbone, so far.
        flags: by call, which tensors of its outputs require a gradient.
        retain: by call, whether its backward must keep the graph.
    """

    micro_batch: MicroBatch
    step: ResumableStep
    calls: list[BackboneCall] = field(default_factory=list)
    flags: list[tuple[bool, ...]] = field(default_factory=list)
    retain: list[bool] = field(default_factory=list)


class LeaderExecution(Execution):
    """The leader's part: stage 0 of every call, and the head.

    Args:
        local: of this rank.
        schedule: of the group.
        work: what there is to do.
        steps: closes training steps that are left suspended.
        calls: of the backbone in every training step.

    Attributes:
        results: what the bodies returned, detached, by micro-batch.
    """

    def __init__(
        self, local: LocalStage, schedule: Schedule, work: LeaderWork, *, steps: ExitStack, calls: int
    ) -> None:
        samples = [micro_batch.samples for micro_batch in work.micro_batches]
        super().__init__(
            local, schedule, step=work.step, samples=samples, before_last_backward=work.before_last_backward
        )
        self._work, self._steps, self._calls = work, steps, calls
        self._bodies: dict[int, _Body] = {}
        self.results: list[Any] = [None] * len(work.micro_batches)

    def _forward(self, stage: int, m: int) -> None:
        outcome, number = self._advance(stage, m), self._work.micro_batches[m].number
        if not isinstance(outcome, Suspended):
            found = str(stage // len(self._local.ranks))
            raise RuntimeError(wrong_count(number, found, expected=self._calls))
        call: BackboneCall = outcome.value
        self._bodies[m].calls.append(call)
        way = pass_of(call, step=self._step, number=number)
        self._through(stage, m, call.value, [tensor.requires_grad for tensor in call.inputs], way)

    def _advance(self, stage: int, m: int) -> Suspended | Done:
        """Starts the training step, or resumes it with what the stage before this one left."""
        if stage == 0:
            micro_batch = self._work.micro_batches[m]
            seed = self._work.body_seed(micro_batch.number)
            step = ResumableStep(micro_batch.body, seed=seed)
            self._steps.callback(step.close)
            self._bodies[m] = _Body(micro_batch, step)
            return step.start()
        message = self._inbox.pop((What.ACTIVATION, stage, m))
        assert message is not None
        body, flags = self._bodies[m], message.requires_grad
        body.flags.append(flags)
        return body.step.resume(body.calls[-1].reply(message.value, flags))

    def _head(self, stage: int, m: int) -> None:
        outcome, body = self._advance(stage, m), self._bodies[m]
        if not isinstance(outcome, Done):
            found = f"at least {self._calls + 1}"
            raise RuntimeError(wrong_count(body.micro_batch.number, found, expected=self._calls))
        loss = weighted_loss(outcome.value, body.micro_batch.weight, self._work.scale)
        retain, *body.retain = graphs_to_retain(loss, body.calls)
        body.retain.reverse()  # they go back from the last call to the first
        self.results[m] = detached(outcome.value)
        del outcome
        torch.autograd.backward([loss], retain_graph=retain)
        del loss
        self._hand_call_back(stage, m, body)

    def _backward(self, stage: int, m: int) -> None:
        _, grads = self._back_through(stage, m)
        body = self._bodies[m]
        call = body.calls.pop()
        if call.grad_enabled:
            call.backward(grads, retain_graph=body.retain[len(body.calls)])
        if stage:
            self._hand_call_back(stage, m, body)
        else:
            del self._bodies[m]

    def _hand_call_back(self, stage: int, m: int, body: _Body) -> None:
        """Leaves the gradients of the last call's outputs for the stage that they came from."""
        call, flags = body.calls[-1], body.flags[len(body.calls) - 1]
        grads = call.output_grads() if call.grad_enabled and any(flags) else ()
        self._hand_gradients_back(stage, m, flags, grads)


def pass_of(call: BackboneCall, *, step: int, number: int) -> Pass:
    """Returns under which circumstances the layers are run for a call of the backbone."""
    return Pass(
        step=step, number=number, call=call.number, grad_enabled=call.grad_enabled, autocast=call.autocast,
        route=call.route,
    )  # fmt: skip
