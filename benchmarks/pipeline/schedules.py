"""Pipelines in proportion to the size of micro-batches, what bounds them, and policies to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.pipeline.depth import per_link_depth
from lightning_hetero.pipeline.decide.generate import SchedulePolicy
from lightning_hetero.pipeline.decide.schedule import Kind, PipelineTimes, Row, Step, route


def proportional(
    sizes: Sequence[float],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_s: Sequence[float] = (),
    loop_s: float = 0.0,
    head_s: tuple[float, float] = (0.0, 0.0),
    devices: Sequence[int] = (),
) -> PipelineTimes:
    """Returns the times of micro-batches that cost in proportion to their size.

    Args:
        sizes: of each micro-batch; ``[1.0] * M`` for M equal ones.
        forward_s, backward_s: [S], of size 1.
        link_s: [S-1], one way, either direction; none given: zeros.
        loop_s: one way, either direction.
        head_s: forward and backward.
        devices: see `PipelineTimes`; none given: each stage has its own.
    """

    def row(seconds: float) -> Row:
        return tuple(seconds * size for size in sizes)

    devices = tuple(devices or range(len(forward_s)))
    links_s, head = [*(link_s or [0.0] * (len(forward_s) - 1)), loop_s], sum(head_s)

    def seconds(step: Step) -> float:
        kinds = {Kind.SEND: links_s, Kind.FORWARD: forward_s, Kind.BACKWARD: backward_s}
        return head if step.kind is Kind.HEAD else kinds[step.kind][step.cut]

    return PipelineTimes(devices=devices, seconds=tuple(row(seconds(step)) for step in route(devices)))


def one_f_one_b(times: PipelineTimes) -> SchedulePolicy:
    """The textbook's: made for a chain with free links, where it needs the least memory for full speed."""
    depths = tuple(min(times.stages - i, times.micro_batches) for i in range(times.stages))
    return SchedulePolicy(depths=depths, priority="BHF")


def per_link(times: PipelineTimes) -> SchedulePolicy:
    """Ours where memory is no limit: every stage and every link's round trip has its micro-batches in flight."""
    one_way = [0.0] * times.stages
    for step, row in zip(route(times.devices), times.seconds, strict=True):
        if step.is_message:
            one_way[step.cut] += sum(row) / len(row) / 2.0
    depths = per_link_depth(bottleneck_s(times), one_way[:-1], one_way[-1], times.micro_batches)
    return SchedulePolicy(depths=depths)


def bottleneck_s(times: PipelineTimes) -> float:
    """Returns the time of the busiest device or link (one direction) per micro-batch, on average [s]."""
    busy: dict[tuple[int, int], float] = {}
    for step, row in zip(route(times.devices), times.seconds, strict=True):
        resource = (step.device, step.to_device)
        busy[resource] = busy.get(resource, 0.0) + sum(row)
    return max(busy.values()) / times.micro_batches


def fill_s(times: PipelineTimes) -> float:
    """Returns the time of a micro-batch that never waits, on average [s]."""
    return sum(map(sum, times.seconds)) / times.micro_batches


def model_s(times: PipelineTimes) -> float:
    """Returns ``fill + (M - 1) * bottleneck``, the estimate that plans are searched by [s]; no bound of either kind."""
    return fill_s(times) + (times.micro_batches - 1) * bottleneck_s(times)


def lower_bound_s(times: PipelineTimes) -> float:
    """Returns a makespan that no schedule beats [s].

    The longest way of one micro-batch; and for each device and link its whole work, plus the least that passes before
    any work can reach it and after it has done its last.
    """
    columns = list(zip(*times.seconds, strict=True))
    visits: dict[tuple[int, int], list[int]] = {}
    for i, step in enumerate(route(times.devices)):
        visits.setdefault((step.device, step.to_device), []).append(i)
    bounds = [max(map(math.fsum, columns))]
    for steps in visits.values():
        lead = min(math.fsum(column[: steps[0]]) for column in columns)
        tail = min(math.fsum(column[steps[-1] + 1 :]) for column in columns)
        bounds.append(lead + math.fsum(column[i] for i in steps for column in columns) + tail)
    return max(bounds)
