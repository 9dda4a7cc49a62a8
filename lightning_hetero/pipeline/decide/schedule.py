"""The vocabulary of a schedule: what happens to a micro-batch, what it takes, which device does what when (layer P).

A pipeline of S stages is one way that every micro-batch walks, its *route*:

    F of stage 0, activation to stage 1, F of stage 1, ..., F of stage S-1, output to the head,
    H (head and loss, forward and backward up to the gradient of the output), gradient of the output to stage S-1,
    B of stage S-1, gradient to stage S-2, ..., B of stage 0

The head counts as stage S. It stands on the leader, position 0, so that the loss is computed where the training
step runs: the last stage's output loops back. A hand-over between stages on the same device is no message and no
operation.

    times = PipelineTimes(...)              what each step of the route takes, per micro-batch
    schedule = generate(times, policy)      each device's operations in order, see `generate`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """Seconds of one pipeline: S stages, M micro-batches, which may be uneven.

    A device computes one thing at a time; a directed pair of devices is one link, which carries one message at a time.

    Attributes:
        devices: position of each stage's device, the leader's 0 first.
        seconds: [steps][M] of each step of ``route(devices)``. What the training step does before the backbone is
            part of stage 0; what follows the backbone, loss included, is the head.
    """

    devices: tuple[int, ...]
    seconds: Table

    @property
    def stages(self) -> int:
        return len(self.devices)

    @property
    def micro_batches(self) -> int:
        return len(self.seconds[0])
