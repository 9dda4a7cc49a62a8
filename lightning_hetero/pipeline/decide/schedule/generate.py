"""The generator: list scheduling of every operation on modelled devices and links.

A device that is free starts, of what is ready, what the policy puts first; it never waits for something better
(but see ``SchedulePolicy.warm_up``).
Two consequences hold by construction, whatever the times: every stage handles F, H and B each in micro-batch order
(its inputs come in order because links are first in, first out), so messages need no tags; and the lists never
deadlock, because the order in which they were generated is one in which they can be executed. Nor does the
generator: the oldest unfinished micro-batch has nothing older in flight, so no depth holds it up.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from lightning_hetero.pipeline.decide.schedule.operations import Kind, Operation, Schedule, flight_ends
from lightning_hetero.pipeline.decide.schedule.policy import SchedulePolicy, blocking, per_link
from lightning_hetero.pipeline.decide.schedule.times import PipelineTimes

__all__ = ["generate", "makespan_s"]

Log = list[tuple[int, int]]
"""What was started, in order of time: a step by its place on the route, and the micro-batch."""


def generate(times: PipelineTimes, policy: SchedulePolicy | None = None, *, overlap: bool = True) -> Schedule:
    """Returns each device's operations in order of execution.

    Args:
        times: what each part of the way takes.
        policy: what may be in flight and what goes first; None: `per_link`, or `blocking` without overlap.
        overlap: whether transfers run beside computation; else they occupy both devices.

    Raises:
        ValueError: the policy is for another number of stages, or asks for all forwards first with a depth below the
            number of micro-batches, or for turns (``warm_up``) that do not fit together: these would wait forever.

    >>> times = PipelineTimes.proportional([1.0] * 2, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    >>> for operations in generate(times).operations:
    ...     print(*(op.token(with_stage=False) for op in operations))
    F0 a0>1 F1 a1>1 a0<1 H0 g0>1 a1<1 H1 g1>1 g0<1 B0 g1<1 B1
    a0<0 F0 a0>0 a1<0 F1 a1>0 g0<0 B0 g0>0 g1<0 B1 g1>0
    """
    policy = _policy(times, policy, overlap)
    log = _Run(times, policy, overlap).starts()
    return Schedule(
        devices=times.devices,
        head=times.head,
        micro_batches=times.micro_batches,
        depths=policy.depths,
        overlapped=overlap,
        backward=times.backward,
        operations=_lists(times, log, overlap),
    )


def makespan_s(times: PipelineTimes, policy: SchedulePolicy | None = None, *, overlap: bool = True) -> float:
    """Returns how long the generated schedule takes [s], without writing it out: for ranking many plans.

    Raises:
        ValueError: as `generate`.
    """
    run = _Run(times, _policy(times, policy, overlap), overlap)
    run.starts()
    return run.now_s


def _policy(times: PipelineTimes, policy: SchedulePolicy | None, overlap: bool) -> SchedulePolicy:
    if policy is None:
        policy = per_link(times) if overlap else blocking(times)
    if len(policy.depths) != times.stages:
        raise ValueError(f"the policy has {len(policy.depths)} depths, but the pipeline has {times.stages} stages")
    if policy.forwards_first and min(policy.depths) < times.micro_batches:
        raise ValueError(
            f"forwards_first with depths {policy.depths} never ends: the backward waits for all "
            f"{times.micro_batches} forwards, so the depths must be {times.micro_batches}"
        )
    devices = max(times.devices) + 1
    if policy.warm_up and len(policy.warm_up) != devices:
        raise ValueError(f"the policy has {len(policy.warm_up)} warm-ups, but the pipeline has {devices} devices")
    return policy


def _lists(times: PipelineTimes, log: Log, overlap: bool) -> tuple[tuple[Operation, ...], ...]:
    """Writes down who does what, messages included.

    Overlapped, the log has computations only: a send follows what it sends, a receive precedes what needs it. Where
    a link carries the messages of several stages, those sent before are received before.
    """
    steps = times.route()
    lists: list[list[Operation]] = [[] for _ in range(max(times.devices) + 1)]
    on_the_way: dict[tuple[int, int], deque[tuple[int, int]]] = {}
    received = [0] * len(steps)

    def send(i: int, micro_batch: int) -> None:
        step = steps[i]
        op = Operation(Kind.SEND, step.stage, micro_batch, step.what, step.to_device)
        lists[step.device].append(op)

    def receive(i: int, micro_batch: int) -> None:
        step = steps[i]
        op = Operation(Kind.RECEIVE, step.to_stage, micro_batch, step.what, step.device)
        lists[step.to_device].append(op)
        received[i] += 1

    for i, micro_batch in log:
        step = steps[i]
        if step.is_message:
            send(i, micro_batch)
            receive(i, micro_batch)
            continue
        if overlap and i > 0 and steps[i - 1].is_message:
            arriving = on_the_way[steps[i - 1].device, step.device]
            while received[i - 1] <= micro_batch:
                receive(*arriving.popleft())
        lists[step.device].append(Operation(step.kind, step.stage, micro_batch))
        if overlap and i + 1 < len(steps) and steps[i + 1].is_message:
            send(i + 1, micro_batch)
            on_the_way.setdefault((step.device, steps[i + 1].to_device), deque()).append((i + 1, micro_batch))
    return tuple(map(tuple, lists))


class _Run:
    """The state of the modelled machine. Steps are known by their place on the route.

    Everything is a count: of the micro-batches that have arrived at a step, and of those it is done with.
    """

    def __init__(self, times: PipelineTimes, policy: SchedulePolicy, overlap: bool) -> None:
        self.now_s = 0.0
        self._steps = steps = times.route()
        self._seconds = times.seconds
        self._overlap = overlap
        self._turn = max(times.devices) + 1
        self._arrived = [times.micro_batches] + [0] * len(steps)  # one more than steps: the way's end
        self._done = [0] * len(steps)
        self._idle = [True] * self._turn
        self._events: list[tuple[float, int]] = []  # when a step ends, and which
        self._link_free_s: dict[tuple[int, int], float] = {}
        self._outbox: dict[tuple[int, int], deque[int]] = {}  # messages that wait for both devices, by link
        self._log: Log = []
        self._warm_up = policy.warm_up
        self._set_up_gates(times, policy)
        self._set_up_choices(policy)

    def _set_up_gates(self, times: PipelineTimes, policy: SchedulePolicy) -> None:
        """A step starts only while ``done[step] - done[gate] < room`` and if ``done[before] >= least``."""
        place = {(step.kind, step.stage): i for i, step in enumerate(self._steps) if not step.is_message}
        self._gate, self._room = list(range(len(self._steps))), [1] * len(self._steps)  # itself: always open
        self._before, self._least = list(range(len(self._steps))), [0] * len(self._steps)
        for stage, end in enumerate(flight_ends(times.devices, times.head, times.backward)):
            forward = place[Kind.FORWARD, stage]
            if place[end] != forward:
                self._gate[forward], self._room[forward] = place[end], policy.depths[stage]
            if policy.forwards_first and end[0] is Kind.BACKWARD:
                self._before[place[end]], self._least[place[end]] = forward, times.micro_batches

    def _set_up_choices(self, policy: SchedulePolicy) -> None:
        """Lists each device's computations, kind by kind in order of priority."""
        self._choices: list[dict[Kind, list[int]]] = [
            {
                kind: [i for i, step in enumerate(self._steps) if (step.device, step.kind) == (device, kind)]
                for kind in map(Kind, policy.priority)
            }
            for device in range(self._turn)
        ]

    def starts(self) -> Log:
        """Runs to the end and returns what was started, in order of time.

        Raises:
            ValueError: turns that do not fit together.
        """
        events = self._events
        self._dispatch(set(range(self._turn)))
        while events:
            self.now_s = events[0][0]
            free: set[int] = set()
            while events and events[0][0] == self.now_s:  # all that happens at once, before anyone chooses
                self._finish(heappop(events)[1], free)
            self._dispatch(free)
        if self._done[-1] < self._arrived[0]:
            raise ValueError(
                f"warm_up={self._warm_up} comes to a standstill after {len(self._log)} operations: no device can "
                "take its turn; change the warm-up, or make the micro-batches a multiple of the devices"
            )
        return self._log

    def _finish(self, i: int, free: set[int]) -> None:
        """Ends step ``i`` for its next micro-batch, hands the result on and adds the devices that may go on."""
        step = self._steps[i]
        self._done[i] += 1
        free.add(step.to_device)
        if not step.is_message or not self._overlap:
            self._idle[step.device] = self._idle[step.to_device] = True
            free.add(step.device)
        if i + 1 == len(self._steps) or not self._steps[i + 1].is_message:
            self._arrived[i + 1] += 1
        elif self._overlap:
            self._transfer(i + 1)
        else:
            self._outbox.setdefault((step.device, self._steps[i + 1].to_device), deque()).append(i + 1)

    def _transfer(self, i: int) -> None:
        """Queues a message behind those that its link carries already."""
        step, micro_batch = self._steps[i], self._arrived[i]
        self._arrived[i] += 1
        link = (step.device, step.to_device)
        start_s = max(self.now_s, self._link_free_s.get(link, 0.0))
        self._link_free_s[link] = end_s = start_s + self._seconds[i][micro_batch]
        heappush(self._events, (end_s, i))

    def _dispatch(self, devices: set[int]) -> None:
        """Starts what can be started: messages that need both devices, then computations.

        A device with such a message does not wait for a busy peer but computes: waiting costs up to a quarter more.
        """
        for (source, target), messages in self._outbox.items():
            if messages and self._idle[source] and self._idle[target]:
                self._start(messages.popleft())
        for device in sorted(devices):
            if self._idle[device]:
                i = self._choose(device)
                if i is not None:
                    self._start(i)

    def _choose(self, device: int) -> int | None:
        """Returns what the device does next, or None.

        Among several stages of one kind: rounds of as many micro-batches as there are devices; within a round the
        forward of the earliest stage, the backward of the latest (Narayanan et al., SC 2021).
        """
        for group in self._in_turn(device) if self._warm_up else self._choices[device].values():
            ready = [i for i in group if self._ready(i)]
            if ready:
                return ready[0] if len(ready) == 1 else min(ready, key=self._round)
        return None

    def _round(self, i: int) -> tuple[int, int]:
        return self._done[i] // self._turn, i

    def _in_turn(self, device: int) -> list[list[int]]:
        """Returns what the device may do next, heads aside exactly one step, ready or not."""
        choices, done = self._choices[device], self._done
        forwards, backwards = choices[Kind.FORWARD], choices[Kind.BACKWARD]
        ahead = sum(done[i] for i in forwards) - sum(done[i] for i in backwards)
        todo = [[i for i in group if done[i] < self._arrived[0]] for group in (forwards, backwards)]
        group = todo[0] if todo[0] and (ahead <= self._warm_up[device] or not todo[1]) else todo[1]
        return [choices[Kind.HEAD], [min(group, key=self._round)] if group else []]

    def _ready(self, i: int) -> bool:
        done = self._done
        return (
            self._arrived[i] > done[i]
            and done[i] - done[self._gate[i]] < self._room[i]
            and done[self._before[i]] >= self._least[i]
        )

    def _start(self, i: int) -> None:
        step, micro_batch = self._steps[i], self._done[i]
        self._idle[step.device] = self._idle[step.to_device] = False
        self._log.append((i, micro_batch))
        heappush(self._events, (self.now_s + self._seconds[i][micro_batch], i))
