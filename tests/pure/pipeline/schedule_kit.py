"""Random pipelines, and two slow but plain machines to compare schedules with."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import strategies as st

from lightning_hetero.pipeline.decide.generate import SchedulePolicy
from lightning_hetero.pipeline.decide.schedule import Kind, Operation, PipelineTimes, Schedule, What, route

PRIORITIES = ("HFB", "HBF", "FHB", "FBH", "BHF", "BFH")


def token(op: Operation) -> str:
    """An operation in words: ``F3``, ``a3>2``, ``g3<1``."""
    if op.what is None:
        return f"{op.kind.value}{op.micro_batch}"
    return f"{op.what.value}{op.micro_batch}{op.kind.value}{op.peer}"


@st.composite
def pipelines(
    draw: st.DrawFn,
    *,
    whole: bool = True,
    least: float = 0.0,
    interleaved: bool = True,
) -> PipelineTimes:
    """Up to 5 stages and 6 uneven micro-batches of ``least`` to 4 seconds; whole ones unless told otherwise, so that
    sums are exact. Links may take no time in any case.
    """
    stages, micro = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    devices: tuple[int, ...] = tuple(range(stages))
    if interleaved and draw(st.booleans()):
        count = draw(st.integers(1, stages))
        rest = [draw(st.integers(0, count - 1)) for _ in range(stages - count)]
        devices = (0, *draw(st.permutations([*range(1, count), *rest])))
    rng = random.Random(draw(st.integers(0, 2**32)))  # one draw: Hypothesis is slow where there are many

    def row(low: float) -> tuple[float, ...]:
        return tuple(float(rng.randint(round(low), 4)) if whole else rng.uniform(low, 4.0) for _ in range(micro))

    lows = [0.0 if step.is_message else least for step in route(devices)]
    return PipelineTimes(devices=devices, seconds=tuple(map(row, lows)))


@st.composite
def policies(draw: st.DrawFn, times: PipelineTimes) -> SchedulePolicy:
    depths = draw(st.lists(st.integers(1, 7), min_size=times.stages, max_size=times.stages))
    return SchedulePolicy(depths=tuple(depths), priority=draw(st.sampled_from(PRIORITIES)))


def execute(schedule: Schedule, seed: int) -> list[tuple[int, Operation]]:
    """Executes the lists on devices of random speed, with real queues and made-up values.

    Sends are buffered and receives wait. A value is the history of how it was computed; every message is compared with
    what the receiver takes it for.

    Returns:
        What was executed, in order.

    Raises:
        AssertionError: a deadlock, an input that is not there, or a message taken for another one.
    """
    rng, last = random.Random(seed), len(schedule.devices)
    lists = schedule.operations
    at = [0] * len(lists)
    channels: dict[tuple[int, int], deque[Any]] = {}
    values: list[dict[Any, Any]] = [{} for _ in lists]
    done: list[tuple[int, Operation]] = []

    def outgoing(device: int, op: Operation) -> Any:
        return values[device].pop((op.what, op.stage, op.micro_batch))

    def take(device: int, op: Operation, value: Any) -> None:
        came_by = op.stage - 1 if op.what is What.ACTIVATION else op.stage + 1
        assert value[:3] == (op.what, came_by, op.micro_batch), f"{op} on device {device} got {value[:3]}"
        values[device]["in", op.what, op.stage, op.micro_batch] = value

    def need(device: int, what: What, stage: int, source: int, m: int) -> None:
        """Takes the input that was received, or handed over on the same device."""
        received = ("in", what, stage, m)
        values[device].pop(received if received in values[device] else (what, source, m))

    def compute(device: int, op: Operation) -> None:
        m, s = op.micro_batch, op.stage
        if op.kind is Kind.BACKWARD:
            need(device, What.GRADIENT, s, s + 1, m)
        elif s > 0:
            need(device, What.ACTIVATION, s, s - 1, m)
        if op.kind is Kind.BACKWARD:
            values[device].pop(("kept", s, m))
            if s > 0:
                values[device][What.GRADIENT, s, m] = (What.GRADIENT, s, m)
        elif op.kind is Kind.HEAD:
            values[device][What.GRADIENT, last, m] = (What.GRADIENT, last, m)
        else:
            values[device][What.ACTIVATION, s, m] = (What.ACTIVATION, s, m)
            values[device]["kept", s, m] = True

    def step(device: int) -> bool:
        op = lists[device][at[device]]
        if op.peer is None:
            compute(device, op)
        elif op.kind is Kind.SEND:
            channels.setdefault((device, op.peer), deque()).append(outgoing(device, op))
        elif not channels.get((op.peer, device)):
            return False
        else:
            take(device, op, channels[op.peer, device].popleft())
        at[device] += 1
        done.append((device, op))
        return True

    while any(i < len(row) for i, row in zip(at, lists, strict=True)):
        active = [d for d, row in enumerate(lists) if at[d] < len(row)]
        rng.shuffle(active)
        assert any(step(d) for d in active), f"deadlock at {[str(lists[d][at[d]]) for d in active]}"
    assert not any(values), f"left over: {values}"
    assert not any(channels.values())
    return done


def tick_by_tick(times: PipelineTimes, policy: SchedulePolicy) -> int:
    """Returns the makespan of greedy list scheduling, by stepping through whole seconds.

    For stages on devices of their own, overlapped transfers and computations of at least one second. It keeps sets
    of what is where instead of counts, and looks at everything each second.
    """
    steps, seconds, micro = route(times.devices), times.seconds, times.micro_batches
    place = {(step.kind, step.stage): i for i, step in enumerate(steps) if not step.is_message}
    here = {(0, m) for m in range(micro)}  # (step, micro-batch) that could start, depth aside
    running: dict[Any, tuple[int, int, int]] = {}  # device or link -> (end, step, micro-batch)
    queues: dict[Any, list[tuple[int, int]]] = {}
    started: set[tuple[int, int]] = set()
    finished: set[tuple[int, int]] = set()
    now = 0
    while len(finished) < len(steps) * micro:
        changed = True
        while changed:  # messages of no length arrive at once
            changed = False
            for resource, (end, i, m) in list(running.items()):
                if end <= now:
                    del running[resource]
                    finished.add((i, m))
                    changed = True
                    if i + 1 < len(steps):
                        step = steps[i + 1]
                        if step.is_message:
                            queues.setdefault(("link", step.device, step.to_device), []).append((i + 1, m))
                        else:
                            here.add((i + 1, m))
            for link, queue in queues.items():
                if queue and link not in running:
                    i, m = queue.pop(0)
                    running[link] = (now + int(seconds[i][m]), i, m)
                    changed = True
        for device in set(times.devices):
            if device in running:
                continue
            for kind in policy.priority:
                could = sorted(
                    (m, i) for i, m in here - started
                    if steps[i].device == device and steps[i].kind.value == kind and may(policy, times, place, i,
                                                                                         started, finished)
                )  # fmt: skip
                if could:
                    m, i = could[0]
                    started.add((i, m))
                    running[device] = (now + int(seconds[i][m]), i, m)
                    break
        now += 1
    return now - 1


def may(policy: SchedulePolicy, times: PipelineTimes, place: Any, i: int, started: Any, finished: Any) -> bool:
    """Whether the depth allows step ``i`` to start."""
    step = route(times.devices)[i]
    if step.kind is not Kind.FORWARD:
        return True
    forward, backward = place[Kind.FORWARD, step.stage], place[Kind.BACKWARD, step.stage]
    flying = sum(j == forward for j, _ in started) - sum(j == backward for j, _ in finished)
    return flying < policy.depths[step.stage]


def in_flight(schedule: Schedule) -> list[int]:
    """Returns the most micro-batches in flight at once, per stage."""
    now, peak = [0] * len(schedule.devices), [0] * len(schedule.devices)
    for op in (op for operations in schedule.operations for op in operations):
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            now[op.stage] += 1 if op.kind is Kind.FORWARD else -1
            peak[op.stage] = max(peak[op.stage], now[op.stage])
    return peak
