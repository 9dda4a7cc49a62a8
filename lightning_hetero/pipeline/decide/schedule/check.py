"""Whether a schedule can be executed and computes what it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from lightning_hetero.pipeline.decide.schedule.operations import Kind, Operation, Schedule, in_flight
from lightning_hetero.pipeline.decide.schedule.replay import causal_order

__all__ = ["check"]

Place = tuple[int, Operation]


def check(schedule: Schedule) -> None:
    """Refuses a schedule that would hang, skip or repeat work, mix up messages or hold too much.

    In this order:

    1. shape: every stage has a device and a depth, the head stands with the first or the last stage;
    2. once: every operation of every micro-batch stands exactly once in the right list, and nothing else does;
    3. micro-batch order: each device does each of its steps in the order of micro-batches;
    4. way: of one micro-batch, a device does its steps in the order of the route (receive, compute, send; F, H, B);
    5. channel: what a device receives from another is what that one sends, in the same order (no tags);
    6. depth: no stage has more in flight than allowed;
    7. deadlock: the lists can be executed to the end, with sends that never wait if overlapped, else with sends and
       receives that wait for one another.

    Raises:
        ValueError: names the first rule that does not hold, and the operation.
    """
    _check_shape(schedule)
    order = {place: i for i, place in enumerate(_needed(schedule))}
    _check_once(schedule, order)
    _check_micro_batch_order(schedule)
    _check_way(schedule, order)
    _check_channels(schedule)
    _check_depths(schedule)
    for _ in causal_order(schedule):
        pass


def _needed(schedule: Schedule) -> Iterator[Place]:
    """Yields what must be done, micro-batch by micro-batch on its way."""
    for m in range(schedule.micro_batches):
        for step in schedule.route():
            if step.is_message:
                yield step.device, Operation(Kind.SEND, step.stage, m, step.what, step.to_device)
                yield step.to_device, Operation(Kind.RECEIVE, step.to_stage, m, step.what, step.device)
            else:
                yield step.device, Operation(step.kind, step.stage, m)


def _check_shape(schedule: Schedule) -> None:
    devices, count = schedule.devices, len(schedule.operations)
    if not devices or devices[0] != 0 or set(devices) != set(range(count)):
        raise ValueError(f"shape: stages on devices {devices} with {count} lists; need devices 0 on, 0 first")
    if schedule.head not in (devices[0], devices[-1]):
        raise ValueError(f"shape: head on device {schedule.head}, need {devices[0]} or {devices[-1]}")
    if schedule.micro_batches < 1:
        raise ValueError(f"shape: {schedule.micro_batches} micro-batches, need at least 1")
    if len(schedule.depths) != len(devices) or min(schedule.depths) < 1:
        raise ValueError(f"shape: depths {schedule.depths} of {len(devices)} stages, need one >= 1 per stage")


def _places(schedule: Schedule) -> Iterator[Place]:
    for device, operations in enumerate(schedule.operations):
        for op in operations:
            yield device, op


def _check_once(schedule: Schedule, order: dict[Place, int]) -> None:
    counts = Counter(_places(schedule))
    for device, op in _places(schedule):
        if (device, op) not in order:
            raise ValueError(f"once: {op} has no business on device {device}")
        if counts[device, op] > 1:
            raise ValueError(f"once: {op} stands {counts[device, op]} times in the list of device {device}")
    for device, op in order:
        if (device, op) not in counts:
            raise ValueError(f"once: {op} is missing on device {device}")


def _check_micro_batch_order(schedule: Schedule) -> None:
    _check_ascending(
        schedule,
        group=lambda device, op: (device, op.kind, op.stage, op.what, op.peer),
        value=lambda _, op: op.micro_batch,
        rule="micro-batch order",
    )


def _check_way(schedule: Schedule, order: dict[Place, int]) -> None:
    _check_ascending(
        schedule,
        group=lambda device, op: (device, op.micro_batch),
        value=lambda device, op: order[device, op],
        rule="way",
    )


def _check_ascending(
    schedule: Schedule,
    *,
    group: Callable[[int, Operation], tuple[object, ...]],
    value: Callable[[int, Operation], int],
    rule: str,
) -> None:
    before: dict[tuple[object, ...], Operation] = {}
    for device, op in _places(schedule):
        key = group(device, op)
        last = before.get(key)
        if last is not None and value(device, last) > value(device, op):
            raise ValueError(f"{rule}: {last} stands before {op} in the list of device {device}")
        before[key] = op


def _check_channels(schedule: Schedule) -> None:
    for source, operations in enumerate(schedule.operations):
        for target in range(len(schedule.operations)):
            sent = [op for op in operations if op.kind is Kind.SEND and op.peer == target]
            for out, due in zip(sent, schedule.messages(source, target), strict=True):
                if (out.what, out.cut, out.micro_batch) != (due.what, due.cut, due.micro_batch):
                    raise ValueError(f"channel: device {source} sends {out} where device {target} expects {due}")


def _check_depths(schedule: Schedule) -> None:
    for op, flight in in_flight(schedule):
        depth = schedule.depths[op.stage]
        if flight > depth:
            raise ValueError(f"depth: {op} is number {flight} in flight on stage {op.stage}, which may have {depth}")
