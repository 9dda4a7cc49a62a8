"""The vocabulary of a schedule: what happens to a micro-batch, what it takes, which device does what when (layer P).

A pipeline of S stages is one way that every micro-batch walks, its *route*:

    F of stage 0, activation to stage 1, F of stage 1, ..., F of stage S-1, output to the head,
    H (head and loss, forward and backward up to the gradient of the output), gradient of the output to stage S-1,
    B of stage S-1, gradient to stage S-2, ..., B of stage 0

The head counts as stage S. It stands on the leader, position 0, so that the loss is computed where the training
step runs: the last stage's output loops back. A hand-over between stages on the same device is no message and no
operation.

    times = PipelineTimes(...)              what each part takes, per stage and micro-batch
    schedule = generate(times, policy)      each device's operations in order, see `generate`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

Row = tuple[float, ...]
Table = tuple[Row, ...]


class Kind(str, Enum):
    """What a device does in one operation; the value is its sign in words."""

    FORWARD = "F"
    HEAD = "H"
    BACKWARD = "B"
    SEND = ">"
    RECEIVE = "<"


class What(str, Enum):
    """What a message carries; the value is its sign in words."""

    ACTIVATION = "a"
    GRADIENT = "g"


class Step(NamedTuple):
    """One part of the route, the same for every micro-batch.

    Attributes:
        kind: a computation, or ``Kind.SEND`` for a message.
        stage: that computes, or whose result is sent; S is the head.
        device: position of the device that computes or sends.
        to_stage: of a message, the stage that uses it; else ``stage``.
        to_device: of a message, where that stage is; else ``device``.
        what: of a message; else None.
    """

    kind: Kind
    stage: int
    device: int
    to_stage: int
    to_device: int
    what: What | None = None

    @property
    def is_message(self) -> bool:
        return self.kind is Kind.SEND

    @property
    def cut(self) -> int:
        """The number i of a message that goes from stage i to i + 1 or back."""
        return min(self.stage, self.to_stage)


@lru_cache(maxsize=256)
def route(devices: tuple[int, ...]) -> tuple[Step, ...]:
    """Returns the way of every micro-batch through the pipeline.

    Args:
        devices: position of each stage's device.
    """
    last = len(devices)
    places = [*devices, devices[0]]
    steps: list[Step] = []

    def compute(kind: Kind, stage: int) -> None:
        steps.append(Step(kind, stage, places[stage], stage, places[stage]))

    def hand_over(what: What, stage: int, to_stage: int) -> None:
        if places[stage] != places[to_stage]:
            steps.append(Step(Kind.SEND, stage, places[stage], to_stage, places[to_stage], what))

    for stage in range(last):
        compute(Kind.FORWARD, stage)
        hand_over(What.ACTIVATION, stage, stage + 1)
    compute(Kind.HEAD, last)
    for stage in reversed(range(last)):
        hand_over(What.GRADIENT, stage + 1, stage)
        compute(Kind.BACKWARD, stage)
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of a device's list.

    Attributes:
        kind: what the device does.
        stage: of a computation, the stage; of a message, the stage *on this device* whose result is sent or whose
            input is received. S is the head: its input is the backbone's output, its result that output's gradient.
        micro_batch: from 0, in the group's order.
        what: of a message; else None.
        peer: of a message, position of the other device; else None.
    """

    kind: Kind
    stage: int
    micro_batch: int
    what: What | None = None
    peer: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Who does what in which order: plain data, the same on every rank, executed as it stands.

    A send is posted and not waited for (its buffer is kept until it is out); a receive stands where its message is
    needed, so that is where to wait for it. Messages have no tags: every directed pair of devices is a separate
    channel, first in, first out. No choice of times makes such lists deadlock, only full buffers.

    Attributes:
        devices: position of each stage's device in the group; several stages of one device interleave.
        operations: per device, in order of execution.
    """

    devices: tuple[int, ...]
    operations: tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of one pipeline: S stages, M micro-batches, which may be uneven.

    A device computes one thing at a time; a directed pair of devices is one link, which carries one message at a time.

    Attributes:
        forward_s, backward_s: [S][M] of the stages.
        before_forward_s, before_backward_s: [M] of the training step up to the backbone; on the leader.
        head_forward_s, head_backward_s: [M] of what follows the backbone, loss included; on the leader.
        link_forward_s, link_backward_s: [S-1][M] of the messages between stage i and i + 1.
        loop_forward_s, loop_backward_s: [M] of the messages from the last stage to the head and back.
        devices: position of each stage's device, the leader's 0 first.
    """

    forward_s: Table
    backward_s: Table
    before_forward_s: Row
    before_backward_s: Row
    head_forward_s: Row
    head_backward_s: Row
    link_forward_s: Table
    link_backward_s: Table
    loop_forward_s: Row
    loop_backward_s: Row
    devices: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def micro_batches(self) -> int:
        return len(self.forward_s[0])

    @cached_property
    def seconds(self) -> Table:
        """Seconds of each step of the route, by micro-batch."""
        return tuple(self._seconds(step) for step in route(self.devices))

    def _seconds(self, step: Step) -> Row:
        at = step.stage
        if step.what is What.ACTIVATION:
            return (*self.link_forward_s, self.loop_forward_s)[step.cut]
        if step.what is What.GRADIENT:
            return (*self.link_backward_s, self.loop_backward_s)[step.cut]
        if step.kind is Kind.HEAD:
            return _sum(self.head_forward_s, self.head_backward_s)
        if step.kind is Kind.FORWARD:
            return self.forward_s[at] if at else _sum(self.before_forward_s, self.forward_s[0])
        return self.backward_s[at] if at else _sum(self.backward_s[0], self.before_backward_s)


def _sum(a: Row, b: Row) -> Row:
    return tuple(x + y for x, y in zip(a, b, strict=True))
