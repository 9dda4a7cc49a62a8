"""What a schedule is computed from: how long each part of the route takes, for each micro-batch.

Micro-batches may be uneven, so every time is a table by micro-batch. The model of the machine: a device computes one
thing at a time; a directed pair of devices is one link, which carries one message at a time (full duplex).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_hetero.pipeline.decide.schedule.operations import Kind, Step, What, route

__all__ = ["PipelineTimes"]

Row = tuple[float, ...]
Table = tuple[Row, ...]
Resource = tuple[int, int]  # device d as (d, d); the link from a to b as (a, b)


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of one pipeline: S stages, M micro-batches. An empty row or table stands for zeros.

    Attributes:
        forward_s, backward_s: [S][M] of the stages.
        before_forward_s, before_backward_s: [M] of the training step up to the backbone; on the leader.
        head_forward_s, head_backward_s: [M] of what follows the backbone, loss included; on the head's device.
        link_forward_s, link_backward_s: [S-1][M] of the messages between stage i and i + 1.
        loop_forward_s, loop_backward_s: [M] of the messages from the last stage to the head and back.
        devices: position of each stage's device, the leader's 0 first; empty: each stage has its own, in order.
        loop_back: whether the head stands on the leader; else (the textbook's chain) with the last stage.
        backward: False: forward only, for validation and prediction; the backward's times do not count.

    Raises:
        ValueError: a table of the wrong shape, a time that is negative or not finite, or devices that are not the
            numbers from 0 on, beginning with 0.
    """

    forward_s: Table
    backward_s: Table = ()
    before_forward_s: Row = ()
    before_backward_s: Row = ()
    head_forward_s: Row = ()
    head_backward_s: Row = ()
    link_forward_s: Table = ()
    link_backward_s: Table = ()
    loop_forward_s: Row = ()
    loop_backward_s: Row = ()
    devices: tuple[int, ...] = ()
    loop_back: bool = True
    backward: bool = True

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if stages == 0 or len(self.forward_s[0]) == 0:
            raise ValueError("PipelineTimes.forward_s is empty: need at least one stage and one micro-batch")
        micro = len(self.forward_s[0])
        for name in ("forward_s", "backward_s", "link_forward_s", "link_backward_s"):
            self._fill(name, stages - name.startswith("link"), micro)
        for name in ("before_forward_s", "before_backward_s", "head_forward_s", "head_backward_s",
                     "loop_forward_s", "loop_backward_s"):  # fmt: skip
            row = getattr(self, name) or (0.0,) * micro
            object.__setattr__(self, name, row)
            _check_row(name, row, micro)
        devices = self.devices or tuple(range(stages))
        object.__setattr__(self, "devices", devices)
        if len(devices) != stages or devices[0] != 0 or set(devices) != set(range(max(devices) + 1)):
            raise ValueError(
                f"PipelineTimes.devices={devices!r} must give each of the {stages} stages a position: the numbers "
                "from 0 on, none left out, the leader's 0 first"
            )

    def _fill(self, name: str, rows: int, micro: int) -> None:
        table: Table = getattr(self, name) or ((0.0,) * micro,) * rows
        object.__setattr__(self, name, table)
        if len(table) != rows:
            raise ValueError(f"PipelineTimes.{name} has {len(table)} rows, need {rows}")
        for i, row in enumerate(table):
            _check_row(f"{name}[{i}]", row, micro)

    @classmethod
    def proportional(
        cls,
        sizes: Sequence[float],
        *,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        link_s: Sequence[float] = (),
        loop_s: float = 0.0,
        before_s: tuple[float, float] = (0.0, 0.0),
        head_s: tuple[float, float] = (0.0, 0.0),
        devices: Sequence[int] = (),
        loop_back: bool = True,
    ) -> PipelineTimes:
        """Returns the times of micro-batches that cost in proportion to their size.

        Args:
            sizes: of each micro-batch; ``[1.0] * M`` for M equal ones.
            forward_s, backward_s: [S], of size 1.
            link_s: [S-1], one way, either direction; none given: zeros.
            loop_s: one way, either direction.
            before_s, head_s: forward and backward.
            devices, loop_back: as above.
        """

        def row(seconds: float) -> Row:
            return tuple(seconds * size for size in sizes)

        def table(seconds: Sequence[float]) -> Table:
            return tuple(row(one) for one in seconds)

        return cls(
            forward_s=table(forward_s), backward_s=table(backward_s),
            before_forward_s=row(before_s[0]), before_backward_s=row(before_s[1]),
            head_forward_s=row(head_s[0]), head_backward_s=row(head_s[1]),
            link_forward_s=table(link_s), link_backward_s=table(link_s),
            loop_forward_s=row(loop_s), loop_backward_s=row(loop_s),
            devices=tuple(devices), loop_back=loop_back,
        )  # fmt: skip

    def forward_only(self) -> PipelineTimes:
        """Returns the same pipeline for validation and prediction."""
        return replace(self, backward=False)

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def micro_batches(self) -> int:
        return len(self.forward_s[0])

    @property
    def head(self) -> int:
        """Position of the head's device."""
        return self.devices[0] if self.loop_back else self.devices[-1]

    def route(self) -> tuple[Step, ...]:
        """Returns the way of every micro-batch, see `Step`."""
        return route(self.devices, self.head, self.backward)

    @cached_property
    def seconds(self) -> Table:
        """Seconds of each step of the route, by micro-batch."""
        return tuple(self._seconds(step) for step in self.route())

    def _seconds(self, step: Step) -> Row:
        at = step.stage
        if step.what is What.ACTIVATION:
            return (*self.link_forward_s, self.loop_forward_s)[step.cut]
        if step.what is What.GRADIENT:
            return (*self.link_backward_s, self.loop_backward_s)[step.cut]
        if step.kind is Kind.HEAD:
            return _sum(self.head_forward_s, self.head_backward_s) if self.backward else self.head_forward_s
        if step.kind is Kind.FORWARD:
            return self.forward_s[at] if at else _sum(self.before_forward_s, self.forward_s[0])
        return self.backward_s[at] if at else _sum(self.backward_s[0], self.before_backward_s)

    @property
    def bottleneck_s(self) -> float:
        """Time of the busiest device or link (one direction) per micro-batch, on average."""
        return max(self._busy_s().values()) / self.micro_batches

    @property
    def fill_s(self) -> float:
        """Time of a micro-batch that never waits, on average."""
        return sum(map(sum, self.seconds)) / self.micro_batches

    @property
    def model_s(self) -> float:
        """``fill_s + (M - 1) * bottleneck_s``: the estimate that plans are searched by (ours). Neither a bound from
        below nor from above: parts of the fill overlap, and a schedule may wait in vain.
        """
        return self.fill_s + (self.micro_batches - 1) * self.bottleneck_s

    def lower_bound_s(self) -> float:
        """Returns a makespan that no schedule beats.

        The longest way of one micro-batch; and for each device and link its whole work, plus the least that passes
        before any work can reach it and after it has done its last.
        """
        micro, table = range(self.micro_batches), self.seconds
        columns = [[row[m] for row in table] for m in micro]
        visits: dict[Resource, list[int]] = {}
        for i, step in enumerate(self.route()):
            visits.setdefault((step.device, step.to_device), []).append(i)
        bounds = [max(math.fsum(column) for column in columns)]
        for steps in visits.values():
            lead = min(math.fsum(column[: steps[0]]) for column in columns)
            tail = min(math.fsum(column[steps[-1] + 1 :]) for column in columns)
            bounds.append(lead + math.fsum(table[i][m] for i in steps for m in micro) + tail)
        return max(bounds)

    def _busy_s(self) -> dict[Resource, float]:
        busy: dict[Resource, float] = {}
        for step, row in zip(self.route(), self.seconds, strict=True):
            resource = (step.device, step.to_device)
            busy[resource] = busy.get(resource, 0.0) + sum(row)
        return busy


def _sum(a: Row, b: Row) -> Row:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _check_row(name: str, row: Row, micro: int) -> None:
    if len(row) != micro:
        raise ValueError(f"PipelineTimes.{name} has {len(row)} times, but there are {micro} micro-batches")
    for m, value in enumerate(row):
        if not 0.0 <= value < math.inf:
            raise ValueError(
                f"PipelineTimes.{name}[{m}]={value!r} must be a finite number >= 0 (seconds)"
            )
