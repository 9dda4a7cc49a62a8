"""The generator: list scheduling of every operation on modelled devices and links (layer P).

A device that is free starts, of what is ready, what the policy puts first; it never waits for something better.
Two consequences hold by construction, whatever the times: every stage handles F, H and B each in micro-batch order
(its inputs come in order because links are first in, first out), so messages need no tags; and the lists never
deadlock, because the order in which they were generated is one in which they can be executed. Nor does the
generator: the oldest unfinished micro-batch has nothing older in flight, so no depth holds it up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from lightning_hetero.pipeline.decide.schedule import Kind, Operation, PipelineTimes, Schedule, Step, route


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """How much may be in flight, and what goes first.

    Attributes:
        depths: most micro-batches in flight, per stage; at least 1.
        priority: of what a device could do next, the first kind wins; a permutation of ``"HFB"``. The default feeds
            the stages behind first; the textbook's 1F1B is ``"BHF"``.
    """

    depths: tuple[int, ...]
    priority: str = "HFB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When each computation of a schedule runs, as modelled.

    Attributes:
        devices: by device its computations in order, each with start and end [s].
        makespan_s: end of the last one [s].
    """

    devices: tuple[tuple[tuple[Operation, float, float], ...], ...]
    makespan_s: float

    def busy_s(self) -> tuple[float, ...]:
        """Returns how long each device computes [s]."""
        return tuple(sum(end - start for _, start, end in one) for one in self.devices)


def generate(times: PipelineTimes, policy: SchedulePolicy) -> Schedule:
    """Returns each device's operations in order of execution; transfers run during computation.

    Args:
        times: what each part of the way takes.
        policy: what may be in flight and what goes first.

    >>> seconds = {"F": 1.0, "H": 0.0, "B": 2.0, ">": 0.0}
    >>> times = PipelineTimes(devices=(0, 1), seconds=tuple((seconds[s.kind.value],) * 2 for s in route((0, 1))))
    >>> for operations in generate(times, SchedulePolicy(depths=(2, 2))).operations:
    ...     print(*(f"{op.kind.value}{op.micro_batch}" for op in operations))
    F0 >0 F1 >1 <0 H0 >0 <1 H1 >1 <0 B0 <1 B1
    <0 F0 >0 <1 F1 >1 <0 B0 >0 <1 B1 >1
    """
    steps = route(times.devices)
    lists: list[list[Operation]] = [[] for _ in range(max(times.devices) + 1)]
    on_the_way: dict[tuple[int, int], deque[tuple[Step, int]]] = {}
    received = {step: 0 for step in steps}
    for _, i, micro_batch in _Machine(times, policy).run():
        # A send follows what it sends; a receive precedes what needs it, behind those of messages sent before on
        # the same link.
        step, before = steps[i], steps[i - 1] if i else steps[i]
        if before.is_message:
            arriving = on_the_way[before.device, step.device]
            while received[before] <= micro_batch:
                came, m = arriving.popleft()
                lists[step.device].append(Operation(Kind.RECEIVE, came.to_stage, m, came.what, came.device))
                received[came] += 1
        lists[step.device].append(Operation(step.kind, step.stage, micro_batch))
        if i + 1 < len(steps) and steps[i + 1].is_message:
            sent = steps[i + 1]
            lists[step.device].append(Operation(Kind.SEND, sent.stage, micro_batch, sent.what, sent.to_device))
            on_the_way.setdefault((step.device, sent.to_device), deque()).append((sent, micro_batch))
    return Schedule(devices=times.devices, operations=tuple(map(tuple, lists)))


def makespan_s(times: PipelineTimes, policy: SchedulePolicy) -> float:
    """Returns how long the generated schedule takes [s], without writing it out: for ranking many plans."""
    machine = _Machine(times, policy)
    machine.run()
    return machine.now_s


def modelled(times: PipelineTimes, policy: SchedulePolicy) -> Timeline:
    """Returns when the computations of the generated schedule run."""
    machine, steps = _Machine(times, policy), route(times.devices)
    devices: list[list[tuple[Operation, float, float]]] = [[] for _ in range(max(times.devices) + 1)]
    for start_s, i, micro_batch in machine.run():
        operation = Operation(steps[i].kind, steps[i].stage, micro_batch)
        devices[steps[i].device].append((operation, start_s, start_s + times.seconds[i][micro_batch]))
    return Timeline(devices=tuple(map(tuple, devices)), makespan_s=machine.now_s)


class _Machine:
    """The state of the modelled devices and links. Steps are known by their place on the route.

    Everything is a count: of the micro-batches that have arrived at a step, and of those it is done with.
    """

    def __init__(self, times: PipelineTimes, policy: SchedulePolicy) -> None:
        self.now_s = 0.0
        self._steps = steps = route(times.devices)
        self._seconds = times.seconds
        self._arrived = [times.micro_batches] + [0] * len(steps)  # one more than steps: the way's end
        self._done = [0] * len(steps)
        self._idle = [True] * (max(times.devices) + 1)
        self._events: list[tuple[float, int]] = []  # when a step ends, and which
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._log: list[tuple[float, int, int]] = []
        # A forward starts only while `done[forward] - done[gate] < room`, with the same stage's backward as its gate.
        place = {(step.kind, step.stage): i for i, step in enumerate(steps) if not step.is_message}
        self._gates = {
            place[Kind.FORWARD, stage]: (place[Kind.BACKWARD, stage], depth)
            for stage, depth in enumerate(policy.depths)
        }
        self._choices = [
            [[i for i, one in enumerate(steps) if (one.device, one.kind) == (device, kind)] for kind in policy.priority]
            for device in range(len(self._idle))
        ]

    def run(self) -> list[tuple[float, int, int]]:
        """Runs to the end; returns the computations in order: start [s], step, micro-batch."""
        events = self._events
        self._dispatch(set(range(len(self._idle))))
        while events:
            self.now_s = events[0][0]
            free: set[int] = set()
            while events and events[0][0] == self.now_s:  # all that happens at once, before anyone chooses
                self._finish(heappop(events)[1], free)
            self._dispatch(free)
        return self._log

    def _finish(self, i: int, free: set[int]) -> None:
        """Ends step ``i`` for its next micro-batch, hands the result on and adds the devices that may go on."""
        step = self._steps[i]
        self._done[i] += 1
        free.add(step.to_device)
        if not step.is_message:
            self._idle[step.device] = True
        if i + 1 == len(self._steps) or not self._steps[i + 1].is_message:
            self._arrived[i + 1] += 1
        else:
            self._transfer(i + 1)

    def _transfer(self, i: int) -> None:
        """Queues a message behind those that its link carries already."""
        step, micro_batch = self._steps[i], self._arrived[i]
        self._arrived[i] += 1
        link = (step.device, step.to_device)
        start_s = max(self.now_s, self._link_free_s.get(link, 0.0))
        self._link_free_s[link] = end_s = start_s + self._seconds[i][micro_batch]
        heappush(self._events, (end_s, i))

    def _dispatch(self, devices: set[int]) -> None:
        """Starts what the devices can do next.

        Among several stages of one kind: rounds of as many micro-batches as there are devices; within a round the
        forward of the earliest stage, the backward of the latest (Narayanan et al., SC 2021).
        """
        for device in sorted(devices):
            if not self._idle[device]:
                continue
            for steps in self._choices[device]:
                ready = [i for i in steps if self._is_ready(i)]
                if ready:
                    self._start(min(ready, key=lambda i: (self._done[i] // len(self._idle), i)))
                    break

    def _is_ready(self, i: int) -> bool:
        gate, room = self._gates.get(i, (i, 1))
        return self._arrived[i] > self._done[i] and self._done[i] - self._done[gate] < room

    def _start(self, i: int) -> None:
        step, micro_batch = self._steps[i], self._done[i]
        self._idle[step.device] = False
        self._log.append((self.now_s, i, micro_batch))
        heappush(self._events, (self.now_s + self._seconds[i][micro_batch], i))
