"""The vocabulary of a schedule: what happens to every micro-batch, and each device's operations in order.

A pipeline of S stages is one way that every micro-batch walks, its *route*:

    F of stage 0, activation to stage 1, F of stage 1, ..., F of stage S-1, output to the head,
    H (head and loss, forward and backward up to the gradient of the output), gradient of the output to stage S-1,
    B of stage S-1, gradient to stage S-2, ..., B of stage 0

The head counts as stage S. It stands on the leader, position 0, so that the loss is computed where the training
step runs: the last stage's output loops back. (In the textbook's chain it stands on the last stage's device.)
A hand-over between stages on the same device is no message and no operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Kind", "Operation", "Schedule", "Step", "What", "route"]


class Kind(str, Enum):
    """What a device does in one operation; the value is its sign in the text form."""

    FORWARD = "F"
    HEAD = "H"
    BACKWARD = "B"
    SEND = ">"
    RECEIVE = "<"


class What(str, Enum):
    """What a message carries; the value is its sign in the text form."""

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
        """Of a message: i if it goes from stage i to i + 1 or back."""
        return min(self.stage, self.to_stage)


@lru_cache(maxsize=256)
def route(devices: tuple[int, ...], head: int, backward: bool) -> tuple[Step, ...]:
    """Returns the way of every micro-batch through the pipeline.

    Args:
        devices: position of each stage's device.
        head: position of the head's device.
        backward: False for validation and prediction: the way ends at the head.
    """
    last = len(devices)
    places = [*devices, head]
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
    for stage in reversed(range(last)) if backward else ():
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

    @property
    def cut(self) -> int:
        """Of a message: i if it goes from stage i to i + 1 or back."""
        downstream = (self.kind is Kind.SEND) == (self.what is What.ACTIVATION)
        return self.stage if downstream else self.stage - 1

    def __str__(self) -> str:
        """The token of the text form, with the stage: ``F3@1``, ``a3@1>2``, ``g3@1<2``."""
        return self.token(with_stage=True)

    def token(self, *, with_stage: bool) -> str:
        at = f"@{self.stage}" if with_stage and self.kind is not Kind.HEAD else ""
        if self.what is None:
            return f"{self.kind.value}{self.micro_batch}{at}"
        return f"{self.what.value}{self.micro_batch}{at}{self.kind.value}{self.peer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Who does what in which order: plain data, the same on every rank, executed as it stands.

    How to execute ``overlapped`` lists: a send is posted and not waited for (its buffer is kept until it is out); a
    receive stands where its message is needed, so that is where to wait for it. Post it earlier to overlap it with
    computation: any time before, in the order of `messages`. Messages have no tags; every directed pair of devices
    is a channel of its own, first in, first out. No choice of times makes such lists deadlock, only full buffers.

    How to execute lists that are not: one operation after the other, sends and receives block. That needs no
    buffers at all (rendezvous).

    Attributes:
        devices: position of each stage's device in the group; several stages of one device interleave.
        head: position of the head's device.
        micro_batches: number of micro-batches.
        depths: most micro-batches in flight, per stage.
        overlapped: whether transfers run beside computation.
        backward: False: forward only, for validation and prediction.
        operations: per device, in order of execution.
    """

    devices: tuple[int, ...]
    head: int
    micro_batches: int
    depths: tuple[int, ...]
    overlapped: bool
    backward: bool
    operations: tuple[tuple[Operation, ...], ...]

    def route(self) -> tuple[Step, ...]:
        """Returns the way of every micro-batch, see `Step`."""
        return route(self.devices, self.head, self.backward)

    def messages(self, source: int, target: int) -> tuple[Operation, ...]:
        """Returns what ``target`` receives from ``source``, in order: what to post receives for ahead of their use."""
        return tuple(op for op in self.operations[target] if op.kind is Kind.RECEIVE and op.peer == source)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Returns the most micro-batches in flight at once, per stage: this times its activations is what it holds.

        Forward only, nothing is kept for a backward; but the leader keeps the training step of a micro-batch open
        until the head is done with it, and that is what is counted for stage 0.
        """
        peak = [0] * len(self.devices)
        for op, flight in in_flight(self):
            peak[op.stage] = max(peak[op.stage], flight)
        return tuple(peak)


def in_flight(schedule: Schedule) -> Iterator[tuple[Operation, int]]:
    """Yields every forward with the number of micro-batches in flight on its stage from then on."""
    flight = [0] * len(schedule.devices)
    ends = flight_ends(schedule.devices, schedule.head, schedule.backward)
    stage_of = {end: stage for stage, end in enumerate(ends)}
    for op in (op for operations in schedule.operations for op in operations):
        if op.kind is Kind.FORWARD:
            flight[op.stage] += 1
            yield op, flight[op.stage]
        stage = stage_of.get((op.kind, op.stage))
        if stage is not None:
            flight[stage] -= 1


def flight_ends(devices: tuple[int, ...], head: int, backward: bool) -> list[tuple[Kind, int]]:
    """Returns for each stage the operation (kind, stage) on the same device that ends a micro-batch's flight there."""
    if backward:
        return [(Kind.BACKWARD, stage) for stage in range(len(devices))]
    ends = [(Kind.FORWARD, stage) for stage in range(len(devices))]
    if head == devices[0]:
        ends[0] = (Kind.HEAD, len(devices))
    return ends
